"""The trainer's side of its writer process: start it, send it jobs, receive progress, detect its end."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from weakref import WeakSet

from holdfast._core.background.arena import Arena
from holdfast._core.background.writer_messages import (
    Attach,
    Done,
    Failed,
    FromWriter,
    Moved,
    Planned,
    Wire,
    WriteJob,
)
from holdfast._core.base.threads import RAISE_LIMIT
from holdfast._core.format.names import WrittenFile
from holdfast._core.roster.process import HELD, stat, waits_in
from holdfast.errors import HoldfastError, NotStarted, from_message

_EXECUTES = "It executes {}: this user must be able to."
_HINTS = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the limit of open files (ulimit -n)."),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM), RAISE_LIMIT),
    **dict.fromkeys((errno.EACCES, errno.ENOENT, errno.ENOEXEC), _EXECUTES),
}
"""What to do if the writer process can't be started, by errno."""
ENDS = 5.0
"""Seconds in which a process whose socket is closed is expected to end."""
START = Path(__file__).absolute().with_name("writer_start.py")
"""The program of the writer process."""
PACKAGES = ("holdfast", "msgspec", "numpy", "xxhash")
"""The packages that it imports besides the standard library."""
FOR_OBJECTS = ("obstore", "typing_extensions")
"""What it imports besides if it writes to an object store, and if that is installed."""
LOOK = 0.25
"""Seconds between two checks whether a job is still wanted."""


_known: WeakSet[WriterClient] = WeakSet()
_dying: list[subprocess.Popen[bytes]] = []
"""Killed processes that had not ended yet when nobody waited for them any more."""


def _forked() -> None:
    """Close the sockets in a fork of the trainer (a data loader's worker): a writer ends when its socket is
    closed everywhere."""
    for writer in _known:
        writer.let_go()


os.register_at_fork(after_in_child=_forked)


def _isolated_python() -> list[str]:
    """Return the command of this interpreter, without the working directory, the folders of the environment
    and the user, and site-packages."""
    # Isolated, because files in a working directory must not be executed (docs/decisions/0008). -I also
    # ignores the variables PYTHON*, so those that matter become options.
    flags = ["-I", "-S"]
    if sys.dont_write_bytecode:
        flags.append("-B")
    if sys.pycache_prefix is not None:
        flags += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
    if sys.flags.utf8_mode:  # both sides must encode names of files alike
        flags += ["-X", "utf8"]
    return [sys.executable, *flags]


def _places() -> dict[str, str]:
    """Return, for each package, the folder from which this process has imported it."""
    folders = {}
    for name in PACKAGES:
        module = import_module(name)
        assert module.__file__ is not None, f"{name} lies in a file"
        folder = Path(module.__file__).absolute().parent
        folders[name] = str(folder.parent if hasattr(module, "__path__") else folder)
    for name in FOR_OBJECTS:  # not imported here: only a save to an object store needs them
        found = find_spec(name)
        if found is not None and found.origin is not None:
            place = Path(found.origin).absolute().parent
            folders[name] = str(place.parent if found.submodule_search_locations else place)
    return folders


class WriterDied(HoldfastError):
    """The writer process ended before its job did."""


