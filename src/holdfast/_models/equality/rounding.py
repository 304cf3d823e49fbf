"""Casts of elements to a less exact floating-point dtype, by torch (to nearest, ties to even), and detection
of values lost in the cast.

The bits of a NaN depend on the device and the instructions that cast it. So every NaN gets the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast._core.base.values import Buffer
from holdfast._core.format.fingerprint import sums_of_each
from holdfast._core.layout.box import Box, cut
from holdfast._core.layout.tensor import DTYPES, FLOATS
from holdfast._core.state.memory import torch_dtype

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 17
"""Number of elements rounded at a time: small enough for the cache, and for memory that is not fresh."""
_HEAD = 64
"""Elements of each tensor that are looked at first."""
LOST = "become infinite", "become zero"


class Cast(NamedTuple):
    """Elements in a less exact dtype."""

    tensor: torch.Tensor
    lost: tuple[torch.Tensor, torch.Tensor] | None = None
    """Masks of elements that became infinite, and that became zero; None if the cast lost no bits."""
    changed: torch.Tensor | None = None
    """Mask of elements that changed, lost ones included; None if none did."""
    has_nan: bool = False


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> Cast:
    """Cast elements to a less exact dtype, and report which values the cast lost."""
    made, nan = tensor.to(dtype), tensor.isnan()
    bits, has_nan = _BITS[tensor.itemsize], bool(nan.any())
    # Compare bits, because the process may have set the CPU to treat subnormal numbers as zero.
    unlike = made.to(tensor.dtype).view(bits) != tensor.view(bits)
    if has_nan:
        made, unlike = one_nan(made), unlike & ~nan
    if not unlike.any():
        return Cast(made, has_nan=has_nan)
    return Cast(made, (unlike & made.isinf(), unlike & (made == 0)), unlike, has_nan)


def one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return floating-point elements, with the same bits for every NaN."""
    return tensor.masked_fill(tensor.isnan(), float("nan"))


class Rounded(msgspec.Struct, frozen=True):
    """The fingerprint of a tensor whose elements were rounded to a less exact dtype."""

    value: str
    """32 hex digits."""
    inexact: bool
    """Whether rounding has changed an element."""
    lost: tuple[str, ...]
    """How values were lost: "become infinite", "become zero"."""
    has_nan: bool
    """Whether any element is NaN. `value` is computed with the same bits for every NaN."""


@cache
def less_exact_than(code: int) -> tuple[int, ...]:
    """Return the floating-point dtypes with fewer bits than this one; none for any other dtype."""
    if code not in FLOATS:
        return ()
    return tuple(other for other in FLOATS if DTYPES[other].size < DTYPES[code].size)


Numbers = tuple[int, int, int]
"""Both sums of a box in a less exact dtype, and flags: inexact, has_nan, and one for each of LOST."""


class RoundedSums:
    """The sums of elements, rounded to each less exact dtype."""

    def __init__(self, code: int) -> None:
        self._from = code
        self._found = [(0, 0, 0) for _ in less_exact_than(code)]

    def add(self, data: Buffer, box: Box) -> None:
        """Add the elements of a row-major box. data: their bytes."""
        if not self._found or not box.volume:
            return
        tensor, done = torch.frombuffer(data, dtype=torch_dtype(self._from)), 0
        for part in cut(box, _PIECE):
            piece = tensor[None, done : done + part.volume]
            done += part.volume
            (numbers,) = rounded_of_each(self._from, piece, part)
            self._found = [
                (first + one, second + another, flags | more)
                for (first, second, flags), (one, another, more) in zip(self._found, numbers, strict=True)
            ]

    def numbers(self) -> list[Numbers]:
        """Return the sums by dtype, for `rounded_of`."""
        return [(first % (1 << 64), second % (1 << 64), flags) for first, second, flags in self._found]


def _in_range(kind: torch.finfo, least: float, most: float) -> bool:
    """Return whether no element is lost in a cast, or is NaN. least, most: of the absolute values."""
    return bool(kind.tiny * kind.eps <= least and most <= kind.max)


def rounded_of_each(code: int, stack: torch.Tensor, box: Box) -> list[list[Numbers]]:
    """Return the sums in less exact dtypes of each of several tensors: (tensors, elements).

    box: of each of them. Many small tensors take far less time together.
    """
    found: list[list[Numbers]] = [[] for _ in range(len(stack))]
    bounds = tuple(map(float, torch.aminmax(stack.abs()))) if less_exact_than(code) else (0.0, 0.0)
    for other in less_exact_than(code):
        dtype = torch_dtype(other)
        if _in_range(torch.finfo(dtype), *bounds):
            made = stack.to(dtype)
            # Usually the first elements of each tensor show that it was rounded.
            flags = _any(made[:, :_HEAD].to(stack.dtype) != stack[:, :_HEAD])
            if not flags.all():
                flags |= _any(made.to(stack.dtype) != stack)
        else:
            one = cast(stack, dtype)
            made, flags = one.tensor, np.zeros(len(stack), np.int64)
            masks = (one.changed, stack.isnan() if one.has_nan else None, *(one.lost or ()))
            for bit, mask in enumerate(masks):
                if mask is not None:
                    flags |= _any(mask) << bit
        sums = sums_of_each(made.view(torch.uint8).numpy(), DTYPES[other].size, box)
        for numbers, (first, second), flag in zip(found, sums.tolist(), flags.tolist(), strict=True):
            numbers.append((first, second, flag))
    return found


def _any(mask: torch.Tensor) -> npt.NDArray[np.int64]:
    return np.asarray(mask.numpy().any(1), np.int64)  # ten times as fast as torch's


def rounded_of(code: int, boxes: list[list[Numbers]]) -> dict[str, Rounded]:
    """Combine the numbers of all boxes of a tensor to its fingerprints, by dtype name."""
    found: dict[str, Rounded] = {}
    for place, other in enumerate(less_exact_than(code)):
        first = second = flags = 0
        for one, another, more in (numbers[place] for numbers in boxes):
            first, second, flags = first + one, second + another, flags | more
        lost = tuple(words for bit, words in enumerate(LOST) if flags & 4 << bit)
        value = f"{first % (1 << 64):016x}{second % (1 << 64):016x}"
        found[DTYPES[other].name] = Rounded(value, bool(flags & 1), lost, bool(flags & 2))
    return found
