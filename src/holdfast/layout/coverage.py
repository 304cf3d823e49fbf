"""Do boxes tile their tensors exactly once? For any boxes, in O(n log n).

Theory. Let f be the number of boxes that contain an index. f is 1 everywhere inside the tensor
if and only if its mixed difference is that of the tensor's own box, and the mixed difference of
a box is +1 or -1 at its 2^d corners and 0 elsewhere. So write down the signed corners of all
boxes, take away those of the whole, and sort: every corner must cancel. There are no pairs, no
sweep axis and no grid to assume, so nothing can be quadratic (DCP's and Megatron's checks are,
for stacked experts). In lexicographic order the first corner left over is where the first gap
(-1) or overlap (+1) begins, so the place can be named.

Three reductions keep it fast. An axis along which every box spans the whole tensor halves the
corners if left out. A tensor that is one chunk needs no corners at all, and per-expert
checkpoints consist of those. And boxes that touch along one axis and agree on all others are first
joined, axis by axis, which changes f nowhere and leaves a single box of any regular grid, and few of
most others. Many tensors are checked in one sort, keyed by (tensor, corner).
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
    """Where a tensor is not covered exactly once."""

    tensor: int
    """Row of the tensor."""
    kind: str
    """`gap`, `overlap` or `outside`."""
    place: tuple[int, ...]
    """The first index (row-major) that is missing or doubled; the offset of a box outside."""
    chunk: int
    """For `outside`, the row of the box; else -1."""


def tiles(shape: tuple[int, ...], offsets: Int64s, sizes: Int64s) -> bool:
    """True if the boxes (`offsets` and `sizes`, each n x d) cover each index of `shape` exactly once."""
    rows = np.zeros(len(offsets), np.int64)
    return first_problem(np.asarray([shape], np.int64).reshape(1, len(shape)), rows, offsets, sizes) is None


def first_problem(shapes: Int64s, tensors: Int64s, offsets: Int64s, sizes: Int64s) -> Problem | None:
    """The first fault among tensors of one rank d, or None.

    `shapes` is t x d; `tensors` (n) says which row of it each box belongs to; `offsets` and
    `sizes` are n x d.
    """
    count = len(shapes)
    outside = (offsets < 0) | (sizes < 0) | (offsets > shapes[tensors] - sizes)  # no sum that could overflow
    if outside.any():
        row = int(np.flatnonzero(outside.any(axis=1))[0])
        return Problem(int(tensors[row]), "outside", tuple(int(o) for o in offsets[row]), row)

    kept = (sizes > 0).all(axis=1)
    # Single-chunk tensors: the box is the whole or it leaves a gap, which the corners will place.
    # A box without elements covers nothing, so it doesn't count as a piece.
    pieces = np.bincount(tensors[kept], minlength=count)
    filled = (shapes > 0).all(axis=1)
    exact = kept & (sizes == shapes[tensors]).all(axis=1) & (pieces[tensors] == 1)
    # An empty tensor without boxes is covered; there is no element that could be missing.
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
    """The first corner that does not cancel: (tensor row, sign, place)."""
    count, dims = shapes.shape
    # An axis along which every box spans the whole tensor adds the same pair of corners to each.
    varying = np.flatnonzero((sizes != shapes[tensors]).any(axis=0)) if len(tensors) else np.arange(dims)
    spans, starts, widths = shapes[:, varying], offsets[:, varying], sizes[:, varying]

    # Row-major positions on the grid of corner points, (span + 1) of them along each axis.
    strides = _strides(spans, range(len(varying)))
    points = strides[:, 0] * (spans[:, 0] + 1) if len(varying) else np.ones(count, np.int64)
    # int64 arithmetic wraps silently, so the bound is computed in floats first.
    with np.errstate(over="ignore"):
        many = np.prod(spans.astype(float) + 1, axis=1).sum() > _LIMIT
    if many:
        return _corners_one_by_one(shapes, tensors, offsets, sizes)
    base = np.concatenate([[0], np.cumsum(points)[:-1]])

    tensors, starts, widths = _join(tensors, starts, widths, spans, base)
    keys = _signed(base[tensors] + (starts * strides[tensors]).sum(axis=1), widths * strides[tensors], 0)
    whole = _signed(base, spans * strides, 1)
    every = np.sort(np.concatenate([keys, whole]))  # (corner << 1 | negative): one fast integer sort
    # Equal corners are neighbours now. The sum of their signs is what does not cancel.
    corner = every >> 1
    heads = (
        np.flatnonzero(np.concatenate([[True], corner[1:] != corner[:-1]]))
        if len(every)
        else np.zeros(0, int)
    )
    totals = np.add.reduceat(1 - 2 * (every & 1), heads) if len(every) else np.zeros(0, np.int64)
    left = np.flatnonzero(totals)
    if not len(left):
        return None
    where = int(corner[heads[left[0]]])
    # Back from the number of a corner to its tensor, and to its place on the axes that vary.
    tensor = int(np.searchsorted(base, where, side="right")) - 1
    rest, place = where - int(base[tensor]), [0] * dims
    for axis, stride in zip(varying.tolist(), strides[tensor].tolist(), strict=True):
        place[axis], rest = divmod(rest, stride)
    return tensor, int(totals[left[0]]), tuple(place)


def _strides(spans: Int64s, axes: Sequence[int]) -> Int64s:
    """Steps along each axis on the grid of corner points, `axes` from the slowest to the fastest."""
    strides = np.ones_like(spans)
    for slow, fast in reversed(list(pairwise(axes))):
        strides[:, slow] = strides[:, fast] * (spans[:, fast] + 1)
    return strides


def _join(
    tensors: Int64s, starts: Int64s, widths: Int64s, spans: Int64s, base: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Boxes that continue each other along one axis become one; every index is covered as often as before."""
    axes = range(spans.shape[1])
    begin, width = list(starts.T), list(widths.T)
    for axis in reversed(axes):
        others = [other for other in axes if other != axis]
        strides = _strides(spans, [*others, axis])
        key = base[tensors]
        for dim in axes:
            key = key + begin[dim] * strides[tensors, dim]
        # Sorted only if need be: for the last axis, chunks of an index come in this order.
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
    """All 2^d corners of boxes as `position << 1 | is_negative`."""
    keys = (corner << 1) | negative
    for axis in range(widths.shape[1]):
        keys = np.concatenate([keys, (keys + (np.tile(widths[:, axis], 2**axis) << 1)) ^ 1])
    return keys