class WriterClient:
    """The writer process of this rank, restarted if it has died. One job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire[FromWriter] | None = None
        self._attached: set[int] = set()
        self._number = 0
        self.busy = False
        """Whether it has a job; then a thread of this process may be blocked in sending or receiving."""
        _known.add(self)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def describe(self) -> str:
        """Describe the state of the process, as far as the kernel shows it."""
        pid, state, where = self.pid, "", ""
        if pid is None:  # another thread has just killed it
            return "its writer process has ended"
        with suppress(OSError):  # it can't be read, such as without free descriptors
            now = stat(pid)
            state = "Z" if now is None else now.state
            where = waits_in(pid)
        if state in ("X", "Z"):
            return f"its writer process, with pid {pid}, has ended"
        held = f", and is {HELD[state]}" if state in HELD else ""
        return f"its writer process has pid {pid}{held}" + (f" (in {where} of the kernel)" if where else "")

    def start(self) -> None:
        """Start the process if there is none; returns before it is ready. Raises NotStarted if the system
        can't start it."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        if not sys.executable:  # a program in another language that embeds Python
            raise NotStarted(
                "The writer process of an asynchronous save could not be started: sys.executable, the path "
                "of this Python, is not set.",
                hint="Set it to a Python of this version, or save synchronously.",
            )
        try:
            self._start()
        except OSError as error:
            raise NotStarted(
                f"The writer process of an asynchronous save could not be started: {error.strerror}.",
                hint=_HINTS.get(error.errno or 0, "").format(sys.executable),
                details={"errno": error.errno},
            ) from error

    def _start(self) -> None:
        mine, theirs = socket.socketpair()
        try:
            self._wire, self._attached = Wire[FromWriter](mine, FromWriter), set()
            # The process last: after an interrupt between these lines, one without a wire would count as
            # started. A new interpreter, not a fork of this process's memory; in a session of its own, so
            # that Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                [*_isolated_python(), str(START), str(theirs.fileno()), json.dumps(_places())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            mine.close()
            raise
        finally:
            # Otherwise this process would keep the writer's end open, and never detect that the writer ended.
            theirs.close()

    def write(
        self,
        arena: Arena,
        job: WriteJob,
        planned: Callable[[int], None],
        moved: Callable[[int], None],
        still_wanted: Callable[[], None],
    ) -> list[WrittenFile]:
        """Run a job to its end. An error raised by `moved` or `still_wanted` cancels the job; the caller must
        then `kill` the process, which may be stuck."""
        self.start()
        wire, process = self._wire, self._process
        assert wire is not None
        assert process is not None
        # Numbers distinguish messages of this job from late ones of a job that was given up.
        self._number += 1
        # The size tells the process whether the arena has grown and must be mapped again.
        job.number, job.arena, job.size = self._number, arena.number, arena.size
        ready = select.poll()  # select() knows no descriptor above 1023
        ready.register(wire.socket, select.POLLIN)
        self.busy = True
        try:
            # A descriptor crosses the socket once; tensors never do, as both sides map the same pages.
            if arena.number not in self._attached:
                wire.send(Attach(arena.number), arena.fd)
                self._attached.add(arena.number)
            wire.send(job)
            while True:
                # Checked even if no message arrives: a writer that is blocked in storage sends none.
                still_wanted()
                if not ready.poll(LOOK * 1000):
                    continue
                message, _ = wire.receive()
                if message.number != self._number:
                    continue  # of a job that was given up
                match message:
                    case Planned(_, total):
                        planned(total)
                    case Moved(_, nbytes):
                        moved(nbytes)
                    case Failed(_, error):
                        raise from_message(error)
                    case Done(_, files):
                        return files
        except (EOFError, ConnectionError):
            raise self._died(process, job.rank) from None
        finally:
            self.busy = False

    def _died(self, process: subprocess.Popen[bytes], rank: int) -> WriterDied:
        with suppress(subprocess.TimeoutExpired):
            # The socket closes before the process has ended, and the error should include its exit code.
            process.wait(ENDS)
        code = process.returncode
        if code is None:
            how = "has closed its connection, and not ended,"
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.kill()
        return WriterDied(
            f"The writer process of rank {rank} (pid {process.pid}) {how} before it had written its part.",
            rank=rank,
            hint="If it was the kernel's (signal 9), memory was short; the next save starts a new one.",
        )

    def let_go(self) -> None:
        """Close this process's end of the socket, in a fork of it."""
        if self._wire is not None:
            self._wire.socket.close()
        self._wire, self._process = None, None

    def kill(self) -> None:
        """Kill the process. Its unfinished files belong to no checkpoint."""
        process, wire = self._process, self._wire
        self._process = self._wire = None
        _dying[:] = [each for each in _dying if each.poll() is None]
        if process is not None:  # before closing the socket, so that a thread blocked in sending wakes up
            with suppress(OSError):
                process.kill()
            try:
                # A process that is blocked in the kernel (hanging storage) can't be killed: wait no longer.
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                _dying.append(process)
        if wire is not None:
            wire.socket.close()
