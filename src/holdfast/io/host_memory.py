"""The bytes of a box in host memory, without torch."""

from __future__ import annotations

import numpy as np

from holdfast.buffers import Buffer
from holdfast.format.columns import Array
from holdfast.layout.box import Box


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
