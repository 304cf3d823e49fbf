"""Buffers in host memory for the bytes of a checkpoint, without torch: boxes, scratch space, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import Array
from holdfast._core.layout.box import Box

BATCH = 2 << 20
"""Bytes per batch: it is hashed and then written, and should still be in cache when the system copies it."""
BATCH_BUFFERS = 512
"""Buffers per batch: fewer than one system call accepts (IOV_MAX, 1024)."""
ReportBytes = Callable[[int], None]
"""Called with the bytes moved since the last call; raises to abort the work."""


class HostMemory:
    """The bytes of one box, row-major: a `plan.shard_table.Memory`.

    array: the bytes of the box; None: allocate them, all zero.
    """

    def __init__(self, box: Box, itemsize: int, array: Array | None = None) -> None:
        # Bytes, with the bytes of an element as last axis, because NumPy has no bfloat16 and no float8.
        shape = (*box.shape, itemsize)
        self.array = np.zeros(shape, np.uint8) if array is None else array.reshape(shape)
        self.address = self.array.ctypes.data

    def gather(self, box: Box, out: Buffer) -> None:
        memoryview(out).cast("B")[:] = self.array[box.slices()].tobytes()

    def scatter(self, box: Box, data: Buffer, shape: tuple[int, ...], inside: Box) -> None:
        part = np.frombuffer(data, np.uint8).reshape(*shape, self.array.shape[-1])
        self.array[box.slices()] = part[inside.slices()]


class ScratchBuffer:
    """Reused memory for bytes that are not laid out as in the file.

    Reuse makes a copy cheap, because fresh pages cost three times the copy itself.
    """

    def __init__(self, size: int = 0) -> None:
        self._memory = np.empty(size, np.uint8).data
        self._used = 0

    def take(self, size: int) -> memoryview | None:
        """Return `size` bytes, valid until `reset`; None if the caller must flush and reset first."""
        # Views that were returned are not written yet, so the memory can't be replaced.
        if self._used and self._used + size > len(self._memory):
            return None
        if size > len(self._memory):
            self._memory = np.empty(max(size, 2 * BATCH), np.uint8).data
        view = self._memory[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return view

    @property
    def is_used(self) -> bool:
        return self._used > 0

    def reset(self) -> None:
        self._used = 0


def even_ranges(nbytes: Array, threads: int) -> Iterator[tuple[int, int]]:
    """Return four ranges (start, stop) of rows for each thread, about equal in bytes: sizes differ by orders
    of magnitude, and the slowest range determines the total time."""
    ends = np.cumsum(nbytes)
    cuts = np.searchsorted(ends, np.linspace(0, ends[-1], 4 * threads + 1)[1:-1])
    return pairwise(sorted({0, *cuts.tolist(), len(nbytes)}))


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


_Item = TypeVar("_Item", bound=_Sized)


def batches(items: Iterable[_Item], limit: int, most: int | None = None) -> Iterator[list[_Item]]:
    """Group consecutive items into batches of at most `limit` bytes and `most` items; a larger item is alone
    in its batch."""
    batch, size = list[_Item](), 0
    for item in items:
        if batch and (size + item.nbytes > limit or len(batch) == most):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.nbytes
    if batch:
        yield batch
