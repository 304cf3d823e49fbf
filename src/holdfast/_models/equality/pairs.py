"""What is compared of a tensor that two places have."""

from __future__ import annotations

from typing import NamedTuple

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import TensorSpec

UNTOLD = frozenset({"dtypes", "quantized"})
"""Details of errors about tensors that can't be compared. That is no difference."""


class Region(NamedTuple):
    box: Box
    stored: tuple[int, int]
    """The stored dtype on each side."""
    dtype: int
    """The dtype in which the sides are compared."""

    @property
    def is_cast(self) -> bool:
        """Whether the elements of a side are cast for the comparison."""
        return set(self.stored) != {self.dtype}


class Pair(NamedTuple):
    """A tensor to compare, on both sides."""

    specs: tuple[TensorSpec, TensorSpec]
    """Name, shape and dtype under which it is read from each side."""
    regions: tuple[Region, ...]
    """The boxes to compare: everything except padding."""
    prints: tuple[str | None, str | None]
    """Stored fingerprints of exactly these regions; None where unknown."""
