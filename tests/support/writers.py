"""Writer processes of ranks as forks of one process that has imported what a writer imports.

A writer process is a new interpreter, which takes 0.15 s of a CPU: more than half of a small asynchronous save. Tests of
something else than the start of a writer do without it:

    with ProcessWorld(4, env=forked_writers()) as world: ...
"""

from __future__ import annotations

import array
import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from functools import cache
from types import SimpleNamespace

from holdfast._core.background import writer_client

ADDRESS = "HOLDFAST_TEST_WRITERS"
"""The variable with the address of the process that forks."""
PROGRAM = """
import array, json, os, select, signal, socket, sys
sys.meta_path.insert(0, __import__("runpy").run_path(sys.argv[1])["Places"](json.loads(sys.argv[2])))
from holdfast._core.background.writer_process import main

listener = socket.socket(fileno=int(sys.argv[3]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for a writer
wanted = select.poll()
wanted.register(listener, select.POLLIN)
wanted.register(0, select.POLLHUP)
while all(fd for fd, _ in wanted.poll()):
    wire, _ = listener.accept()
    if os.fork():
        wire.close()
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    _, [fd], _, _ = socket.recv_fds(wire, 1, 1)
    pid = os.fork()
    if pid == 0:
        wire.close()
        os.setsid()
        code = 1
        try:
            main(fd)
            code = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(code)
    os.close(fd)
    wire.sendall(array.array("i", [pid]).tobytes())
    _, status = os.waitpid(pid, 0)
    try:
        wire.sendall(array.array("i", [os.waitstatus_to_exitcode(status)]).tobytes())
    finally:
        os._exit(0)
"""


@cache
def forked_writers() -> dict[str, str]:
    """The environment of ranks whose writers are forks."""
    folder = tempfile.mkdtemp(prefix="holdfast-writers-")
    atexit.register(shutil.rmtree, folder)
    address = os.path.join(folder, "address")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        forks = subprocess.Popen(
            [
                *writer_client._isolated_python(),
                *("-c", PROGRAM, str(writer_client.START)),
                *(json.dumps(writer_client._places()), str(listener.fileno())),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )
    atexit.register(forks.communicate)
    return {ADDRESS: address}


def use_forked_writers() -> None:
    """Let writers of this process be forks, if its environment says so."""
    if ADDRESS in os.environ:
        known = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
        writer_client.subprocess = SimpleNamespace(Popen=_Fork, **known)  # type: ignore[attr-defined]


class _Fork:
    """What `WriterClient` uses of a process."""

    def __init__(self, command: list[str], *, pass_fds: list[int], **_: object) -> None:
        self._wire = socket.socket(socket.AF_UNIX)
        self._wire.connect(os.environ[ADDRESS])
        socket.send_fds(self._wire, [b"\0"], pass_fds)
        self.pid = self._received()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._wire.settimeout(timeout)
            try:
                self.returncode = self._received()
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired("a writer", timeout) from None
            self._wire.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _received(self) -> int:
        return array.array("i", self._wire.recv(4, socket.MSG_WAITALL))[0]
