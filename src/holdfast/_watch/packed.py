"""Opens evidence as a stream: files, pipes, and data compressed with gzip."""

from __future__ import annotations

import gzip
import io
import os
import select
import stat
import zlib
from contextlib import suppress

from holdfast._core.base.values import Buffer
from holdfast.errors import BadInput

HEAD = 1 << 14
"""Number of bytes that `peek` can return."""
_OTHERS = {
    b"\x28\xb5\x2f\xfd": "zstdcat",
    b"BZh": "bzcat",
    b"\xfd7zXZ": "xzcat",
    b"\x04\x22\x4d\x18": "lz4cat",
}


def opened(path: str) -> io.BufferedReader[_AsFound] | io.BufferedReader[_Unpacked]:
    """Open a file for reading, and decompress gzip. Raises BadInput for other compression formats."""
    file = io.BufferedReader(_AsFound(path), HEAD)
    head = file.peek(HEAD)
    if head.startswith(b"\x1f\x8b"):
        return io.BufferedReader(_Unpacked(file), HEAD)
    for magic, command in _OTHERS.items():
        if head.startswith(magic):
            file.close()
            raise BadInput(f"{path} is packed.", hint=f"{command} {path} | holdfast diagnose /dev/stdin")
    return file


LARGEST = 64 << 30
"""Maximum number of bytes read from a file or a pipe."""
HOLE = 1 << 30
PATIENCE = 30.0
"""Timeout in seconds for the first byte from a pipe."""


class _AsFound(io.FileIO):
    """A file, read up to its size on opening: the log of a running job may grow faster than it is read."""

    def __init__(self, path: str) -> None:
        # Non-blocking, as a pipe may have no writer.
        super().__init__(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        try:
            found = os.fstat(self.fileno())
            self._refuse(path, found)
            os.set_blocking(self.fileno(), True)
        except BaseException:
            self.close()
            raise
        # Files in /proc have no size.
        self._left = found.st_size if stat.S_ISREG(found.st_mode) and found.st_size else LARGEST

    def _refuse(self, path: str, found: os.stat_result) -> None:
        """Raise BadInput for files that are endless, too large or empty of data."""
        if stat.S_ISREG(found.st_mode):
            if found.st_size > LARGEST:
                raise BadInput(
                    f"{path} has {found.st_size >> 30} GiB, and more than {LARGEST >> 30} are not read.",
                    hint=f"tail -c 1G {path} | holdfast diagnose /dev/stdin",
                )
            if found.st_size > HOLE and found.st_blocks * 512 < found.st_size // 2:
                raise BadInput(f"{path} is mostly a hole: nothing was ever written there.")
        elif stat.S_ISFIFO(found.st_mode):
            waiting = select.poll()
            waiting.register(self.fileno(), select.POLLIN)
            if not waiting.poll(PATIENCE * 1000):
                raise BadInput(f"Nobody has written into the pipe {path} for {PATIENCE:g} s.")
        elif not os.isatty(self.fileno()):
            raise BadInput(f"{path} is neither a file nor a pipe.")

    def readinto(self, into: Buffer) -> int:
        read = super().readinto(memoryview(into)[: self._left]) or 0
        self._left -= read
        return read


class _Unpacked(gzip.GzipFile):
    """The readable content of a gzip file: if the writer of a log was killed, the end is missing."""

    def __init__(self, file: io.BufferedReader[_AsFound]) -> None:
        super().__init__(fileobj=file)
        self._packed = file

    def readinto(self, into: Buffer) -> int:
        with suppress(EOFError, zlib.error, gzip.BadGzipFile):
            found = self.read1(len(into))
            into[: len(found)] = found
            return len(found)
        return 0

    def close(self) -> None:
        super().close()
        self._packed.close()
