"""The body of an index, in pages: each is read at most once, and verified before a byte of it is used."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from holdfast._core.format.columns import Array
from holdfast._core.format.container import Header, Read
from holdfast._core.format.digest import digest
from holdfast._core.format.limits import bounded_memory
from holdfast.errors import CorruptCheckpoint

PAGE = 16 << 10
Spans = tuple[Array, Array]
"""Byte ranges of the body: starts and stops."""


def _empty(length: int) -> Array:
    """Return an array of bytes whose memory the system allocates only when it is written."""
    if length < 1 << 20:
        return np.empty(length, "u1")
    try:
        room = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError from None
    with suppress(OSError):  # this kernel has no huge pages
        # With huge pages, which NumPy requests, each index page would take 2 MiB.
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(room, "u1")


class Pages:
    """The pages of an index's body. Only pages that were read take memory.

    read: returns bytes of the index file. start, length: of the body in it. digests: one for each page.
    """

    def __init__(self, read: Read, start: int, length: int, digests: Array, where: str) -> None:
        self._read, self._start, self._where = read, start, where
        self._digests = digests.tolist()
        with bounded_memory(where):
            self._bytes = _empty(length)
        self.content = self._bytes.view()
        """The whole body, read-only; only bytes that were passed to `require` are valid."""
        self.content.flags.writeable = False
        self._there = np.zeros(len(self._digests), bool)
        self._has_all = not self._digests

    def between(self, start: int, stop: int) -> Array:
        """Return bytes of the body, read-only, without a copy."""
        first, last = start // PAGE, -(-stop // PAGE)
        if not self._has_all and not self._there[first:last].all():
            self.require([(np.asarray([start]), np.asarray([stop]))])
        return self.content[start:stop]

    def require(self, spans: Iterable[Spans]) -> None:
        """Read and verify the pages that contain these bytes, unless already read, in as few reads as
        possible."""
        if self._has_all:
            return
        count = len(self._there)
        change = np.zeros(count + 1, np.int64)
        for starts, stops in spans:
            some = stops > starts
            change += np.bincount(starts[some] // PAGE, minlength=count + 1)
            change -= np.bincount(-(-stops[some] // PAGE), minlength=count + 1)
        missing = (change[:count].cumsum() > 0) & ~self._there
        # One unneeded page costs less than a second read.
        missing[1:-1] |= missing[:-2] & missing[2:] & ~self._there[1:-1]
        pages = missing.nonzero()[0]
        if len(pages):
            for run in np.split(pages, (np.diff(pages) > 1).nonzero()[0] + 1):
                self._fetch(int(run[0]), int(run[-1]) + 1)

    def _fetch(self, first: int, last: int) -> None:
        low, high = first * PAGE, min(last * PAGE, len(self._bytes))
        data = self._read(self._start + low, high - low)
        if len(data) != high - low:
            raise CorruptCheckpoint(f"{self._where} ends before its page {last}: it is truncated.")
        view = memoryview(data)
        for page in range(first, last):
            if digest(view[page * PAGE - low : (page + 1) * PAGE - low]) != self._digests[page]:
                raise CorruptCheckpoint(
                    f"Page {page} of {self._where} does not match its digest: the file is damaged."
                )
        if high - low == len(self.content):
            self.content = np.frombuffer(data, "u1")  # all of it: nothing is copied
        else:
            self._bytes[low:high] = np.frombuffer(data, "u1")
        self._there[first:last] = True
        self._has_all = bool(self._there.all())


def open_pages(read: Read, header: Header, size: int, where: str) -> tuple[Pages, bytes]:
    """Check the seal of an index of `size` bytes; return its pages (none is read yet) and the seal."""
    # The last 16 bytes are the seal: a digest of the header, and one of the page digests, which precede it.
    # The size bounds the number of page digests, so all is read at once.
    most = min(-(-size // PAGE) * 8 + 16, size)
    ending = read(size - most, most)
    seal = np.frombuffer(ending[-16:] if len(ending) == most >= 16 else b"", "<u8")
    if len(seal) != 2 or int(seal[0]) != digest(header.raw):
        raise CorruptCheckpoint(f"The header of {where} does not match its digest: the file is damaged.")
    try:
        start, stop = header.entries["pages"].data_offsets
    except KeyError:
        raise CorruptCheckpoint(f"{where} has no page digests: it is not an index.") from None
    # `pages` follows the body, so its offset is the body's length.
    if stop - start != -(-start // PAGE) * 8 or size != header.data_start + stop + 16:
        raise CorruptCheckpoint(f"{where} is {size} bytes long, which is not what its header says.")
    raw = ending[most - 16 - (stop - start) : -16]
    if int(seal[1]) != digest(raw):
        raise CorruptCheckpoint(f"The page digests of {where} do not match theirs: the file is damaged.")
    return Pages(read, header.data_start, start, np.frombuffer(raw, "<u8"), where), seal.tobytes()
