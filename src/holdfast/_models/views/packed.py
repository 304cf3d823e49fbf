"""Elements of less than a byte: mxfp4 as gpt-oss has its experts, and numbers that hold several elements of a
row (`packed_form`). They are multiplied by their scales as they are read."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, TensorSpec
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._models.views.hub_format import Place
from holdfast._models.views.packed_form import PackedForm
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.scaled import AT_ONCE, no_scales, values_of
from holdfast._models.views.segments import Segment
from holdfast.errors import ShapeMismatch

Floats: TypeAlias = npt.NDArray[np.float32]
_BYTES = CODE_OF["uint8"]
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that are published for a tensor in mxfp4."""
_GROUP, _BIAS = 32, 127
"""In mxfp4: elements that share a scale, and the bias of the scale's exponent."""
_AT_ONCE = 1 << 18
"""Packed bytes that are multiplied at once: each becomes two numbers of 32 bits."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three of 4 bits (e2m1); the highest bit is the sign."""


def is_packed(source: PublishedModel, name: str) -> bool:
    """Return whether the elements of a tensor are published packed."""
    return source.has(name + _BLOCKS) or source.packed(name) is not None


def packed_part(
    source: PublishedModel, segment: Segment, spec: TensorSpec, target: torch.Tensor
) -> PackedPart | PackedRows:
    """Return the memory for a segment of a tensor whose elements are packed.

    spec: of the state's tensor, for errors. target: has the published order of axes.
    Raises MissingTensors if there are no scales, ShapeMismatch if shapes or dtypes do not fit.
    """
    form = source.packed(segment.name)
    return (
        _mxfp4(source, segment, spec, target) if form is None else _rows(source, form, segment, spec, target)
    )


def _rows(
    source: PublishedModel, form: PackedForm, segment: Segment, spec: TensorSpec, target: torch.Tensor
) -> PackedRows:
    if segment.published != form.shape or segment.split or segment.change or spec.dtype not in FLOATS:
        raise ShapeMismatch(
            f"{source.where} holds {segment.name!r} with shape {list(form.shape)} in {form.bits} bits, of "
            f"which {spec.name!r} with global shape {list(spec.shape)} in {DTYPES[spec.dtype].name} can't be "
            "made.",
            hint="Build the model with the sizes of config.json; packed elements become floating point only.",
            details={"tensor": spec.name},
        )
    return PackedRows(source, form, segment, target)


