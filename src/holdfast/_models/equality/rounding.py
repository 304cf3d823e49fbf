"""Casts of elements to a less exact floating-point dtype, by torch (to nearest, ties to even), and detection
of values lost in the cast.

The bits of a NaN depend on the device and the instructions that cast it. So every NaN gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import Array
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
    lost: tuple[Array, Array] | None = None
    """Masks of elements that became infinite, and that became zero; None if the cast lost no bits."""
    changed: Array | None = None
    """Mask of elements that changed, lost ones included; None if none did."""
    nan: Array | None = None
    """Mask of elements that are NaN; None if none is."""


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> Cast:
    """Cast elements to a less exact dtype, and report which values the cast lost."""
    made = tensor.to(dtype)
    # Compare bits, because the process may have set the CPU to treat subnormal numbers as zero.
    bits, back = _bits(tensor), _bits(made.to(tensor.dtype))
    infinite = int(_bits(torch.tensor(float("inf"), dtype=tensor.dtype)))
    unlike, nan = bits != back, _absolute(bits) > infinite
    is_nan = nan if nan.any() else None
    if is_nan is not None:
        made, unlike = one_nan(made), unlike & ~nan
    if not unlike.any():
        return Cast(made, nan=is_nan)
    back = _absolute(back)
    return Cast(made, (unlike & (back == infinite), unlike & (back == 0)), unlike, is_nan)


def _bits(tensor: torch.Tensor) -> Array:
    bits: Array = tensor.view(_BITS[tensor.itemsize]).numpy().view(f"u{tensor.itemsize}")
    return bits


def _absolute(bits: Array) -> Array:
    """Return the bits of absolute values, which are in the order of the values."""
    return bits & (1 << 8 * bits.itemsize - 1) - 1


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


Sums = npt.NDArray[np.uint64]
"""(tensors, dtypes, 3): in its own dtype and in each less exact one, both sums of a tensor's elements, and
flags: inexact, has_nan, and one for each of LOST."""
_DIGITS = 34
"""Hex digits of a row of `Sums`: 32 of both sums, 2 of the flags."""


def no_sums(code: int, tensors: int = 1) -> Sums:
    return np.zeros((tensors, 1 + len(less_exact_than(code)), 3), np.uint64)


def add_rounded(sums: Sums, code: int, data: Buffer, box: Box) -> None:
    """Add the sums in less exact dtypes of a row-major box of one tensor. data: its bytes."""
    if not less_exact_than(code) or not box.volume:
        return
    tensor, done = torch.frombuffer(data, dtype=torch_dtype(code)), 0
    for part in cut(box, _PIECE):
        add_rounded_of_each(sums, code, tensor[None, done : done + part.volume], part)
        done += part.volume


def add_rounded_of_each(sums: Sums, code: int, stack: torch.Tensor, box: Box) -> None:
    """Add the sums in less exact dtypes of several tensors: (tensors, elements).

    box: of each of them. Many small tensors take far less time together.
    """
    if not less_exact_than(code):
        return
    bits = _absolute(_bits(stack))
    most = bits.max(1)
    bits -= 1  # so that zeros, which no cast loses, are the last
    least = bits.min(1)
    for place, other in enumerate(less_exact_than(code), 1):
        dtype = torch_dtype(other)
        low, high = _range(dtype, stack.dtype)
        made = stack.to(dtype)
        # Usually the first elements of each tensor show that it was rounded.
        flags = _changed(made[:, :_HEAD], stack[:, :_HEAD])
        if not flags.all():
            flags |= _changed(made, stack)
        if len(special := np.flatnonzero((least < low - 1) | (most > high))):
            one = cast(stack[special], dtype)
            made[special], flags[special] = one.tensor, 0
            for bit, mask in enumerate((one.changed, one.nan, *(one.lost or ()))):
                if mask is not None:
                    flags[special] |= mask.any(1).astype(np.uint64) << np.uint64(bit)
        sums[:, place, :2] += sums_of_each(made.view(torch.uint8).numpy(), DTYPES[other].size, box)
        sums[:, place, 2] |= flags


@cache
def _range(dtype: torch.dtype, of: torch.dtype) -> tuple[int, int]:
    """Return the bits of the least and the most absolute value that no cast to a less exact dtype loses, in
    the more exact dtype `of`; only values that are normal in that."""
    kind = torch.finfo(dtype)
    least = max(kind.tiny * kind.eps, torch.finfo(of).tiny)
    low, high = _bits(torch.tensor([least, kind.max], dtype=of)).tolist()
    return low, high


def _changed(made: torch.Tensor, stack: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Return for each tensor whether a cast has changed an element."""
    unlike = made.to(stack.dtype).numpy() != stack.numpy()  # several times as fast as torch's
    return np.asarray(unlike.any(1), np.uint64)


def records_of(sums: Sums) -> str:
    """Return the sums of tensors as text: for each tensor and dtype, in hex digits, both sums and the
    flags."""
    raw = np.empty((*sums.shape[:2], _DIGITS // 2), np.uint8)
    raw[..., :-1] = sums[..., :2].astype(">u8").view(np.uint8)
    raw[..., -1] = sums[..., 2]
    return raw.tobytes().hex()


def split(records: str, tensors: int) -> list[str]:
    """Return the record of each tensor."""
    width = len(records) // max(tensors, 1)
    return [records[at : at + width] for at in range(0, len(records), width or 1)]


def value_of(record: str) -> str:
    """Return the fingerprint in the tensor's own dtype."""
    return record[:32]


def total(values: Sequence[str]) -> str:
    """Return the sum of fingerprints of disjoint boxes."""
    first = sum(int(value[:16], 16) for value in values)
    second = sum(int(value[16:], 16) for value in values)
    return f"{first % (1 << 64):016x}{second % (1 << 64):016x}"


def add_up(code: int, records: Sequence[str]) -> str:
    """Return the record of a tensor from those of its boxes."""
    if len(records) == 1:
        return records[0]
    found = ""
    for at in range(0, _DIGITS * (1 + len(less_exact_than(code))), _DIGITS):
        flags = 0
        for record in records:
            flags |= int(record[at + 32 : at + _DIGITS], 16)
        found += total([record[at : at + 32] for record in records]) + f"{flags:02x}"
    return found


def rounded_of(code: int, record: str) -> dict[str, Rounded]:
    """Return the fingerprints of a tensor in less exact dtypes, by dtype name."""
    return {
        name: Rounded(record[at : at + 32], *_fate(record[at + 32 : at + _DIGITS]))
        for at, name in _places(code)
    }


@cache
def _places(code: int) -> list[tuple[int, str]]:
    """Return the less exact dtypes, by name, each with its place in a record."""
    return [(at * _DIGITS, DTYPES[other].name) for at, other in enumerate(less_exact_than(code), 1)]


@cache
def _fate(digits: str) -> tuple[bool, tuple[str, ...], bool]:
    flags = int(digits, 16)
    lost = tuple(words for bit, words in enumerate(LOST) if flags & 4 << bit)
    return bool(flags & 1), lost, bool(flags & 2)
