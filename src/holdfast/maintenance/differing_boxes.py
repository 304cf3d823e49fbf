"""Find the boxes in which the elements of two tensors differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.format.columns import Array, runs
from holdfast.layout.box import Box


def differing_boxes(x: Array, y: Array, box: Box) -> Iterator[Box]:
    """Return boxes that hold every element that differs.

    For each index of the leading axes these are runs of rows, from the first column that differs to the last.

    x, y: the bytes of the elements of `box`, row-major, of any shape.
    """
    if not box.shape:
        if not np.array_equal(x, y):
            yield box
        return
    *lead, rows, width = (1, *box.shape) if len(box.shape) == 1 else box.shape
    differ = (x.reshape(box.volume, -1) != y.reshape(box.volume, -1)).any(axis=1).reshape(-1, rows, width)
    for number in np.flatnonzero(differ.any(axis=(1, 2))).tolist():
        place = tuple(int(index) for index in np.unravel_index(number, lead)) if lead else ()
        part = differ[number]
        for first, last in runs(np.flatnonzero(part.any(axis=1)).tolist()):
            columns = np.flatnonzero(part[first : last + 1].any(axis=0))
            low, high = int(columns[0]), int(columns[-1]) + 1
            offset, shape = (*place, first, low), (*(1,) * len(place), last + 1 - first, high - low)
            if len(box.shape) == 1:
                offset, shape = (low,), (high - low,)
            yield Box(tuple(a + b for a, b in zip(offset, box.offset, strict=True)), shape)