def _corners_one_by_one(
    shapes: Int64s, tensors: Int64s, offsets: Int64s, sizes: Int64s
) -> tuple[int, int, tuple[int, ...]] | None:
    """For tensors so large that one integer can't number their points: compress the coordinates."""
    order = np.argsort(tensors, kind="stable")
    bounds = np.searchsorted(tensors[order], np.arange(len(shapes) + 1))
    for row in range(len(shapes)):
        mine = order[bounds[row] : bounds[row + 1]]
        low, high, ticks = offsets[mine].copy(), (offsets + sizes)[mine], []
        for axis in range(shapes.shape[1]):
            # Only coordinates at which something begins or ends tell boxes apart; they are numbered anew.
            tick = np.unique(np.concatenate([low[:, axis], high[:, axis], [0, shapes[row, axis]]]))
            low[:, axis], high[:, axis] = (
                np.searchsorted(tick, low[:, axis]),
                np.searchsorted(tick, high[:, axis]),
            )
            ticks.append(tick)
        small = np.asarray([[len(tick) - 1 for tick in ticks]], np.int64)
        # Else `_corners` would come back here for ever.
        if np.prod(small.astype(float) + 1) > _LIMIT:
            raise OverflowError(
                f"a tensor of shape {shapes[row].tolist()} is cut along too many places to check"
            )
        corner = _corners(small, np.zeros(len(mine), np.int64), low, high - low)
        if corner is not None:
            return (
                row,
                corner[1],
                tuple(int(tick[index]) for tick, index in zip(ticks, corner[2], strict=True)),
            )
    return None
