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

from holdfast.errors import BadInput, HoldfastError
from holdfast.groups.audit.hazards import ProcessFacts
from holdfast.threads import start_thread

log = logging.getLogger("holdfast")
LARGEST = 64 << 20
"""Bytes that an answer may have at most."""
_serving: dict[int, socket.socket] = {}
"""The socket on which a process listens, by pid: a fork has none."""
_lock = threading.Lock()


def _address(pid: int) -> str:
    """Return the socket name of a process."""
    # A pid identifies a process only within its namespace, but containers may share socket names.
    return f"\0holdfast-doctor-{os.readlink('/proc/self/ns/pid')}-{pid}"


def serve(facts: Callable[[], ProcessFacts]) -> bool:
    """Start answering `ask`, on a thread.

    Returns False if this process answers already, or if the platform has no such sockets.
    """
    with _lock:
        if os.getpid() in _serving:
            return False
        with suppress(OSError, AttributeError):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(_address(os.getpid()))
            sock.listen(4)
            _serving[os.getpid()] = sock
            try:
                start_thread(lambda: _answer(sock, facts), "holdfast-doctor")
            except HoldfastError as error:  # training needs no doctor
                log.warning("`holdfast doctor` can't be answered: %s", error)
                _serving.pop(os.getpid()).close()
        return os.getpid() in _serving


def stop() -> None:
    """Stop answering `ask`."""
    with _lock:
        sock = _serving.pop(os.getpid(), None)
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        sock.close()


def _answer(sock: socket.socket, facts: Callable[[], ProcessFacts]) -> None:
    """Serve requests until `stop` closes the socket."""
    while True:
        try:
            connection, _ = sock.accept()
        except OSError as error:
            if _serving.get(os.getpid()) is not sock:
                return  # stopped
            log.warning("`holdfast doctor` can't be answered for a moment: %s", error)
            time.sleep(1.0)
            continue
        try:
            with connection:
                # Clients are served one by one: a client that does not read delays the next by 5 s at most.
                connection.settimeout(5.0)
                # The kernel says who the client is. It sends nothing, so there is nothing to parse or trust.
                sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, uid, _ = struct.unpack("3i", sent)
                if uid in (0, os.getuid()):
                    connection.sendall(msgspec.json.encode(facts()))
        # The connection broke, or groups changed meanwhile: the next request may succeed.
        except Exception as error:
            log.warning("An answer to `holdfast doctor` failed: %s: %s", type(error).__name__, error)


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
                    f"Process {pid} gave no whole answer within {timeout:g} s and {LARGEST >> 20} MiB."
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
        return msgspec.json.decode(answer, type=ProcessFacts)
    except msgspec.MsgspecError as error:
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
