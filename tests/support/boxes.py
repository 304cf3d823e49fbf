"""Boxes to test with."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.layout.box import Box


def split(box: Box, axis: int, parts: int) -> Iterator[Box]:
    """Cut into `parts` along `axis`, as evenly as whole indices allow; empty parts are left out."""
    size = box.shape[axis]
    for part in range(parts):
        low, high = size * part // parts, size * (part + 1) // parts
        if low < high:
            offset, shape = list(box.offset), list(box.shape)
            offset[axis], shape[axis] = offset[axis] + low, high - low
            yield Box(tuple(offset), tuple(shape))
