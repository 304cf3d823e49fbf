"""Boxes: n-dimensional ranges of a tensor's indices. Shards, stored chunks and requested parts are boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from holdfast._core.layout.tensor import Dims
from holdfast.errors import BadInput


class Box(NamedTuple):
    """The indices `offset[i] <= x[i] < offset[i] + shape[i]`. A 0-d box is one element."""

    offset: Dims
    shape: Dims

    @property
    def stop(self) -> Dims:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box, 0 if any side is empty."""
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the slices that select the box in an array of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common indices, or None if there are none."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(s > 0 for s in shape) else None

    def within(self, whole: Dims) -> bool:
        """Return whether the box lies inside a tensor of shape `whole`."""
        return len(whole) == len(self.shape) and all(
            o >= 0 and s >= 0 and o + s <= w for o, s, w in zip(self.offset, self.shape, whole, strict=True)
        )

    def relative_to(self, origin: Dims) -> Box:
        """Return the same indices, counted from `origin`."""
        # tuple() of a list is faster than of a generator: this runs for every chunk.
        return Box(tuple([o - b for o, b in zip(self.offset, origin, strict=True)]), self.shape)


def whole(shape: Dims) -> Box:
    """Return the box that covers a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def from_flat_range(shape: Dims, start: int, stop: int) -> list[Box]:
    """Return the row-major elements `[start, stop)` of a tensor as at most 2n-1 boxes, in flat order."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise BadInput(f"The flat range [{start}, {stop}) does not lie in a tensor of shape {tuple(shape)}.")
    boxes: list[Box] = []

    def walk(prefix: Dims, rest: Dims, low: int, high: int) -> None:
        if low >= high:
            return
        ones = (1,) * len(prefix)
        if len(rest) <= 1:
            boxes.append(Box((*prefix, low), (*ones, high - low)) if rest else Box(prefix, ones))
            return
        row = math.prod(rest[1:])
        (first, head), (last, tail) = divmod(low, row), divmod(high, row)
        if first == last:
            walk((*prefix, first), rest[1:], head, tail)
            return
        # In flat order: the rest of a partial first row, whole rows, the start of a partial last row.
        if head:
            walk((*prefix, first), rest[1:], head, row)
            first += 1
        if last > first:
            boxes.append(Box((*prefix, first, *(0,) * (len(rest) - 1)), (*ones, last - first, *rest[1:])))
        walk((*prefix, last), rest[1:], 0, tail)

    walk((), tuple(shape), start, stop)
    return boxes


def union(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes that cover the same indices, each once; few, and in row-major order."""
    if not boxes or not boxes[0].shape:
        return list(boxes[:1])
    edges = sorted({edge for box in boxes for edge in (box.offset[0], box.stop[0])})
    slabs: list[tuple[int, int, list[Box]]] = []
    for low, high in pairwise(edges):
        across = [box for box in boxes if box.offset[0] <= low and high <= box.stop[0]]
        inner = union([*dict.fromkeys(Box(box.offset[1:], box.shape[1:]) for box in across)])
        if inner and slabs and slabs[-1][1] == low and slabs[-1][2] == inner:
            slabs[-1] = (slabs[-1][0], high, inner)
        elif inner:
            slabs.append((low, high, inner))
    return [Box((low, *box.offset), (high - low, *box.shape)) for low, high, inner in slabs for box in inner]


def cut(box: Box, most: int) -> Iterator[Box]:
    """Yield pieces of a box of at most `most` elements, cut along its first axes, in row-major order."""
    axis = next((index for index, side in enumerate(box.shape) if side > 1), None)
    if box.volume <= most or axis is None:
        yield box
        return
    row = box.volume // box.shape[axis]
    step = max(most // row, 1)
    for low in range(0, box.shape[axis], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[axis] += low
        shape[axis] = min(step, box.shape[axis] - low)
        yield from cut(Box(tuple(offset), tuple(shape)), most)
