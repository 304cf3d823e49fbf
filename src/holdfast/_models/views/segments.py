"""Segments: a segment is a box of a tensor of ours that is a box of one published tensor, up to the order of
axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Dims
from holdfast.errors import BadInput

MINUS_ONE = "minus one"
"""A change of elements: ours are the published ones minus one."""
Sizes = Mapping[str, int]
"""Numbers of a model's configuration, by Hugging Face's names."""


class Segment(NamedTuple):
    """A box of our tensor, and its position in a published tensor."""

    box: Box
    """The box in our tensor."""
    name: str
    """Name of the published tensor."""
    start: Dims
    """Start of the box in the published tensor."""
    axes: tuple[int, ...]
    """For each of our axes, the published axis that it corresponds to; -1 for an axis of length 1 that has
    none. Along the other published axes the segment has one index."""
    whole: Dims = ()
    """The shape that the published tensor must have."""
    split: bool = False
    """Is `whole` the published shape with its last axis split into two?"""
    change: str = ""
    """A conversion of elements on import, which an export reverts: "" or MINUS_ONE."""
    is_copy: bool = False
    """Is it a copy of another segment, in rows that the model does not use? Only an import takes it: after
    training, these rows differ from what they were a copy of."""

    def theirs(self, part: Box) -> Box:
        """Return the box of the published tensor for a part of `box`."""
        shape = [1] * len(self.start)
        offset = list(self.start)
        for axis, low, begin, size in zip(self.axes, self.box.offset, part.offset, part.shape, strict=True):
            if axis >= 0:
                offset[axis] += begin - low
                shape[axis] = size
        return Box(tuple(offset), tuple(shape))

    def ours(self, part: Box) -> Box | None:
        """Return our box for a part of the published tensor, cut to this segment; None if outside."""
        common = self.theirs(self.box).intersect(part)
        if common is None:
            return None
        offset, shape = list(self.box.offset), [1] * len(self.axes)
        for index, axis in enumerate(self.axes):
            if axis >= 0:
                offset[index] += common.offset[axis] - self.start[axis]
                shape[index] = common.shape[axis]
        return Box(tuple(offset), tuple(shape))

    def joined(self, part: Box) -> Box:
        """Merge the two axes into which `split` divided the published tensor's last axis. The part must have
        whole pairs."""
        if not self.split:
            return part
        inner = self.whole[-1]
        return Box((*part.offset[:-2], part.offset[-2] * inner), (*part.shape[:-2], part.shape[-2] * inner))

    @property
    def published(self) -> Dims:
        """The shape of the published tensor."""
        return (*self.whole[:-2], self.whole[-2] * self.whole[-1]) if self.split else self.whole


Way = Callable[[Sequence[str], Dims, Sizes], list[Segment]]
"""Takes names of published tensors, the shape of ours, and sizes; gives segments that cover ours once."""


def some_rows(name: str, shape: Dims, ours: tuple[int, int], start: int, rows: int) -> Segment:
    """Make a segment of whole rows.

    ours: `(first, count)` of our rows. start: the first row in the published tensor, which has `rows` rows.
    """
    rest, sides = (0,) * (len(shape) - 1), shape[1:]
    first, count = ours
    box = Box((first, *rest), (count, *sides))
    return Segment(box, name, (start, *rest), tuple(range(len(shape))), (rows, *sides))


def equal_share(rows: int, parts: int, names: Sequence[str]) -> int:
    """Return the rows of each of so many equal parts. BadInput if there are no equal ones."""
    if rows % parts:
        raise BadInput(
            f"{rows} rows can't be made of {parts} equal parts of {', '.join(names)}.",
            hint="The configuration of the model does not fit its tensors.",
        )
    return rows // parts
