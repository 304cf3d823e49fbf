"""Files of a folder, opened when they are read: every rank of a save wrote some, and the limit of open
files may be as low as 1024."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast._core.base.values import Buffer
from holdfast._core.store.base import Reader, Store

OPEN_FILES = 256
"""Limit of files of a folder that are open at once."""


class OpenFiles:
    """The files of a folder; the most recently used ones are open."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._readers: dict[str, Reader] = {}
        """Open files, the most recently used last."""
        self._sizes: dict[str, int] = {}

    def reader(self, name: str) -> Reader:
        with self._lock:
            reader = self._readers.pop(name, None) or self._store.open(name)
            if len(self._readers) >= OPEN_FILES:
                self._readers.pop(next(iter(self._readers))).close()
            self._readers[name] = reader
            self._sizes[name] = reader.size
            return reader

    def size(self, name: str) -> int:
        return self._sizes[name] if name in self._sizes else self.reader(name).size

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


class OnDemand:
    """A file that is opened again if it was closed to make room for others."""

    def __init__(self, files: OpenFiles, name: str) -> None:
        self._files, self._name = files, name
        self.size = files.size(name)

    def read(self, start: int, length: int) -> bytes:
        return self._files.reader(self._name).read(start, length)

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        return self._files.reader(self._name).read_into(start, buffers)

    def close(self) -> None:
        """Do nothing: the folder closes its files."""
