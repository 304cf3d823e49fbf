"""Ask a live process on this host about its process groups: `holdfast doctor --pid`.

The process listens on a Unix socket in the abstract namespace, named by its pid. So no file is left behind,
and only processes of the same user, or root, get an answer. Asking does not need torch.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast._core.base.values import NO_JSON, size_text
from holdfast._core.process.heart import heart
from holdfast._core.ready import ready
from holdfast._groups.audit.hazards import ProcessFacts
from holdfast.errors import BadInput, HoldfastError

log = logging.getLogger("holdfast")
LARGEST = 64 << 20
"""Maximum bytes of an answer."""
WITHIN = 1.0
"""Seconds within which a client must read its answer, as it blocks the heart."""
_serving: dict[int, _Doctor] = {}
"""pid -> the server of that process. By pid, because a fork has none."""
_lock = threading.Lock()


def _address(pid: int) -> str:
    """Return the socket name of a process."""
    # A pid identifies a process only within its namespace, but containers may share socket names.
    return f"\0holdfast-doctor-{os.readlink('/proc/self/ns/pid')}-{pid}"


class _Doctor:
    """Answers `ask`, on the heart's thread."""

    interval = 3600.0  # it only answers

    def __init__(self, sock: socket.socket, facts: Callable[[], ProcessFacts]) -> None:
        self._sock, self._facts = sock, facts

    def beat(self) -> None:
        heart.on_readable(self._sock, self._answer)

    def close(self) -> None:
        heart.forget(self._sock)
        self._sock.close()

    def _answer(self) -> None:
        connection, _ = self._sock.accept()
        # The next one at the next beat: another user may connect without pause.
        heart.forget(self._sock)
        heart.hurry(self)
        with connection:
            connection.settimeout(WITHIN)
            # The kernel says who the client is. It sends nothing, so there is nothing to parse or trust.
            sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            _, uid, _ = struct.unpack("3i", sent)
            if uid in (0, os.getuid()):
                connection.sendall(msgspec.json.encode(self._facts()))


def serve(facts: Callable[[], ProcessFacts]) -> bool:
    """Start answering `ask`.

    Returns False if this process answers already, or if the platform has no such sockets.
    """
    with _lock:
        if os.getpid() in _serving:
            return False
        with suppress(OSError, AttributeError):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.bind(_address(os.getpid()))
                sock.listen(4)
            except OSError:
                sock.close()
                raise
            doctor = _serving[os.getpid()] = _Doctor(sock, facts)
            try:
                heart.begin(doctor, 0.0)
            except HoldfastError as error:  # training needs no doctor
                log.warning("`holdfast doctor` can't be answered: %s", error)
                _serving.pop(os.getpid()).close()
        return os.getpid() in _serving


def stop() -> None:
    """Stop answering `ask`."""
    with _lock:
        doctor = _serving.pop(os.getpid(), None)
    if doctor is not None:
        heart.end(doctor)


def ask(pid: int, timeout: float = 5.0) -> ProcessFacts | None:
    """Return the facts that a process reports about itself, or None if it does not listen.

    Raises BadInput if there is no usable answer, or if another process listens under its name.
    """
    ends = time.monotonic() + timeout
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout)
            sock.connect(_address(pid))
            sent = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            while len(answer) <= LARGEST and time.monotonic() < ends:
                sock.settimeout(max(0.01, ends - time.monotonic()))
                part = sock.recv(1 << 16)
                if not part:
                    break
                answer += part
            # The loop ended without `break`: the answer is too long, or it was not complete in time.
            else:
                raise BadInput(
                    f"Process {pid} gave no whole answer within {timeout:g} s and {size_text(LARGEST)}."
                )
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            raise BadInput(f"Process {pid} does not answer within {timeout:g} s: {error}.") from None
    # The kernel noted the pid at listen(). The address alone proves nothing: any process can bind that name.
    if struct.unpack("3i", sent)[0] != pid:
        raise BadInput(
            f"Another process (pid {struct.unpack('3i', sent)[0]}) listens in the name of process {pid}."
        )
    if not answer:
        raise BadInput(
            f"Process {pid} gave no answer: it belongs to another user (ask as that user, or as root), or "
            f"its log says why."
        )
    try:
        return msgspec.json.decode(answer, type=ready(ProcessFacts))
    except NO_JSON as error:
        raise BadInput(
            f"The answer of process {pid} is not that of this version of Holdfast ({error})."
        ) from None


def variables_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError as error:
        raise BadInput(f"The environment of process {pid} can't be read: {error.strerror}.") from None
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}
