"""Late-bound offsets: a shard whose place along one axis only its neighbours' lengths tell. Pure.

An unevenly sharded tensor (Megatron-FSDP cuts a flat buffer, wherever that falls) is known to a rank by its
local length and by its position in the mesh. Stock code gathers the lengths, tensor by tensor, and hangs
where ranks hold different tensors. Here every rank writes down what it knows, and whoever has everybody's
rows (the commit of a save) adds the lengths up, once.

A rank whose local shape happens to be the one that an even cut would give takes its offset for known. So
shards that could be uneven carry their position too, and if one rank of a tensor has no offset, all of the
same lane are placed anew, by their lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


class DeferredOffset(NamedTuple):
    """Where a shard stands among those that share an axis."""

    axis: int
    lane: int
    """Shards of other lanes lie elsewhere along other axes: they don't count."""
    position: int
    """Among those of the lane: offsets ascend with it."""
    length: int
    """Along the axis, of all that this rank holds there."""
    start: int
    """Along the axis, where an even cut would have it; -1 if the rank does not know, and the shard's box
    begins at 0; `told(offset)` if it knows better, so that others of the lane may be wrong."""


def told(offset: int) -> int:
    """Encode an offset that a rank knows better than an even cut would have it, as `DeferredOffset.start`."""
    return -2 - offset


class Placed(NamedTuple):
    """What adding lengths up gave."""

    shift: Array
    """Per row, what to add to the offset that it came with."""
    differ: tuple[int, int] | None
    """Two rows at one position that have different lengths, if there are any."""
    totals: list[tuple[int, int, int]]
    """For each lane of which a shard has no offset: tensor, axis, length of all together."""


def place(
    tensor: Array, axis: Array, lane: Array, position: Array, length: Array, start: Array, size: Array
) -> Placed:
    """Prefix sums over positions, for each (tensor, axis, lane) that is not known to be even; R rows in any
    order.

    `size`: of the tensor along the axis. A lane whose shards were all told, or take themselves for even, is
    left alone if it does not add up to that: a part of it is not here, and who checks coverage says where.
    """
    shift = np.zeros(len(tensor), np.int64)
    # Nearly every save: all ranks know where their shards are.
    if not (start < 0).any():
        return Placed(shift, None, [])
    # Rows in order of lanes, and of positions in each; then runs of equal keys are lanes, and positions.
    order = np.lexsort((start, position, lane, axis, tensor))
    keys = np.stack([tensor, axis, lane, position])[:, order]
    new_position = np.ones(len(tensor), bool)
    new_position[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    new_lane = np.ones(len(tensor), bool)
    new_lane[1:] = (keys[:3, 1:] != keys[:3, :-1]).any(axis=0)
    lane_of, heads = np.cumsum(new_lane) - 1, np.flatnonzero(new_lane)
    first = np.flatnonzero(new_position)  # replicas stand at one position; the first of them counts
    of = np.cumsum(new_position) - 1
    lengths, starts = length[order], start[order]
    # A lane is placed anew if a shard of it has no offset, or if some are told and all of it is here.
    ends = np.zeros(len(heads), np.int64)
    np.add.at(ends, lane_of[first], lengths[first])
    # ufunc.at, because a lane has many rows: a plain assignment by index would keep the last one's value.
    is_open, is_told = (np.zeros(len(heads), bool) for _ in range(2))
    np.logical_or.at(is_open, lane_of, starts == -1)
    np.logical_or.at(is_told, lane_of, starts < -1)
    wanted = (is_open | (is_told & (ends == size[order][heads])))[lane_of]
    unequal = wanted & (lengths != lengths[first][of])
    if unequal.any():
        row = int(np.flatnonzero(unequal)[0])
        return Placed(shift, (int(order[first[of[row]]]), int(order[row])), [])
    before = np.cumsum(lengths[first]) - lengths[first]  # over everything; less what came before the lane
    begin = before[of] - before[of][heads][lane_of]
    mine = np.where(starts < -1, -2 - starts, np.maximum(starts, 0))
    # What is empty lies nowhere, and moving it could put it outside of its tensor.
    shift[order] = np.where(wanted & (lengths > 0), begin - mine, 0)
    totals = [
        (int(keys[0, heads[number]]), int(keys[1, heads[number]]), int(ends[number]))
        for number in np.flatnonzero(is_open).tolist()
    ]
    return Placed(shift, None, totals)