def _mxfp4(source: PublishedModel, segment: Segment, spec: TensorSpec, target: torch.Tensor) -> PackedPart:
    """Return the memory for a segment of all experts' weights.

    They are published as `[experts, columns, groups of 32 rows, 16 bytes]`, transposed relative to the
    unpacked tensor, which is `[experts, rows, columns]`.
    """
    name = segment.name
    blocks, scales = source.place(name + _BLOCKS), source.place(name + _SCALES)
    assert blocks is not None
    if scales is None:
        raise no_scales(source, blocks.name, "4", name + _SCALES)
    experts, rows, columns = segment.published if len(segment.published) == 3 else (0, 0, 0)
    shape = (experts, columns, -(-rows // _GROUP), _GROUP // 2)
    stored = [blocks.shape, scales.shape, blocks.code, scales.code]
    if stored != [shape, shape[:-1], _BYTES, _BYTES] or rows % _GROUP or spec.dtype not in FLOATS:
        raise ShapeMismatch(
            f"{source.where} holds {blocks.name!r} with shape {list(blocks.shape)} in "
            f"{DTYPES[blocks.code].name} and scales of shape {list(scales.shape)} in "
            f"{DTYPES[scales.code].name}; {spec.name!r} with global shape {list(spec.shape)} in "
            f"{DTYPES[spec.dtype].name} needs {list(shape)} and {list(shape[:-1])} in uint8.",
            hint="Build the model with the sizes of config.json; 4 bits become floating point only.",
            details={"tensor": spec.name},
        )
    return PackedPart(source, blocks, scales, segment, target)


class PackedRows(TensorMemory):
    """A box of a tensor of which a number holds several elements of a row; the scales are read with them."""

    def __init__(
        self, source: PublishedModel, form: PackedForm, segment: Segment, target: torch.Tensor
    ) -> None:
        super().__init__(target, torch_dtype(form.stored.code), 0)
        self._source, self._form = source, form
        self.spec = TensorSpec(form.stored.name, form.stored.code, form.stored.shape)
        (first, low), (rows, columns) = segment.theirs(segment.box)
        self._columns = (low, low + columns)
        begin, end = low // form.per, -(-(low + columns) // form.per)
        self.box = Box((first, begin), (rows, end - begin))

    def put(self, box: Box, values: torch.Tensor) -> None:
        form = self._form
        first, begin = (a + b for a, b in zip(self.box.offset, box.offset, strict=True))
        begin *= form.per
        # Of the numbers at the ends, this rank may have some elements only.
        low, high = max(begin, self._columns[0]), min(begin + values.shape[1] * form.per, self._columns[1])
        groups = torch.arange(low, high) // form.group
        step = max(AT_ONCE // (values.shape[1] * form.per), 1)
        scales = values_of(self._source, form.scales, (first, len(values))).view(len(values), -1)
        for start in range(0, len(values), step):
            some = values[start : start + step]
            numbers = _unpacked(some, form.bits, form.is_float)[:, low - begin : high - begin]
            numbers *= scales[start : start + step].index_select(1, groups)
            super().put(Box((box.offset[0] + start, low - self._columns[0]), tuple(numbers.shape)), numbers)


def _unpacked(packed: torch.Tensor, bits: int = 4, is_float: bool = True) -> torch.Tensor:
    """Unpack numbers along the last axis, in float32."""
    elements = _table(bits, is_float).take(packed.view(torch.uint8).numpy(), axis=0)
    return torch.from_numpy(elements).flatten(-2)


@cache
def _table(bits: int, is_float: bool) -> Floats:
    """Return the elements in each byte. The bytes of a number are in the order of its elements."""
    half = 1 << (bits - 1)
    values = [*_VALUES, *(-value for value in _VALUES)] if is_float else range(-half, half)
    lower_first = [
        [values[byte >> shift & (2 * half - 1)] for shift in range(0, 8, bits)] for byte in range(256)
    ]
    return np.asarray(lower_first, np.float32)


class PackedPart(TensorMemory):
    """A box of weights in mxfp4; the scales are read with them."""

    def __init__(
        self, source: PublishedModel, blocks: Place, scales: Place, segment: Segment, target: torch.Tensor
    ) -> None:
        theirs = segment.theirs(segment.box)
        # In a split tensor, take only every second column: the gate's or the up projection's.
        self._step, self._turn = (2, theirs.offset[-1]) if segment.split else (1, 0)
        super().__init__((target.squeeze(-1) if segment.split else target).movedim(1, -1), torch.uint8, 0)
        self._source, self._scales = source, scales
        self.spec = TensorSpec(blocks.name, blocks.code, blocks.shape)
        (expert, first, column), (experts, rows, columns) = segment.joined(theirs)
        self._rows = (first, first + rows)
        low, high = first // _GROUP, -(-(first + rows) // _GROUP)
        self.box = Box((expert, column, low, 0), (experts, columns, high - low, _GROUP // 2))

    def put(self, box: Box, values: torch.Tensor) -> None:
        expert, column, group, byte = (a + b for a, b in zip(self.box.offset, box.offset, strict=True))
        skipped = (self._turn - box.offset[1]) % self._step
        packed = values[:, skipped :: self._step]
        experts, columns, groups, nbytes = packed.shape
        # A part with several groups has all bytes of each, so its rows are contiguous.
        begin = group * _GROUP + 2 * byte
        low, high = max(begin, self._rows[0]), min(begin + 2 * groups * nbytes, self._rows[1])
        if low >= high:
            return  # the rank has other rows of this group
        first = (box.offset[1] + skipped) // self._step
        rows = slice(low - self._rows[0], high - self._rows[0])
        target = self.tensor.detach()[box.slices()[0], first : first + columns, rows]
        step = max(_AT_ONCE // (groups * nbytes), 1)
        for index in range(experts):
            for start in range(0, columns, step):
                some = packed[index, start : start + step]
                at = column + skipped + start * self._step
                exponents = self._exponents(expert + index, at, len(some))[:, group : group + groups, None]
                numbers = torch.ldexp(_unpacked(some), exponents).flatten(1)[:, low - begin : high - begin]
                target[index, start : start + step].copy_(numbers)

    def _exponents(self, expert: int, column: int, count: int) -> torch.Tensor:
        """Read the exponents of `count` taken columns, from `column` on, for all their groups."""
        first, rows = expert * self._scales.shape[1] + column, (count - 1) * self._step + 1
        data = self._source.read_rows(self._scales.name, (first, rows))
        scales = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1)
        return scales[:: self._step].int() - _BIAS
