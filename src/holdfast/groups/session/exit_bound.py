"""Bound the time in which a process that had a session ends, whatever keeps it alive after its main thread.

That may be an `atexit` handler, a thread that is no daemon, a child process that does not end, the
finalisation of the interpreter, or a destructor of a C++ library. The time counts from the end of the main
thread, and only while Holdfast itself is idle: saves and the closing of sessions have deadlines of their own.
So a program that goes on after its session is never touched, however the session ended; nor is a fork.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from holdfast.background.manager import wait_for_saves
from holdfast.errors import HoldfastError
from holdfast.exits import Failure, Stage, at_exit, is_working, on_main_thread_end
from holdfast.groups.session.backstop import Backstop
from holdfast.stacks import calls_of_frame, frame_of
from holdfast.threads import keep_spares, start_thread

EXIT_LATE = 87
"""Exit code of a process that was still there when the bound was over."""
LOOK = 0.5
"""Seconds between two checks whether Holdfast is at work."""
MARGIN = 10.0
"""Seconds after the bound at which the backstop ends a process that can't run Python any more."""
CHILDREN_END = 2.0
"""Seconds that children of multiprocessing have from SIGTERM to SIGKILL."""


class _Bound:
    """The bound of one process."""

    def __init__(self, who: str) -> None:
        self.pid, self.who = os.getpid(), who
        self.seconds = 0.0
        self.bodies: list[threading.Thread] = []
        """Threads that have begun a session."""
        self._begun = self._unwatched = False
        self._ends = 0.0
        self._backstop = Backstop(EXIT_LATE)

    def begin(self) -> None:
        """Start to count: the main thread has ended."""
        if self.pid != os.getpid() or self._begun:
            return
        self._begun = True
        self._begin_anew()
        try:
            start_thread(self._watch, "holdfast-exit")
        except HoldfastError:  # no more threads, not even a spare one
            # Without `_watch` nothing checks whether Holdfast is at work, so `count_unwatched` arms the
            # backstop once it is not.
            self._unwatched = True
            self._backstop.disarm()

    def count_unwatched(self) -> Failure | None:
        """Arm the backstop alone, if no thread could be started to watch.

        Called when Holdfast's own work is done and all threads that are no daemons have ended.
        """
        if self._unwatched:
            self._begin_anew()
        return None

    def _watch(self) -> None:
        while (left := self._ends - time.monotonic()) > 0:
            time.sleep(min(LOOK, left))
            if self._is_at_work():
                self._begin_anew()
        self._end()

    def _begin_anew(self) -> None:
        self._ends = time.monotonic() + self.seconds
        self._backstop.arm(self.seconds + MARGIN)

    def _is_at_work(self) -> bool:
        """Return whether a thread that had a session still runs, or Holdfast's own work is under way."""
        goes_on = any(thread.is_alive() and not thread.daemon for thread in self.bodies)
        return goes_on or is_working() or bool(wait_for_saves(0.0))

    def _end(self) -> None:
        _dump_stacks()
        _write(
            f"{self.who} ends with exit code {EXIT_LATE}: its process was still there {self.seconds:g} s "
            f"after its end; {'; '.join(_holders())}. If that is work to be done, give session() a longer "
            "after_end.\n"
        )
        self._backstop.insist()  # the main thread goes on once its children have ended
        _end_children()
        os._exit(EXIT_LATE)


_known: _Bound | None = None
_lock = threading.Lock()


def bound_exit(seconds: float, who: str) -> None:
    """End this process with exit code 87 if it is still there so many seconds after its main thread's end.

    After several calls the longest bound holds. who: the process in messages, such as "rank 3".
    """
    global _known
    with _lock:
        if _known is None or _known.pid != os.getpid():
            known = _Bound(who)
            keep_spares(known)
            on_main_thread_end(known.begin)
            at_exit(Stage.THREADS, known.count_unwatched)
            # A process of multiprocessing waits for its children before the interpreter's end.
            multiprocessing.util.Finalize(None, known.begin, exitpriority=100)
            _known = known
        _known.seconds = max(_known.seconds, seconds)
        body = threading.current_thread()
        # A program may begin sessions on many threads, one after another: threads that ended are dropped.
        _known.bodies = [thread for thread in _known.bodies if thread.is_alive() and thread is not body]
        if body is not threading.main_thread():
            _known.bodies.append(body)


# -- what is reported -------------------------------------------------------------------------------


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
    for tasks in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in tasks.read_text().split():
                yield f"{pid} ({Path('/proc', pid, 'comm').read_text().strip()})"


def _dump_stacks() -> None:
    try:
        faulthandler.dump_traceback()
    except Exception:  # sys.stderr has no file descriptor
        with suppress(Exception):
            faulthandler.dump_traceback(file=2)


def _write(words: str) -> None:
    """Write to the terminal without Python's buffers, whose lock a stuck thread may have."""
    try:
        target = sys.stderr.fileno()
    except Exception:
        target = 2
    with suppress(OSError):
        os.write(target, words.encode(errors="replace"))


def _end_children() -> None:
    """End the children of multiprocessing, for which this process would wait."""
    with suppress(Exception):
        children = multiprocessing.active_children()
        for child in children:
            child.terminate()
        ends = time.monotonic() + CHILDREN_END
        for child in children:
            child.join(max(0.0, ends - time.monotonic()))
            if child.is_alive():
                child.kill()
