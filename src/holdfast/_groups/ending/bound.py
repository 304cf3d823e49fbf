"""Report a process that had a session and stays idle after the end of its main thread; optionally end it.

The cause may be an `atexit` handler, a thread that is no daemon, a child process that does not end, the
finalisation of the interpreter, or a destructor of a C++ library. The time counts from the end of the main
thread, and only while the process and its children use no CPU time, read and write nothing, and no data moves
on their connections, and while Holdfast itself is idle: saves and the closing of sessions have deadlines of
their own. So a last upload is never ended, nor a program that goes on after its session, nor a fork.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast._core.base.stacks import calls_of_frame, frame_of
from holdfast._core.process.exits import is_working, on_main_thread_end
from holdfast._core.process.heart import heart
from holdfast._core.process.under_way import wait_for_works
from holdfast._core.roster.process import activity, children_of
from holdfast.errors import HoldfastError

EXIT_LATE = 87
"""Exit code of a process that was still alive after the limit."""
WINDOW = 5.0
"""Maximum seconds of one activity measurement."""
IDLE = 0.01
"""CPU time a second below which a thread does nothing: those that only wait look at a clock now and then. It
is not the sum that counts: gloo and NCCL have several such threads for each group."""
MARGIN = 10.0
"""Seconds after the bound at which faulthandler ends a process that can't run Python any more, and after that
the kernel."""
FINAL = 120.0
"""Seconds that such a process has at least, whatever the bound: there nothing can look whether it makes
progress, and the end of an interpreter with torch in it takes long on a busy machine."""


class _Bound:
    """The idle timer of one process; a duty of the heart from the end of the main thread on."""

    def __init__(self, who: str) -> None:
        self.pid, self.who = os.getpid(), who
        self.seconds: float | None = None
        """Idle seconds after which the process is ended; None: never."""
        self.told_after = self.interval = 0.0
        self._is_told = False
        self.bodies: list[threading.Thread] = []
        """Threads that have begun a session."""
        self._begun = self._alarms = False
        self._since = self._looked = 0.0
        self._cpu: dict[int, float] = {}
        self._moved: list[int] = []

    def begin(self) -> None:
        """Start the timer, at the end of the main thread."""
        if self.pid != os.getpid() or self._begun:
            return
        self._begun = True
        self.interval = min(WINDOW, self.told_after / 4, (self.seconds or WINDOW) / 4)
        self._looked = time.monotonic()
        self._cpu, self._moved = activity()
        self._note_activity()
        try:
            heart.begin(self)
        except HoldfastError:
            # Nothing can look any more whether the process does something, so it is not ended.
            if self.seconds is not None:
                disarm()

    def beat(self) -> None:
        """Advance the idle timer, or restart it if the process is active."""
        now = time.monotonic()
        cpu, moved = activity()
        # What this thread computes, which beats and looks, is no work of the program.
        cpu.pop(threading.get_native_id(), None)
        most = max((used - self._cpu.get(thread, 0.0) for thread, used in cpu.items()), default=0.0)
        busy = most > IDLE * (now - self._looked) or moved != self._moved
        self._cpu, self._moved, self._looked = cpu, moved, now
        if busy or self._is_at_work():
            self._note_activity()
        elif self.seconds is not None and now - self._since >= self.seconds:
            self._end(self.seconds)
        elif not self._is_told and now - self._since >= self.told_after:
            self._is_told = True
            ends = f"is ended after {self.seconds:g} s (after_end)" if self.seconds else "is not ended"
            _say(
                f"{self.who}: its main thread has come to the end of the program, and its process has done "
                f"nothing for {now - self._since:.0f} s; {'; '.join(_holders())}. It {ends}.\n"
            )

    def close(self) -> None:
        """Nothing to release before the end of the process."""

    def bound_finalisation(self) -> None:
        """Have the kernel end the process, too: faulthandler ends with the interpreter, and C code may go on
        after that. Not before the program's own exit handlers, which may use the alarm, or execute another
        program, which would inherit it."""
        free = not signal.getitimer(signal.ITIMER_REAL)[0]
        self._alarms = self._begun and self.pid == os.getpid() and free
        self._set_alarm()

    def _note_activity(self) -> None:
        self._since = time.monotonic()
        if self.seconds is not None:
            arm(max(self.seconds, FINAL) + MARGIN)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self.seconds is not None and self._alarms and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, max(self.seconds, FINAL) + 2 * MARGIN)

    def _is_at_work(self) -> bool:
        """Return whether a thread that had a session, or work of Holdfast itself, is still running."""
        goes_on = any(thread.is_alive() and not thread.daemon for thread in self.bodies)
        return goes_on or is_working() or bool(wait_for_works(0.0))

    def _end(self, seconds: float) -> None:
        _say(
            f"{self.who} ends with exit code {EXIT_LATE}: its process was still there {seconds:g} s "
            f"after the end of its program, and did nothing; {'; '.join(_holders())}. If it waits for "
            "something that comes, give a longer after_end, or after_end=None.\n"
        )
        _kill_children()
        os._exit(EXIT_LATE)


SWITCH_NO_MORE = 3600.0
"""Seconds after which another thread may ask for the GIL."""
_known: _Bound | None = None
_lock = threading.Lock()


def watch_end(who: str, told_after: float, seconds: float | None) -> None:
    """Tell, one time, that this process has done nothing for `told_after` seconds after its main thread's
    end; with `seconds`, end it with exit code 87 after these.

    After several calls the longest bound holds. who: the process in messages, such as "rank 3".
    """
    global _known
    with _lock:
        if _known is None or _known.pid != os.getpid():
            _known = known = _Bound(who)
            on_main_thread_end(known.begin)
            atexit.register(known.bound_finalisation)
            # A process of multiprocessing waits for its children before the interpreter's end.
            multiprocessing.util.Finalize(None, known.begin, exitpriority=100)
        _known.told_after = max(_known.told_after, told_after)
        if seconds is not None:
            _known.seconds = max(_known.seconds or 0.0, seconds)
        body = threading.current_thread()
        # A program may begin sessions on many threads, one after another: threads that ended are dropped.
        _known.bodies = [thread for thread in _known.bodies if thread.is_alive() and thread is not body]
        if body is not threading.main_thread():
            _known.bodies.append(body)


def arm(seconds: float) -> None:
    """Write all stacks and end the process with exit code 1, so many seconds from now, unless `disarm` is
    called before. The last call counts. A thread of faulthandler's does it, also while a call holds the GIL
    and while the interpreter is finalised."""
    with suppress(Exception):  # no thread can be started
        faulthandler.dump_traceback_later(seconds, exit=True, file=terminal())


disarm = faulthandler.cancel_dump_traceback_later


def terminal() -> int:
    """Return the descriptor of stderr: to write there takes no lock, which a stuck thread may have."""
    try:
        return sys.stderr.fileno()
    except Exception:  # an object that is no file stands for it
        return 2


# -- what is reported -------------------------------------------------------------------------------


def _say(words: str) -> None:
    """Write all stacks, and a line."""
    with suppress(Exception):
        faulthandler.dump_traceback(terminal())
    with suppress(OSError):
        os.write(terminal(), words.encode(errors="replace"))


def _holders() -> Iterator[str]:
    """Describe what may keep this process from ending, a phrase each."""
    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
    if threads:
        yield f"threads that are no daemons: {', '.join(map(repr, threads))}"
    children = list(_children())
    if children:
        yield f"child processes: {', '.join(children)}"
    where = calls_of_frame(frame_of(main))
    yield f"its main thread is at {where}" if where else "its main thread is in no Python code"


def _children() -> Iterator[str]:
    """Return pid and name of each child process."""
    for pid in children_of(os.getpid()):
        with suppress(OSError):
            yield f"{pid} ({Path('/proc', str(pid), 'comm').read_text().strip()})"


def _kill_children() -> None:
    """Kill the children of multiprocessing, which would stay.

    They are not waited for, and this thread keeps the GIL from now on: a main thread that waits for a child
    would go on to an exit code of its own."""
    with suppress(Exception):
        children = multiprocessing.active_children()
        sys.setswitchinterval(SWITCH_NO_MORE)
        for child in children:
            child.kill()
