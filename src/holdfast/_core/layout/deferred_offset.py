"""Compute deferred offsets: shard offsets along one axis that depend on the local length of every rank. Pure.

Of an unevenly sharded tensor (Megatron-FSDP cuts a flat buffer at any element), a rank knows only its local
length and its position in the mesh. Stock code gathers the lengths, tensor by tensor, and hangs if ranks hold
different tensors. Here every rank records what it knows. The process that has the rows of all ranks (the
commit of a save) adds up the lengths, once.

A rank whose local shape equals that of an even cut assumes that it knows its offset. So shards that could be
uneven record their position too. If one rank of a shard line has no offset, the offsets of the whole line are
computed from the lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class DeferredOffset(NamedTuple):
    """The position of a shard on its shard line: the sequence of adjacent shards along an axis."""

    axis: int
    lane: int
    """Number of the shard line. Shards of other lines differ along other axes, and don't count."""
    position: int
    """Position on the line; offsets ascend with it."""
    length: int
    """Length of this rank's shard along the axis."""
    start: int
    """Offset along the axis that an even cut would give; -1 if the rank does not know it, and the shard's box
    begins at 0; `told(offset)` if the rank knows the true offset, so that others of the line may be wrong."""


def told(offset: int) -> int:
    """Encode a true offset, which may differ from that of an even cut, as `DeferredOffset.start`."""
    return -2 - offset


class Placed(NamedTuple):
    """The result of adding up lengths."""

    shift: IntArray
    """Per row, what to add to its offset."""
    differ: tuple[int, int] | None
    """Two rows at one position with different lengths, if there are any."""
    totals: list[tuple[int, int, int]]
    """For each shard line in which a shard has no offset: tensor, axis, total length."""


def place(
    tensor: IntArray,
    axis: IntArray,
    lane: IntArray,
    position: IntArray,
    length: IntArray,
    start: IntArray,
    size: IntArray,
) -> Placed:
    """Compute offsets as prefix sums over positions, for each line (tensor, axis, lane) that is not known to
    be even. Rows may have any order.

    size: of the tensor along the axis. If every shard of a line has an offset, and the lengths do not add up
    to `size`, the line stays unchanged: a part of it is missing, and the coverage check will locate it.
    """
    shift = np.zeros(len(tensor), np.int64)
    # In nearly every save all ranks know the offsets of their shards.
    if not (start < 0).any():
        return Placed(shift, None, [])
    # Sort rows by line, then by position: runs of equal keys are lines, and positions.
    order = np.lexsort((start, position, lane, axis, tensor))
    keys = np.stack([tensor, axis, lane, position])[:, order]
    new_position = np.ones(len(tensor), bool)
    new_position[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    new_lane = np.ones(len(tensor), bool)
    new_lane[1:] = (keys[:3, 1:] != keys[:3, :-1]).any(axis=0)
    lane_of, heads = np.cumsum(new_lane) - 1, np.flatnonzero(new_lane)
    first = np.flatnonzero(new_position)  # replicas share a position; the first one counts
    of = np.cumsum(new_position) - 1
    lengths, starts = length[order], start[order]
    # A line gets new offsets if one of its shards has none, or if some are told and no part is missing.
    ends = np.zeros(len(heads), np.int64)
    np.add.at(ends, lane_of[first], lengths[first])
    # ufunc.at, because a line has many rows: an indexed assignment would keep only the last value.
    is_open, is_told = (np.zeros(len(heads), bool) for _ in range(2))
    np.logical_or.at(is_open, lane_of, starts == -1)
    np.logical_or.at(is_told, lane_of, starts < -1)
    wanted = (is_open | (is_told & (ends == size[order][heads])))[lane_of]
    unequal = wanted & (lengths != lengths[first][of])
    if unequal.any():
        row = int(np.flatnonzero(unequal)[0])
        return Placed(shift, (int(order[first[of[row]]]), int(order[row])), [])
    before = np.cumsum(lengths[first]) - lengths[first]  # over all lines
    begin = before[of] - before[of][heads][lane_of]  # from the start of the line
    mine = np.where(starts < -1, -2 - starts, np.maximum(starts, 0))
    # An empty shard has no position, and moving it could put it outside of its tensor.
    shift[order] = np.where(wanted & (lengths > 0), begin - mine, 0)
    totals = [
        (int(keys[0, heads[number]]), int(keys[1, heads[number]]), int(ends[number]))
        for number in np.flatnonzero(is_open).tolist()
    ]
    return Placed(shift, None, totals)
