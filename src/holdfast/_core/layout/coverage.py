"""Check that boxes tile their tensors exactly once, for any boxes, in O(n log n).

Theory. Let f be the number of boxes that contain an index. f is 1 everywhere inside the tensor if and only if
its mixed difference is that of the tensor's own box. The mixed difference of a box is +1 or -1 at its 2^d
corners and 0 elsewhere. So collect the signed corners of all boxes, subtract those of the whole tensor, and
sort: every corner must cancel. This compares no pairs and assumes no sweep axis and no grid, so it is never
quadratic (the checks of DCP and Megatron are, for stacked experts). In lexicographic order, the first corner
that remains is where the first gap (-1) or overlap (+1) begins, so an error can name that index.

Three reductions make it fast. Leaving out an axis along which every box spans the whole tensor halves the
corners. A tensor that is one chunk needs no corners; per-expert checkpoints consist of such tensors. Boxes
that touch along one axis and agree on all others are joined first, axis by axis. That does not change f, and
leaves a single box of any regular grid, and few boxes of most other layouts. Many tensors are checked in one
sort, keyed by (tensor, corner).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
# Corners are numbered below this, and shifted by one bit for their sign, so nothing wraps.
_LIMIT = np.iinfo(np.int64).max // 4


class Problem(NamedTuple):
    """The first place at which a tensor is not covered exactly once."""

    tensor: int
    """Row of the tensor."""
    kind: str
    """`gap`, `overlap` or `outside`."""
    place: tuple[int, ...]
    """The first index (row-major) that is missing or doubled; the offset of a box outside."""
    chunk: int
    """For `outside`, the row of the box; else -1."""


def first_problem(shapes: Int64s, tensors: Int64s, offsets: Int64s, sizes: Int64s) -> Problem | None:
    """Return the first problem among tensors with d dimensions, or None.

    `shapes` is t x d; `tensors` (n) gives the row of each box in it; `offsets` and `sizes` are n x d.
    """
    count = len(shapes)
    outside = (offsets < 0) | (sizes < 0) | (offsets > shapes[tensors] - sizes)  # a sum could overflow
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        return Problem(int(tensors[row]), "outside", tuple(int(o) for o in offsets[row]), row)

    kept = (sizes > 0).all(axis=1)
    # Single-chunk tensors: the box is the whole tensor, or it leaves a gap, which the corners will locate.
    # An empty box covers nothing, so it doesn't count as a piece.
    pieces = np.bincount(tensors[kept], minlength=count)
    filled = (shapes > 0).all(axis=1)
    exact = kept & (sizes == shapes[tensors]).all(axis=1) & (pieces[tensors] == 1)
    # An empty tensor without boxes is covered: no element can be missing.
    done = ~filled & (pieces == 0)
    done[tensors[exact]] = True
    if done.all():
        return None
    open_rows = np.flatnonzero(~done)
    kept &= ~done[tensors]
    renumber = np.full(count, -1, np.int64)
    renumber[open_rows] = np.arange(len(open_rows))
    corner = _corners(shapes[open_rows], renumber[tensors[kept]], offsets[kept], sizes[kept])
    if corner is None:
        return None
    tensor, sign, place = corner
    return Problem(int(open_rows[tensor]), "overlap" if sign > 0 else "gap", place, -1)


def _corners(
    shapes: Int64s, tensors: Int64s, offsets: Int64s, sizes: Int64s
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the first corner that does not cancel, as (tensor row, sign, index), or None."""
    count, dims = shapes.shape
    # An axis along which every box spans the whole tensor adds the same pair of corners to each.
    varying = np.flatnonzero((sizes != shapes[tensors]).any(axis=0)) if len(tensors) else np.arange(dims)
    spans, starts, widths = shapes[:, varying], offsets[:, varying], sizes[:, varying]

    # Row-major positions on the grid of corner points, (span + 1) of them along each axis.
    strides = _strides(spans, range(len(varying)))
    points = strides[:, 0] * (spans[:, 0] + 1) if len(varying) else np.ones(count, np.int64)
    # int64 arithmetic wraps silently, so the bound is computed in floats.
    with np.errstate(over="ignore"):
        many = np.prod(spans.astype(float) + 1, axis=1).sum() > _LIMIT
    if many:
        return _corners_one_by_one(shapes, tensors, offsets, sizes)
    base = np.concatenate([[0], np.cumsum(points)[:-1]])

    tensors, starts, widths = _join(tensors, starts, widths, spans, base)
    keys = _signed(base[tensors] + (starts * strides[tensors]).sum(axis=1), widths * strides[tensors], 0)
    whole = _signed(base, spans * strides, 1)
    every = np.sort(np.concatenate([keys, whole]))  # (corner << 1 | negative): one fast integer sort
    # Equal corners are neighbours now. They cancel if the sum of their signs is 0.
    corner = every >> 1
    heads = np.flatnonzero(np.concatenate([[True], corner[1:] != corner[:-1]]))
    totals = np.add.reduceat(1 - 2 * (every & 1), heads)
    left = np.flatnonzero(totals)
    if not len(left):
        return None
    where = int(corner[heads[left[0]]])
    # Convert the number of the corner to its tensor, and to its index along the varying axes.
    tensor = int(np.searchsorted(base, where, side="right")) - 1
    rest, place = where - int(base[tensor]), [0] * dims
    for axis, stride in zip(varying.tolist(), strides[tensor].tolist(), strict=True):
        place[axis], rest = divmod(rest, stride)
    return tensor, int(totals[left[0]]), tuple(place)


