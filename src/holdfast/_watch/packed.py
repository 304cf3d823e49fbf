"""Opens what people give as evidence: files, pipes, and what gzip has packed, read as a stream."""

from __future__ import annotations

import io
import os
import stat
import sys
import zlib
from typing import Any, BinaryIO

from holdfast.errors import BadInput

HEAD = 1 << 14
"""Bytes that can be looked at before they are read."""
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"BZh": "bzcat",
    b"\xfd7zXZ": "xzcat",
    b"\x04\x22\x4d\x18": "lz4cat",
}


def opened(path: str) -> io.BufferedReader[Any]:
    """Open a file for reading, unpacked. Raises BadInput for what can't be unpacked."""
    file = io.BufferedReader(_AsFound(path), HEAD)
    head = file.peek(HEAD)
    if head.startswith(b"\x1f\x8b"):
        return io.BufferedReader(_Unpacked(file), HEAD)
    for magic, command in _OTHERS.items():
        if head.startswith(magic):
            file.close()
            raise BadInput(f"{path} is packed.", hint=f"{command} {path} | holdfast diagnose /dev/stdin")
    return file


class _AsFound(io.FileIO):
    """A file as it was when it was opened: the log of a job at work may grow faster than it is read."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        found = os.fstat(self.fileno())
        # Those of /proc have no size.
        self._left = found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else sys.maxsize

    def readinto(self, into: Any) -> int:
        read = super().readinto(memoryview(into)[: self._left]) or 0
        self._left -= read
        return read


class _Unpacked(io.RawIOBase):
    """What a gzip file holds, as far as it is whole: of a log whose writer was killed, the end is missing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._inner, self._left = file, zlib.decompressobj(31), b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        while True:
            try:
                found = self._inner.decompress(self._left, len(into))
            except zlib.error:
                return 0
            self._left = self._inner.unconsumed_tail
            if self._inner.eof:  # another part may follow
                self._left, self._inner = self._inner.unused_data, zlib.decompressobj(31)
            if found:
                into[: len(found)] = found
                return len(found)
            self._left = self._left or self._file.read(1 << 16)
            if not self._left:
                return 0

    def close(self) -> None:
        self._file.close()
        super().close()
