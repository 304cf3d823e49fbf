"""The bytes of a box in host memory, without torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from holdfast.format.columns import Array
from holdfast.layout.box import Box
from holdfast.values import Buffer


class HostMemory:
    """The bytes of one box, row-major: `plan.shard_table.Memory`.

    array: bytes to use, as many as the box has; None: new ones, all zero.
    """

    def __init__(self, box: Box, itemsize: int, array: Array | None = None) -> None:
        # Bytes, with an element's as the last axis: NumPy has no bfloat16 and no float8.
        shape = (*box.shape, itemsize)
        self.array = np.zeros(shape, np.uint8) if array is None else array.reshape(shape)
        self.address = self.array.ctypes.data

    def gather(self, box: Box, out: Buffer) -> None:
        memoryview(out).cast("B")[:] = self.array[box.slices()].tobytes()

    def scatter(self, box: Box, data: Buffer, shape: tuple[int, ...], inside: Box) -> None:
        part = np.frombuffer(data, np.uint8).reshape(*shape, self.array.shape[-1])
        self.array[box.slices()] = part[inside.slices()]


# A batch is hashed and then written, so it should still be in cache when the system copies it; and it has
# fewer buffers than one system call takes (IOV_MAX, 1024).
BATCH = 2 << 20


BATCH_BUFFERS = 512


Progress = Callable[[int], None]
"""Told the bytes moved since the last call; raises to give the work up."""


class ScratchBuffer:
    """Memory that is used again and again, for bytes that do not lie as the file wants them.

    Warm memory is what makes a copy cheap: fresh pages cost three times the copy itself.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray())
        self._used = 0

    def take(self, size: int) -> memoryview | None:
        """`size` bytes, valid until `reset`; None when that is due first."""
        # Views that were given out are not written yet: only a flush may make room.
        if self._used and self._used + size > len(self._memory):
            return None
        if size > len(self._memory):
            self._memory = memoryview(bytearray(max(size, 2 * BATCH)))
        view = self._memory[self._used : self._used + size]
        self._used += -(-size // 64) * 64
        return view

    def reset(self) -> None:
        self._used = 0
