"""Reads the tensors of a pair, slab by slab and in the dtype of the comparison, and notes what casts did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from holdfast._core.existing.comparing import BoxElements, differences
from holdfast._core.format.columns import Array
from holdfast._core.format.fingerprint import box_sums, nothing, text_of
from holdfast._core.io.raw_read import slabs
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, Dims
from holdfast._core.state.memory import torch_dtype
from holdfast._models.equality.pairs import Pair, Region
from holdfast._models.equality.rounding import LOST, cast, one_nan
from holdfast._models.equality.sides import FolderSide, Side


class PairReader:
    """What was read so far, and what the casts of the current pair did."""

    def __init__(self, where: bool, progress: Callable[[int], None]) -> None:
        self._where, self._progress = where, progress
        self.bytes_read = 0
        self.rounded: dict[str, str] = {}
        """The dtype of each tensor that only rounding makes the same."""
        self.lost: dict[str, None] = {}
        """Descriptions of values of the current pair that a cast lost, in order."""
        self.has_nan = False
        """Whether a cast value of the current pair is NaN: casts do not preserve the bits of a NaN."""

    def begin(self) -> None:
        """Begin another pair."""
        self.lost.clear()
        self.has_nan = False

    def box_sums(self, side: FolderSide, place: int, pair: Pair, region: Region, box: Box) -> str:
        """Read a box of a tensor, and return its fingerprint."""
        sums, itemsize = nothing(), DTYPES[region.dtype].size
        for part in slabs(box, itemsize):
            sums += box_sums(self._read(side, place, pair, region, part).data, itemsize, part)
        return text_of(sums)

    def elements(self, pair: Pair, *sides: Side) -> tuple[bool, int | None, Dims | None]:
        """Return whether elements differ; with `where` also how many, and the index of the first."""
        folders = [side for side in sides if isinstance(side, FolderSide)]
        if len(folders) < len(sides):  # a live state is known only by its fingerprint
            return True, None, None
        elements, first = 0, None
        for region in pair.regions:
            reads = [partial(self._read, side, place, pair, region) for place, side in enumerate(folders)]
            for found in differences(region.box, DTYPES[region.dtype].size, *reads):
                if not self._where:
                    return True, None, None
                differ = found.by_element()
                if first is None:
                    inside = np.unravel_index(int(np.argmax(differ)), found.box.shape)
                    first = tuple(int(at) + low for at, low in zip(inside, found.box.offset, strict=True))
                elements += int(differ.sum())
        return elements > 0, elements, first

    def _read(self, side: FolderSide, place: int, pair: Pair, region: Region, part: Box) -> BoxElements:
        """Read a part of a region from a side, in the dtype of the comparison."""
        stored = region.stored[place]
        tensor = side.read(pair.specs[place], part, stored)
        self.bytes_read += tensor.nbytes
        self._progress(self.bytes_read)
        if stored == region.dtype:
            return BoxElements(_bytes_of(one_nan(tensor) if region.is_cast else tensor))
        made = cast(tensor, torch_dtype(region.dtype))
        self.has_nan |= made.nan is not None
        if made.lost is None:
            return BoxElements(_bytes_of(made.tensor))
        self.rounded[pair.specs[0].name] = DTYPES[region.dtype].name
        self.lost.update({words: None for words, mask in zip(LOST, made.lost, strict=True) if mask.any()})
        lost = (made.lost[0] | made.lost[1]).reshape(-1)
        return BoxElements(_bytes_of(made.tensor), lost if lost.any() else None)


def _bytes_of(tensor: torch.Tensor) -> Array:
    data: Array = tensor.reshape(-1).view(torch.uint8).numpy()
    return data
