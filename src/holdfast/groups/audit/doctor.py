"""A live process tells what it knows of its groups, to whoever asks on its host: `holdfast doctor --pid`.

It listens on a Unix socket in the abstract namespace, named by its pid: no file is left behind, and only
processes of the same user, or root, get an answer. No torch is needed to ask.
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
"""Bytes that an answer may have."""
_serving: dict[int, socket.socket] = {}
"""Where a process listens, by pid: a fork has none."""
_lock = threading.Lock()


def _address(pid: int) -> str:
    """A pid means something in its namespace only, and containers may share names of sockets."""
    return f"\0holdfast-doctor-{os.readlink('/proc/self/ns/pid')}-{pid}"


def serve(facts: Callable[[], ProcessFacts]) -> bool:
    """Answer from now on, on a thread of its own. False if that was done before, or where there are no such
    sockets."""
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
    """Answer no more."""
    with _lock:
        sock = _serving.pop(os.getpid(), None)
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        sock.close()


def _answer(sock: socket.socket, facts: Callable[[], ProcessFacts]) -> None:
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
                # Askers are answered one by one: one that does not read holds the next one up for 5 s at
                # most.
                connection.settimeout(5.0)
                # The kernel says who asks. The asker sends nothing, so there is nothing to parse or believe.
                sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                _, uid, _ = struct.unpack("3i", sent)
                if uid in (0, os.getuid()):
                    connection.sendall(msgspec.json.encode(facts()))
        # A broken connection, or groups that change meanwhile: the next one may go well.
        except Exception as error:
            log.warning("An answer to `holdfast doctor` failed: %s: %s", type(error).__name__, error)


def ask(pid: int, timeout: float = 5.0) -> ProcessFacts | None:
    """What a process says of itself; None if it does not listen. What another process says in its name is
    refused."""
    ends = time.monotonic() + timeout
    said = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout)
            sock.connect(_address(pid))
            sent = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            while len(said) <= LARGEST and time.monotonic() < ends:
                sock.settimeout(max(0.01, ends - time.monotonic()))
                part = sock.recv(1 << 16)
                if not part:
                    break
                said += part
            # The loop ended without `break`: the answer is too long, or it came too late.
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
    if not said:
        raise BadInput(
            f"Process {pid} gave no answer: it belongs to another user (ask as that user, or as root), or "
            f"its log says why."
        )
    try:
        return msgspec.json.decode(said, type=ProcessFacts)
    except msgspec.MsgspecError as error:
        raise BadInput(
            f"The answer of process {pid} is not that of this version of Holdfast ({error})."
        ) from None


def variables_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError as error:
        raise BadInput(f"The environment of process {pid} can't be read: {error.strerror}.") from None
    found = (entry.decode(errors="replace").partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in found}
