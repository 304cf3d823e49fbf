"""Compute which bytes of which chunks a rank needs: intersect boxes without comparing every pair. Pure.

For each tensor the wanted boxes are joined with the stored ones. Few boxes are compared directly. Many are
joined through a grid: along an axis on which the intervals of the stored boxes are equal or disjoint, each
box gets an interval number. The numbers of all such axes form a key, and a wanted box looks up just the keys
that it covers. Other axes are filtered afterwards. If no axis is a grid, a sweep along the axis with the
fewest candidates is used.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from holdfast._core.format.columns import Array, expand_ranges
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Dims

DIRECT = 32
"""All pairs of boxes of a tensor are compared directly if there are at most DIRECT pairs per box."""


class Overlaps(NamedTuple):
    """Pairs of a wanted box and a stored chunk that share elements."""

    wanted: Array
    chunk: Array
    offset: Array
    """Global indices of the common box."""
    size: Array


def overlaps(
    tensors: int,
    wanted_tensor: Array,
    wanted_offset: Array,
    wanted_size: Array,
    chunk_tensor: Array,
    chunk_offset: Array,
    chunk_size: Array,
) -> Overlaps:
    """Return all pairs that intersect, ordered by chunk. Boxes have equal dimensions; `chunk_tensor`
    ascends."""
    chunks_of = np.bincount(chunk_tensor, minlength=tensors)
    end = chunks_of.cumsum()
    begin = end - chunks_of
    wanted_of = np.bincount(wanted_tensor, minlength=tensors)
    # Nearly all tensors have few boxes, and are handled together. The loop is for the others.
    heavy = chunks_of * wanted_of > DIRECT * (chunks_of + wanted_of)
    light = (~heavy[wanted_tensor]).nonzero()[0]
    counts = chunks_of[wanted_tensor[light]]
    lists = [(light.repeat(counts), expand_ranges(begin[wanted_tensor[light]], counts))]
    for tensor in heavy.nonzero()[0].tolist():
        mine = (wanted_tensor == tensor).nonzero()[0]
        theirs = np.arange(begin[tensor], end[tensor])
        w, c = candidate_pairs(
            wanted_offset[mine], wanted_size[mine], chunk_offset[theirs], chunk_size[theirs]
        )
        lists.append((mine[w], theirs[c]))
    wanted = np.concatenate([pair[0] for pair in lists])
    chunk = np.concatenate([pair[1] for pair in lists])
    low = np.maximum(wanted_offset[wanted], chunk_offset[chunk])
    high = np.minimum(wanted_offset[wanted] + wanted_size[wanted], chunk_offset[chunk] + chunk_size[chunk])
    # The exact test, because candidates are a superset.
    hit = (low < high).all(axis=1).nonzero()[0]
    # By chunk, because the reader handles all pairs of a chunk together, and reads its blocks once.
    hit = hit[np.argsort(chunk[hit], kind="stable")]
    return Overlaps(wanted[hit], chunk[hit], low[hit], (high - low)[hit])


def candidate_pairs(wo: Array, ws: Array, co: Array, cs: Array) -> tuple[Array, Array]:
    """Return candidate pairs of one tensor: a superset of those that intersect, and not much larger.

    wo, ws: offset and size of wanted boxes. co, cs: of chunks.
    """
    key = np.zeros(len(co), np.int64)
    cells_key = np.zeros(len(wo), np.int64)
    owner = np.arange(len(wo))
    used = False
    for axis in range(co.shape[1]):
        starts, number = np.unique(co[:, axis], return_inverse=True)
        if len(starts) < 2:
            continue
        stops = np.zeros(len(starts), np.int64)
        np.maximum.at(stops, number, co[:, axis] + cs[:, axis])
        # In a grid, intervals with equal starts have equal stops, and stop before the next one starts.
        if (co[:, axis] + cs[:, axis] != stops[number]).any() or (stops[:-1] > starts[1:]).any():
            continue
        low = np.searchsorted(stops, wo[owner, axis], side="right")
        high = np.searchsorted(starts, (wo + ws)[owner, axis], side="left")
        counts = np.maximum(high - low, 0)
        if int(counts.sum()) > 4 * (len(co) + len(wo)) + len(owner):
            continue  # wanted boxes span a sparse grid: leave this axis to the exact test
        # A key that overflows int64 wraps, and may equal another: that adds candidates, and loses none.
        owner = owner.repeat(counts)
        cells_key = cells_key.repeat(counts) * len(starts) + expand_ranges(low, counts)
        key = key * len(starts) + number
        used = True
    if not used:
        pairs = _sweep(wo, ws, co, cs)
        assert pairs is not None
        return pairs
    order = np.argsort(key, kind="stable")
    left = np.searchsorted(key[order], cells_key, side="left")
    right = np.searchsorted(key[order], cells_key, side="right")
    counts = right - left
    # With more than a few candidates per box, the grid axes do not separate the boxes well.
    if (many := int(counts.sum())) > 4 * (len(co) + len(wo)):
        fewer = _sweep(wo, ws, co, cs, many)  # another axis may separate them better
        if fewer is not None:
            return fewer
    return owner.repeat(counts), order[expand_ranges(left, counts)]


def _sweep(
    wo: Array, ws: Array, co: Array, cs: Array, below: int | None = None
) -> tuple[Array, Array] | None:
    """Return candidates by one axis: chunks that begin before the wanted box ends, and not too early.

    None if they are not fewer than `below`.
    """
    best: tuple[int, Array, Array, Array] | None = None
    for axis in range(co.shape[1]):
        order = np.argsort(co[:, axis], kind="stable")
        starts = co[order, axis]
        # A chunk that begins before the wanted box by more than the widest chunk's length can't reach it.
        reach = int(cs[:, axis].max(initial=0))
        left = np.searchsorted(starts, wo[:, axis] - reach, side="right")
        right = np.searchsorted(starts, wo[:, axis] + ws[:, axis], side="left")
        counts = np.maximum(right - left, 0)
        if best is None or int(counts.sum()) < best[0]:
            best = int(counts.sum()), order, left, counts
    assert best is not None
    total, order, left, counts = best
    if below is not None and total >= below:
        return None
    return np.arange(len(wo)).repeat(counts), order[expand_ranges(left, counts)]


def touched_blocks(shape: Dims, box: Box, itemsize: int, block: int) -> Array:
    """Return the numbers of the blocks of a row-major chunk that hold bytes of a box in it, ascending."""
    if box.shape == shape:
        return np.arange(-(-math.prod(shape) * itemsize // block))
    axis = len(shape) - 1  # from this axis on, the box consists of contiguous runs
    while axis > 0 and box.shape[axis] == shape[axis]:
        axis -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # The first element of each run: every axis before `axis` multiplies the number of runs.
    starts = np.asarray([sum(o * s for o, s in zip(box.offset, strides, strict=True))], np.int64)
    for dim in range(axis):
        starts = (starts[:, None] + np.arange(box.shape[dim]) * strides[dim]).ravel()
    run = math.prod(box.shape[axis:]) * itemsize
    first = starts * itemsize // block
    numbers = expand_ranges(first, -(-(starts * itemsize + run) // block) - first)
    return numbers if len(starts) == 1 else np.unique(numbers)
