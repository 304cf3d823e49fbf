"""Boxes to test with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from holdfast._core.layout.box import Box
from holdfast._core.layout.coverage import first_problem


def split(box: Box, axis: int, parts: int) -> Iterator[Box]:
    """Cut into `parts` along `axis`, as evenly as whole indices allow; empty parts are left out."""
    size = box.shape[axis]
    for part in range(parts):
        low, high = size * part // parts, size * (part + 1) // parts
        if low < high:
            offset, shape = list(box.offset), list(box.shape)
            offset[axis], shape[axis] = offset[axis] + low, high - low
            yield Box(tuple(offset), tuple(shape))


def tiles(shape: tuple[int, ...], offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
    """Return whether the boxes (`offsets` and `sizes`, each n x d) cover each index of `shape` exactly
    once."""
    rows = np.zeros(len(offsets), np.int64)
    return first_problem(np.asarray([shape], np.int64).reshape(1, len(shape)), rows, offsets, sizes) is None
