"""Host memory that bytes of a checkpoint pass through, without torch: boxes, scratch space, batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.format.columns import Array
from holdfast.layout.box import Box
from holdfast.values import Buffer

BATCH = 2 << 20
"""Bytes per batch: it is hashed and then written, and should still be in cache when the system copies it."""
BATCH_BUFFERS = 512
"""Buffers per batch: fewer than one system call accepts (IOV_MAX, 1024)."""
Progress = Callable[[int], None]
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

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self._used = 0

    def take(self, size: int) -> memoryview | None:
        """Return `size` bytes, valid until `reset`; None if the caller must flush and reset first."""
        # Views that were returned are not written yet, so the memory can't be replaced.
        if self._used and self._used + size > len(self._memory):
            return None
        if size > len(self._memory):
            self._memory = memoryview(bytearray(max(size, 2 * BATCH)))
        view = self._memory[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return view

    def reset(self) -> None:
        self._used = 0
