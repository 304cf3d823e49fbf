"""Shared memory that a state is copied into, reused from save to save. No torch.

It is a memfd: anonymous, so nothing is left in /dev/shm however the processes end, and not limited by the
size of that mount, which is small in containers. The writer process maps the same pages.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from holdfast._core.base.values import Buffer, size_text
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Dims
from holdfast.errors import SaveFailed

ALIGN = 64
_HUGE = 2 << 20
_BY_FILE = 256 << 10
"""Minimum bytes of a copy into unallocated pages to use a write to the file: it takes half the time of page
faults every 4 KiB."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, of Linux 5.14."""
_AT_ONCE = 64 << 20
"""Bytes to populate per call; during a call, other threads can't map memory."""


_numbers = itertools.count(1)


_LIMITS = {
    # A memfd is a file, so the limit of a file's size holds for it.
    errno.EFBIG: (resource.RLIMIT_FSIZE, "the size of a file", "-f"),
    errno.ENOMEM: (resource.RLIMIT_AS, "address space", "-v"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "open files", "-n"),
}
"""For each errno: the process limit that was reached, its name, and the option of `ulimit` that sets it."""


@contextmanager
def _room_for(nbytes: int) -> Iterator[None]:
    """Convert a failed allocation for a copy of `nbytes` to SaveFailed, which names the limit that was
    reached."""
    try:
        yield
    except OSError as error:
        why, raising = str(error.strerror), ""
        if error.errno in _LIMITS:
            limit, name, option = _LIMITS[error.errno]
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                shown = str(most) if limit == resource.RLIMIT_NOFILE else size_text(most)
                why += f" (the limit of {name} of this process is {shown})"
                raising = f"Raise the limit (ulimit {option}). "
        raise SaveFailed(
            f"The copy of the state for an asynchronous save ({size_text(nbytes)} of shared memory) could "
            f"not be made: {why}.",
            hint=f"{raising}With a smaller Options(host_memory_budget=) the state is copied in parts; a "
            "synchronous save copies nothing.",
            details={"errno": error.errno},
        ) from error


class Arena:
    """Memory under a file descriptor. `address` changes when it grows.

    Raises SaveFailed if the system refuses memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.number = next(_numbers)
        """Never reused in this process, unlike descriptors and addresses."""
        self.size = 0
        self.address = 0
        self.unpin: Callable[[], object] | None = None
        """Undoes the pinning of the pages, if they are pinned."""
        self.is_new = False
        """Whether its pages are not yet allocated, or not yet mapped here."""
        self._map: mmap.mmap | None = None
        self._keep: object = None
        # Last: `close`, which an interrupt of these lines leads to, needs the rest if there is a descriptor.
        with _room_for(0):
            self.fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC) if fd is None else fd
        if fd is not None:
            self._attach(os.fstat(fd).st_size)

    def reserve(self, size: int) -> None:
        """Grow to at least `size` bytes; the content is lost if it has to grow."""
        if size > self.size:
            # Whole huge pages: fewer faults, and the next save of a model that grew a little fits as well.
            size = -(-size // _HUGE) * _HUGE
            with _room_for(size):
                os.ftruncate(self.fd, size)
                self.is_new = True
                self._attach(size)

    def copy(self, start: int, address: int, nbytes: int) -> None:
        """Copy bytes of this process to `start`."""
        if not self.is_new or nbytes < _BY_FILE:
            ctypes.memmove(self.address + start, address, nbytes)
            return
        source = memoryview((ctypes.c_ubyte * nbytes).from_address(address))
        while len(source):  # one write takes 2 GiB at most
            with _room_for(nbytes):
                written = os.pwrite(self.fd, source, start)
            source, start = source[written:], start + written

    def populate(self) -> None:
        """Map the pages of a new arena, so that later copies meet no faults; not on the training thread."""
        if self.is_new:
            # Not `mmap.madvise`, which holds the GIL meanwhile.
            advise = ctypes.CDLL(None).madvise
            advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            for start in range(0, self.size, _AT_ONCE):
                advise(self.address + start, min(_AT_ONCE, self.size - start), _POPULATE_WRITE)
            self.is_new = False

    def _attach(self, size: int) -> None:
        self._detach()
        if size:
            self._map = mmap.mmap(self.fd, size)
            self._keep = (ctypes.c_ubyte * size).from_buffer(self._map)
            self.address, self.size = ctypes.addressof(self._keep), size

    def _detach(self) -> None:
        # Reset first: Ctrl-C may interrupt any call below, and no copy may go to an unmapped address.
        unpin, held = self.unpin, self._map
        self.unpin, self._map, self.address, self.size = None, None, 0, 0
        # Unpin while the pages are still mapped: the driver finds them by their address.
        if unpin is not None:
            unpin()
        # Before `close`, as an mmap can't be closed while something has a buffer of it.
        self._keep = None
        if held is not None:
            held.close()

    def view(self, start: int, size: int) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)[start : start + size]

    def close(self) -> None:
        if getattr(self, "fd", -1) >= 0:  # there may have been none left
            self._detach()
            os.close(self.fd)
            self.fd = -1

    # A default argument, since the module's globals may be gone when the interpreter is finalised.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # the system frees everything then
            self.close()


class ArenaMemory:
    """A shard of `shape` in an arena, row-major. `address` is the address of its first element, even if that
    was not copied: if this rank writes only a part of a shard, only that part is in the arena."""

    __slots__ = ("_itemsize", "_shape", "address")

    def __init__(self, address: int, shape: Dims, itemsize: int) -> None:
        self.address, self._shape, self._itemsize = address, shape, itemsize

    def gather(self, box: Box, out: Buffer) -> None:
        element = np.dtype(f"V{self._itemsize}")
        count = int(np.prod(self._shape, dtype=np.int64))
        # If the shard was copied in part, this array extends beyond the copied bytes; `box` never does.
        raw: Buffer = (ctypes.c_ubyte * (count * self._itemsize)).from_address(self.address)
        part = np.frombuffer(raw, element).reshape(self._shape)[box.slices()]
        np.frombuffer(out, element).reshape(part.shape)[...] = part

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        raise NotImplementedError("an arena is written by copying a state into it")
