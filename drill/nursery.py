"""Starts processes of programs as interpreters of their own that need not import torch again:
python -m drill.nursery SOCKET MODULE ...

Answers connections on a socket, a line of JSON each: one that starts a process gets its pid, and its exit code
once it has ended; one that names a job gets the exit codes of all processes of that job that have ended, by rank,
and may kill the others. It ends with what has started it. A child goes on to the normal end of an interpreter:
hooks, `atexit`, exit code.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

import torch.distributed  # noqa: F401

REAP_EVERY = 0.02
_program: list[str] = []
"""Of a child: what it is to run."""


class Nursery:
    def __init__(self, place: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(place)
        self.listener.listen(64)
        self.children: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
        """Those that live, by pid: who waits for the exit code, and the order."""
        self.codes: dict[str, dict[str, int]] = {}
        """Of those that have ended, by job and rank."""

    def serve(self) -> bool:
        """True in a child, which is to run its program and leave as programs do."""
        while True:
            ready = wait([self.listener, sys.stdin], REAP_EVERY)
            if sys.stdin in ready:
                self._kill(None)
                return False
            if self.listener in ready and self._answer(self.listener.accept()[0]):
                return True
            self._reap(list(self.children), os.WNOHANG)

    def _answer(self, client: socket.socket) -> bool:
        with client.makefile() as lines:
            order = json.loads(lines.readline())
        if "program" not in order:
            if order["kill"]:
                self._kill(order["job"])
            _tell(client, self.codes.get(order["job"], {}))
            client.close()
            return False
        pid = os.fork()
        if not pid:
            for other in (self.listener, client, *(waiting for waiting, _ in self.children.values())):
                other.close()
            _become(order)
            return True
        self.children[pid] = client, order
        _tell(client, pid)
        return False

    def _reap(self, pids: Iterable[int], flags: int) -> None:
        for child in pids:
            pid, status = os.waitpid(child, flags)
            if pid:
                client, order = self.children.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                self.codes.setdefault(order["job"], {})[order["env"].get("RANK", "")] = code
                _tell(client, code)
                client.close()

    def _kill(self, job: str | None) -> None:
        """Kill all processes of a job, or all."""
        mine = [pid for pid, (_, order) in self.children.items() if job in (None, order["job"])]
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        self._reap(mine, 0)


def _tell(client: socket.socket, what: object) -> None:
    with suppress(OSError):  # it has gone
        client.sendall(json.dumps(what).encode() + b"\n")


def _become(order: dict[str, Any]) -> None:
    os.setsid()  # as torchrun starts its workers
    os.environ.clear()
    os.environ.update(order["env"])
    terminal = os.open(order["terminal"], os.O_WRONLY | os.O_APPEND)
    silence = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((silence, 0), (terminal, 1), (terminal, 2)):
        os.dup2(source, target)
    os.close(silence)
    os.close(terminal)
    program, *words = order["program"]
    sys.argv = [program, *words]
    _program.append(program)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    gc.freeze()  # a child's end would go through all of it, and so copy it: 3 s for each
    if Nursery(sys.argv[1]).serve():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found in sys.modules")
            runpy.run_module(_program[0], run_name="__main__", alter_sys=True)