def _strides(spans: Int64s, axes: Sequence[int]) -> Int64s:
    """Return the strides of the grid of corner points; `axes`: from the slowest to the fastest."""
    strides = np.ones_like(spans)
    for slow, fast in reversed(list(pairwise(axes))):
        strides[:, slow] = strides[:, fast] * (spans[:, fast] + 1)
    return strides


def _join(
    tensors: Int64s, starts: Int64s, widths: Int64s, spans: Int64s, base: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Join boxes that continue each other along one axis. Every index stays covered as often as before."""
    axes = range(spans.shape[1])
    begin, width = list(starts.T), list(widths.T)
    for axis in reversed(axes):
        others = [other for other in axes if other != axis]
        strides = _strides(spans, [*others, axis])
        key = base[tensors]
        for dim in axes:
            key = key + begin[dim] * strides[tensors, dim]
        # Sorted only if necessary: for the last axis, the chunks of an index already have this order.
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")
            tensors, begin, width = tensors[order], [b[order] for b in begin], [w[order] for w in width]
        apart = tensors[1:] != tensors[:-1]
        apart |= begin[axis][1:] != begin[axis][:-1] + width[axis][:-1]
        for other in others:
            apart |= (begin[other][1:] != begin[other][:-1]) | (width[other][1:] != width[other][:-1])
        heads = np.flatnonzero(np.concatenate([[True], apart])) if len(tensors) else np.zeros(0, np.int64)
        if len(heads) == len(tensors):
            continue
        sums = np.add.reduceat(width[axis], heads)
        tensors, begin, width = tensors[heads], [b[heads] for b in begin], [w[heads] for w in width]
        width[axis] = sums
    if not axes:
        return tensors, starts, widths
    return tensors, np.stack(begin, axis=1), np.stack(width, axis=1)


def _signed(corner: Int64s, widths: Int64s, negative: int) -> Int64s:
    """Return all 2^d corners of boxes as `position << 1 | is_negative`."""
    keys = (corner << 1) | negative
    for axis in range(widths.shape[1]):
        keys = np.concatenate([keys, (keys + (np.tile(widths[:, axis], 2**axis) << 1)) ^ 1])
    return keys


def _corners_one_by_one(
    shapes: Int64s, tensors: Int64s, offsets: Int64s, sizes: Int64s
) -> tuple[int, int, tuple[int, ...]] | None:
    """Do `_corners` for tensors with more points than an integer can number: compress the coordinates."""
    order = np.argsort(tensors, kind="stable")
    bounds = np.searchsorted(tensors[order], np.arange(len(shapes) + 1))
    for row in range(len(shapes)):
        mine = order[bounds[row] : bounds[row + 1]]
        low, high, ticks = offsets[mine].copy(), (offsets + sizes)[mine], []
        for axis in range(shapes.shape[1]):
            # Only coordinates at which a box begins or ends matter; they are renumbered.
            tick = np.unique(np.concatenate([low[:, axis], high[:, axis], [0, shapes[row, axis]]]))
            for edges in (low, high):
                edges[:, axis] = np.searchsorted(tick, edges[:, axis])
            ticks.append(tick)
        small = np.asarray([[len(tick) - 1 for tick in ticks]], np.int64)
        # Otherwise `_corners` would call this function again, without end.
        if np.prod(small.astype(float) + 1) > _LIMIT:
            raise OverflowError(
                f"a tensor of shape {shapes[row].tolist()} is cut along too many places to check"
            )
        corner = _corners(small, np.zeros(len(mine), np.int64), low, high - low)
        if corner is not None:
            _, sign, place = corner
            return row, sign, tuple(int(tick[index]) for tick, index in zip(ticks, place, strict=True))
    return None
