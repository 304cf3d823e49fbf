"""System calls that fail: a stretch of those that one folder sees, with an errno."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("link", "rename", "replace", "unlink", "mkdir", "rmdir")
CALLS = (*CHANGES, "open", "write", "pwritev", "fsync", "close", "fstat", "stat", "scandir")
READS = ("lstat", "pread", "preadv")
FOREVER = 1 << 30


class Faults:
    """Counts the calls on what lies below a folder, from 1 on, and lets `length` of them fail from number
    `first` on.

    after: calls that change names do so, and only then fail, as if the answer of a server were lost.
    only: calls of these names count.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = os.path.realpath(folder)
        self._fds: set[int] = set()
        self._lock = threading.Lock()
        self.arm(0, 0, 0)
        for name in (*CALLS, *READS):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def arm(
        self, number: int, first: int, length: int, after: bool = False, only: tuple[str, ...] = CALLS
    ) -> None:
        """Begin to count anew."""
        self.number, self.first, self.length, self.after, self.only = number, first, length, after, only
        self.count = self.failed = 0

    def disarm(self) -> None:
        """What is called from now on is well."""
        self.length = 0

    def left_open(self) -> list[str]:
        return open_below(self._folder)

    def _is_below(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        first = args[1] if name in ("link", "rename", "replace") else args[0] if args else "."
        if named.get("dir_fd") in self._fds or (isinstance(first, int) and first in self._fds):
            return True
        return not isinstance(first, int) and os.fspath(first).startswith(self._folder)

    def _is_to_fail(self, name: str) -> bool:
        with self._lock:
            if name not in self.only:
                return False
            self.count += 1
            fails = self.first <= self.count < self.first + self.length
            self.failed += fails
            return fails

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            below = self._is_below(name, args, named)
            fails = below and self._is_to_fail(name)
            if fails and name != "close" and not (self.after and name in CHANGES):
                raise OSError(self.number, os.strerror(self.number))
            found = real(*args, **named)  # a descriptor is gone whatever close() answers
            if below and name == "open":
                self._fds.add(found)
            if below and name == "close":
                self._fds.discard(args[0])
            if fails:
                raise OSError(self.number, os.strerror(self.number))
            return found

        return call


def open_below(folder: str | Path) -> list[str]:
    """Return the files and folders below a folder that this process has open, all of its descriptors if it is ""."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(os.path.realpath(folder) if folder else "")]
