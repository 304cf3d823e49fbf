"""Compute the byte ranges of files that hold boxes of stored tensors. Pure.

If chunks have digests, the ranges are whole blocks, because a reader verifies whole blocks. Otherwise they
are just the bytes of the boxes; columns cut out of rows give runs at a fixed distance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import msgspec
import numpy as np

from holdfast._core.format.columns import Columns, unpad
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Dims
from holdfast._core.plan.read import Overlaps, touched_blocks


class ByteRange(msgspec.Struct, frozen=True):
    """Runs of bytes in a file at equal distances."""

    start: int
    """Position of the first run, from the start of the file."""
    length: int
    """Bytes per run."""
    step: int
    """Distance from the start of one run to that of the next."""
    count: int

    @property
    def nbytes(self) -> int:
        return self.length * self.count


def byte_ranges(columns: Columns, pairs: Overlaps) -> dict[str, list[ByteRange]]:
    """Return, by file, the ascending runs that hold the boxes in `pairs`, which must not overlap each
    other."""
    tensor, nbytes, itemsizes = columns.tensor_of_chunk(), columns.chunk_bytes(), columns.itemsizes()
    by_file: dict[str, list[ByteRange]] = {}
    by_chunk = itertools.groupby(range(len(pairs.chunk)), key=lambda pair: int(pairs.chunk[pair]))
    has_digests = len(columns.digests) > 0
    for chunk, some in by_chunk:
        row = int(tensor[chunk])
        ndim, itemsize, position = int(columns.ndim[row]), int(itemsizes[row]), int(columns.position[chunk])
        shape, origin = unpad(columns.size[chunk], ndim), unpad(columns.offset[chunk], ndim)
        boxes = [
            Box(unpad(pairs.offset[pair], ndim), unpad(pairs.size[pair], ndim)).relative_to(origin)
            for pair in some
        ]
        mine = by_file.setdefault(columns.file_names[int(columns.file[chunk])], [])
        if has_digests:
            block = int(columns.block[chunk])
            touched = {
                number for box in boxes for number in touched_blocks(shape, box, itemsize, block).tolist()
            }
            for number in sorted(touched):
                start = number * block
                length = min(block, int(nbytes[chunk]) - start)
                mine.append(ByteRange(position + start, length, length, 1))
        else:
            for box in boxes:
                mine += runs_of(shape, box, itemsize, position)
    return {name: _joined(sorted(by_file[name], key=lambda run: run.start)) for name in sorted(by_file)}


def runs_of(shape: Dims, box: Box, itemsize: int, position: int) -> list[ByteRange]:
    """Return the bytes of a box of a row-major tensor of `shape` that begins at `position`."""
    axis = len(shape) - 1  # from this axis on, the box consists of contiguous runs
    while axis > 0 and box.shape[axis] == shape[axis]:
        axis -= 1
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    start = position + sum(index * stride for index, stride in zip(box.offset, strides, strict=True))
    if not shape:
        return [ByteRange(position, itemsize, itemsize, 1)]
    length = box.shape[axis] * strides[axis]
    # Earlier axes repeat the run. While the box spans a whole axis, the runs continue at the same distance.
    step, count, lead = length, 1, axis
    while lead > 0 and (count == 1 or box.shape[lead] == shape[lead]):
        lead -= 1
        step, count = (strides[lead], box.shape[lead]) if count == 1 else (step, count * box.shape[lead])
    starts = np.asarray([start], np.int64)
    for dim in range(lead):
        starts = (starts[:, None] + np.arange(box.shape[dim]) * strides[dim]).ravel()
    return [ByteRange(begin, length, step, count) for begin in starts.tolist()]


def _joined(runs: Iterable[ByteRange]) -> list[ByteRange]:
    joined: list[ByteRange] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.count == 1 == run.count and last.start + last.length == run.start:
            length = last.length + run.length
            joined[-1] = ByteRange(last.start, length, length, 1)
        else:
            joined.append(run)
    return joined
