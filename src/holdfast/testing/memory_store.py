"""A store in this process's memory, for tests and simulations."""

from __future__ import annotations

import copy
import errno
import itertools
import threading
from collections.abc import Sequence

from holdfast._core.base.values import Buffer
from holdfast._core.store.base import VERSION_BYTES, Entry, Kind, NotFound, checked
from holdfast.errors import Conflict, StorageError


class MemoryReader:
    """A file in memory, as it was when it was opened."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size: int = len(data)

    def read(self, start: int, length: int) -> bytes:
        return self._data[start : start + length]

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        position = start
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = self._data[position : position + len(view)]
            view[: len(part)] = part
            position += len(part)
        return position - start

    def close(self) -> None:
        pass


class MemoryWriter:
    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store, self._name = store, name
        self._data = bytearray()
        self._lock = threading.Lock()

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None:
        with self._lock:
            for buffer in buffers:
                data = bytes(buffer)
                if len(self._data) < start:
                    self._data.extend(bytes(start - len(self._data)))
                self._data[start : start + len(data)] = data
                start += len(data)

    def finish(self) -> None:
        self._store.files[self._name] = bytes(self._data)

    def discard(self) -> None:
        self._store.files.pop(self._name, None)


_numbers = itertools.count(1)


class MemoryStore:
    """A dict of files; children share it. A folder exists while it has a file; there are no links."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self._prefix = ""
        self._lock = threading.Lock()
        self.url: str = f"memory://{next(_numbers)}/"

    def _full(self, path: str) -> str:
        return self._prefix + checked(path)

    def open(self, path: str) -> MemoryReader:
        try:
            return MemoryReader(self.files[self._full(path)])
        except KeyError:
            raise NotFound(
                f"Opening {self._full(path)} failed: no such file.", details={"errno": errno.ENOENT}
            ) from None

    def create(self, path: str) -> MemoryWriter:
        name = self._full(path)
        with self._lock:
            if name in self.files:
                raise StorageError(f"Creating {name} failed: it exists.", details={"errno": errno.EEXIST})
            # The name is taken before a byte is written, so only one of several writers can create it.
            self.files[name] = b""
        return MemoryWriter(self, name)

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        name = self._full(path)
        with self._lock:
            present = self.files.get(name)
            if (None if present is None else present[-VERSION_BYTES:]) != replacing:
                raise Conflict(
                    f"{name} was put in place by another save since this one began; that one stands."
                )
            self.files[name] = bytes(data)

    def delete(self, path: str) -> None:
        self.files.pop(self._full(path), None)

    def remove(self) -> bool:
        return not self.list()

    def stat(self, path: str = "") -> Entry | None:
        name = self._full(path) if path else self._prefix
        if path and name in self.files:
            return Entry(Kind.FILE, len(self.files[name]), 0.0)
        return Entry(Kind.FOLDER, 0, 0.0) if self.list(path) else None

    def list(self, folder: str = "") -> list[str]:
        start = self._prefix + (checked(folder) + "/" if folder else "")
        names = set()
        # A copy, because other threads may add files meanwhile.
        for name in list(self.files):
            if name.startswith(start):
                head, slash, _ = name[len(start) :].partition("/")
                names.add(head + slash)
        return sorted(names)

    def child(self, folder: str) -> MemoryStore:
        made = copy.copy(self)
        made._prefix = self._full(folder) + "/"
        made.url = f"{self.url}{folder}/"
        return made
