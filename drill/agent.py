"""torchrun, with all of its elastic agent, but for the start of a worker, which comes from the nursery:
python -m drill.agent [what torchrun is given]."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from multiprocessing.connection import wait
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

SOCKET, JOB, TERMINAL, AGENT = "DRILL_SOCKET", "DRILL_JOB", "DRILL_TERMINAL", "DRILL_AGENT"
"""Variables: of the nursery, the job and its terminal; the pid of the agent, for its workers."""


class Child:
    """A process of the nursery, with what `subprocess.Popen` has of it."""

    def __init__(self, program: list[str], env: dict[str, str]) -> None:
        self.connection = ask(
            env[SOCKET], {"program": program, "env": env, "job": env[JOB], "terminal": env[TERMINAL]}
        )
        self._answers = self.connection.makefile()
        self.pid = int(json.loads(self._answers.readline()))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a worker", timeout)
        return code

    def _look(self, seconds: float) -> int | None:
        if self.returncode is None and wait([self.connection], max(0.0, seconds)):
            self.returncode = json.loads(self._answers.readline())
            self._answers.close()
            self.connection.close()
        return self.returncode


def ask(place: str, order: dict[str, Any]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(place)
        connection.sendall(json.dumps(order).encode() + b"\n")
    except BaseException:
        connection.close()
        raise
    return connection


def _popen(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Child:
    # PYTHON -u -m PROGRAM ARGUMENT ...
    return Child(list(args[args.index("-m") + 1 :]), {**env, AGENT: str(os.getpid())})


if __name__ == "__main__":
    SubprocessHandler._popen = _popen  # type: ignore[assignment,method-assign]
    run.main()
