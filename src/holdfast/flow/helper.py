"""The trainer's side of its writer process: start it, give it a job, hear how it goes, notice its death."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from holdfast.errors import HoldfastError, from_message
from holdfast.flow.arena import Arena
from holdfast.flow.wire import Attach, Cancel, Done, Failed, FromWriter, Job, Moved, Planned, Wire
from holdfast.flow.write import WrittenFile

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from holdfast.flow.writer import main; main(int(sys.argv[1]))"
LOOK = 0.25
"""Seconds after which a wait looks whether it is still wanted."""


_known: WeakSet[WriterProcess] = WeakSet()


def _forked() -> None:
    """In a fork of the trainer (a data loader's worker): let go of the sockets, by whose end writers know that it is gone."""
    for writer in _known:
        writer.let_go()


os.register_at_fork(after_in_child=_forked)


class WriterDied(HoldfastError):
    """The writer process ended before its job did."""


class WriterProcess:
    """A process of this rank's own, started anew if it has died. One job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._attached: dict[int, int] = {}
        self._number = 0
        _known.add(self)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Have a process; returns before it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        mine, theirs = socket.socketpair()
        try:
            # No fork of this process's memory: a new interpreter, in a session of its own, so that Ctrl-C does not reach it.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self._wire = Wire(mine, FromWriter)
        self._attached = {}

    def write(
        self,
        arena: Arena,
        job: Job,
        planned: Callable[[int], None],
        moved: Callable[[int], None],
        still_wanted: Callable[[], None],
    ) -> list[WrittenFile]:
        """Do a job to its end. What `moved` or `still_wanted` raise gives it up."""
        self.start()
        assert self._wire is not None
        self._number += 1
        job.number, job.arena, job.size = self._number, id(arena), arena.size
        try:
            if self._attached.get(id(arena)) != arena.fd:
                self._wire.send(Attach(id(arena)), arena.fd)
                self._attached[id(arena)] = arena.fd
            self._wire.send(job)
            while True:
                still_wanted()
                if not select.select([self._wire.socket], [], [], LOOK)[0]:
                    continue
                message, _ = self._wire.receive()
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
            raise self._died(job.rank) from None
        except BaseException:
            with suppress(OSError):
                self._wire.send(Cancel(self._number))
            raise

    def _died(self, rank: int) -> WriterDied:
        process = self._process
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        how = (
            f"was killed by signal {-code}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
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
        """End it at once. What it was writing is no checkpoint."""
        if self._wire is not None:
            self._wire.socket.close()
            self._wire = None
        if self._process is not None:
            with suppress(OSError):
                self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
            self._process = None
