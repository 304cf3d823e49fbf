"""A client of the server of torch's TCPStore: one connection, in Python, with a limit on every wait.

torch's own client waits without a limit for an answer, looks up the name of its host at each connection, and
a thread that comes back from it at the end of the process aborts the process. This one speaks the same
protocol, which has been the same since torch 2.1; `agrees_with` checks that once in a process, and where the
versions do not agree, torch's client is used.

A request is one byte, then keys and values, each with its length in 8 bytes. The server answers in the order
of the requests, so any number of them costs one round trip. Every key that is set has a bell, a second key
beside it, on which the server lets clients wait: a read by `compare_set` would wake those that wait for the
key itself.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from holdfast._core.roster.process import own_sockets

_VALIDATE, _SET, _COMPARE_SET, _ADD, _CHECK, _WAIT, _DELETE, _CANCEL_WAIT = 0, 1, 2, 4, 5, 6, 8, 12
_MAGIC = struct.pack("=I", 0x3C85F7CE)
_NUMBER = struct.Struct("=Q")
_COUNT = struct.Struct("=q")
_NOTHING = b"\0"
"""Never stored. `compare_set` with it as both arguments reads a key without waiting."""
_AT_ONCE = 256
"""Maximum requests sent before answers are read; their answers must fit into the socket buffers."""
KEEPALIVE = 60
"""Idle seconds after which the kernel sends keepalive probes to the server's host."""
PATIENCE = 2.0
"""Answer timeout in seconds of clients that must not block."""


class StoreClient(Protocol):
    """The methods of torch's own client that `agrees_with` uses."""

    def check(self, keys: list[str], /) -> bool: ...


def _sized(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


def _key(name: str) -> bytes:
    return _sized(b"/" + name.encode())  # torch puts the slash before every key


def _bell(name: str) -> bytes:
    return _key(name + "!")


class TcpClient:
    """One connection to the server of a TCPStore.

    patience: seconds for an answer; None: no limit. Every method raises OSError if the server has gone or
        does not answer in time, and then the connection is of no use any more.
    """

    def __init__(self, host: str, port: int, patience: float | None = None) -> None:
        self._patience, self._received = patience, bytearray()
        self._awaited = ""
        """The key of a wait that timed out here, but is still pending on the server."""
        self.closed_in_order = False
        """Whether the server's side closed the connection with FIN, as at process end (a firewall sends
        RST)."""
        self._socket = socket.create_connection((host, port), patience)
        own_sockets.add(self._socket)
        self._socket.settimeout(patience)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # So that the death of the server's host ends a wait that has no limit of its own, and that no
        # firewall forgets the connection between two saves.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE)
        self._socket.sendall(bytes([_VALIDATE]) + _MAGIC)

    def way(self) -> tuple[str, str]:
        """Return the addresses of this end of the connection, and of the server's."""
        here, there = self._socket.getsockname()[0], self._socket.getpeername()[0]
        return str(here).removeprefix("::ffff:"), str(there).removeprefix("::ffff:")

    def is_open(self) -> bool:
        """Return whether the server has not closed the connection."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        try:
            # What there is to read may also be the answer to a wait that has ended here.
            self.closed_in_order = bool(waiting.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
            return not self.closed_in_order
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()

    def set(self, name: str, value: bytes) -> None:
        # The server does not answer.
        self._send(self._set(_key(name), value) + self._set(_bell(name), b""))

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the values of these keys, None for each unset one."""
        values: list[bytes | None] = []
        for begin in range(0, len(names), _AT_ONCE):
            some = names[begin : begin + _AT_ONCE]
            self._send(b"".join(self._compare_set(name, _NOTHING, _NOTHING) for name in some))
            values += [None if (value := self._value()) == _NOTHING else value for _ in some]
        return values

    def claim(self, name: str, value: bytes) -> bytes:
        """Set a key unless it is set; return the value that is then stored."""
        self._send(self._compare_set(name, b"", value) + self._set(_bell(name), b""))
        return self._value()

    def add(self, name: str) -> int:
        self._send(bytes([_ADD]) + _key(name) + _COUNT.pack(1))
        return int(_COUNT.unpack(self._receive(_COUNT.size))[0])

    def delete(self, names: Sequence[str]) -> None:
        keys = [key for name in names for key in (_key(name), _bell(name))]
        for begin in range(0, len(keys), _AT_ONCE):
            some = keys[begin : begin + _AT_ONCE]
            self._send(b"".join(bytes([_DELETE]) + key for key in some))
            self._receive(_COUNT.size * len(some))

    def wait(self, name: str, seconds: float) -> bool:
        """Wait on the server up to `seconds` until a key is set; return whether it is.

        The server goes on waiting until the next request, so to wait for the same key again costs none.
        """
        if self._awaited != name:
            self._send(bytes([_WAIT]) + _NUMBER.pack(1) + _bell(name))
            self._awaited = name
        # A socket with a timeout of 0 would not block, but not look either.
        self._socket.settimeout(max(seconds, 0.001))
        try:
            self._receive(1)
        except TimeoutError:
            return False
        finally:
            self._socket.settimeout(self._patience)
        self._awaited = ""
        return True

    def _send(self, requests: bytes) -> None:
        if not self._awaited:
            self._socket.sendall(requests)
            return
        self._awaited = ""
        self._socket.sendall(bytes([_CANCEL_WAIT]) + requests)
        # The key may have been set just before: then the answer to that comes first.
        if self._receive(1) != b"\1":
            self._receive(1)

    @staticmethod
    def _set(key: bytes, value: bytes) -> bytes:
        return bytes([_SET]) + key + _sized(value)

    @staticmethod
    def _compare_set(name: str, expected: bytes, desired: bytes) -> bytes:
        return bytes([_COMPARE_SET]) + _key(name) + _sized(expected) + _sized(desired)

    def _value(self) -> bytes:
        return self._receive(_NUMBER.unpack(self._receive(_NUMBER.size))[0])

    def _receive(self, size: int) -> bytes:
        while len(self._received) < size:
            part = self._socket.recv(1 << 16)
            if not part:
                self.closed_in_order = True
                raise ConnectionResetError("the server has closed the connection")
            self._received += part
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


def agrees_with(client: TcpClient, store: StoreClient) -> bool:
    """Return whether torch's own client of the same server sees what this one sets and deletes."""
    name = f"holdfast-protocol-{secrets.token_hex(8)}"
    client.set(name, b"here")
    if client.claim(name, b"") != b"here" or not store.check([name]):
        return False
    client.delete([name])
    return not store.check([name])
