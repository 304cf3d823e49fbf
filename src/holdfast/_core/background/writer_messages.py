"""Messages between a trainer and its writer process: MessagePack in frames over a socket. No torch, no
pickle."""

from __future__ import annotations

import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from holdfast._core.base.options import Options
from holdfast._core.format.names import WrittenFile
from holdfast._core.io.unchanged import Earlier
from holdfast._core.layout.box import Box
from holdfast._core.layout.deferred_offset import DeferredOffset
from holdfast._core.layout.tensor import TensorSpec
from holdfast._core.ready import ready

_HEAD = struct.Struct("<Q")


class Attach(msgspec.Struct, tag=True, array_like=True):
    """Sent along with the file descriptor of the arena with this number."""

    arena: int


class WriteJob(msgspec.Struct, tag="Job", array_like=True):
    """Write a rank's files from an arena. The columns have a row per shard, as in `ShardTable`."""

    number: int
    arena: int
    size: int
    """Size of the arena in bytes."""
    store: str
    rank: int
    specs: list[TensorSpec]
    boxes: list[Box]
    replicas: list[tuple[int, int]]
    unsharded: list[bool]
    deferred: list[DeferredOffset | None]
    base: list[int]
    """Position of each row's first element in the arena."""
    witnessed: list[tuple[int, bytes, int, int]]
    """Row, offset, block and digest of each piece that this rank witnesses."""
    about: str
    """As JSON: notes may have numbers and text in them that MessagePack has not."""
    options: Options
    earlier: Earlier | None = None
    """The earlier save; chunks that have not changed since are linked to its files."""
    only: int | None = None
    """Write only this file of the plan; the arena holds no chunks of the others."""
    tied: dict[int, int] = {}
    """Tied rows, each with the row that has the same memory."""
    environment: dict[str, str] | None = None
    """The variables that the store reads; the process may have been started with others."""


class Planned(msgspec.Struct, tag=True, array_like=True):
    """The number of bytes that a job will write."""

    number: int
    total: int


class Moved(msgspec.Struct, tag=True, array_like=True):
    """Progress: bytes since the last such message."""

    number: int
    nbytes: int


class Done(msgspec.Struct, tag=True, array_like=True):
    """The files of a job are durable: their names, sizes, and the positions and sizes of their embedded
    indexes."""

    number: int
    files: list[WrittenFile]


class Failed(msgspec.Struct, tag=True, array_like=True):
    """A job failed; its files are deleted. The error is encoded by `HoldfastError.to_message`."""

    number: int
    error: dict[str, object]


ToWriter = Attach | WriteJob
FromWriter = Planned | Moved | Done | Failed


Received = TypeVar("Received")


class Wire(Generic[Received]):
    """One end of the socket."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.socket = sock
        self._decoder = msgspec.msgpack.Decoder(ready(kind))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToWriter | FromWriter, fd: int | None = None) -> None:
        data = self._encoder.encode(message)
        head = _HEAD.pack(len(data))
        if fd is None:
            self.socket.sendall(head + data)
        else:
            socket.send_fds(self.socket, [head], [fd])
            self.socket.sendall(data)

    def receive(self) -> tuple[Received, int | None]:
        """Receive a message, and the file descriptor that came with it. EOFError if the other end is gone."""
        # A descriptor arrives with the head; a plain recv would drop it.
        head, fds, _, _ = socket.recv_fds(self.socket, _HEAD.size, 1)
        if head and len(head) < _HEAD.size:
            head += self._exactly(_HEAD.size - len(head))
        if not head:
            raise EOFError
        (size,) = _HEAD.unpack(head)
        return self._decoder.decode(self._exactly(size)), fds[0] if fds else None

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data
