"""Quantised elements: in 8 bits (e4m3) with scales of blocks, rows, experts or whole tensors, in 4 bits with
a scale for each 32 elements of a row (mxfp4). They are multiplied by their scales as they are read."""

from __future__ import annotations

import torch

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, Dims, TensorSpec
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._models.views.hub_format import Place
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import (
    IN_8_BITS,
    SUFFIXES,
    base_of,
    block_of,
    is_read,
    scales_of,
    sides_of,
)
from holdfast._models.views.segments import Segment
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch

_BYTES = CODE_OF["uint8"]
_BLOCKS, _SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors that are published for a tensor in 4 bits."""
_SCALE_CODES = (*FLOATS, CODE_OF["float8_e8m0fnu"])
"""Dtypes of the scales of elements in 8 bits."""
_GROUP, _BIAS = 32, 127
"""In 4 bits: elements that share a scale, and the bias of the scale's exponent."""
_AT_ONCE = 1 << 18
"""Packed bytes that are multiplied at once: each becomes two numbers of 32 bits."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three of 4 bits (e2m1); the highest bit is the sign."""


def in_8_bits(source: PublishedModel, place: Place, target: torch.Tensor, origin: Dims) -> TensorMemory:
    """Make memory for elements in 8 bits, which multiplies them by their scales.

    target: has the published order of axes. origin: its start in the published tensor.
    Raises MissingTensors if there are no scales, ShapeMismatch if they do not fit the tensor, BadInput if the
    model was quantised in a way that is not read, or if scales are not finite.
    """
    source.refuse_quantized(place.name)
    found = _scales_at(source, place)
    if found is None:
        raise _no_scales(source, place.name, "8", place.name + SUFFIXES[0])
    block = block_of(source.config.get("quantization_config"), source.where)
    sides = sides_of(place.shape, found.shape, block)
    if sides is None or found.code not in _SCALE_CODES:
        ways = f"blocks of {list(block)}" if block else "blocks of 128 by 128, rows, experts or the whole"
        raise ShapeMismatch(
            f"{source.where} holds scales of shape {list(found.shape)} in {DTYPES[found.code].name} for "
            f"{place.name!r} of shape {list(place.shape)}. Scales are read in floating point, of {ways}.",
            hint="Sides of blocks are read from quantization_config in config.json.",
            details={"tensor": found.name},
        )
    values = _values_of(source, found)
    grid = tuple(-(-n // side) for n, side in zip(place.shape, sides, strict=True))
    return _In8Bits(target, torch_dtype(place.code), origin, values.view(grid), sides)


def check_scales(source: PublishedModel, place: Place) -> None:
    """Raise BadInput if a tensor is the scales of one in 8 bits, and has NaN or infinity in it."""
    base = source.place(base_of(place.name))
    is_in_8_bits = base is not None and base.code == IN_8_BITS and place.code in _SCALE_CODES
    if is_in_8_bits and place.name.endswith(SUFFIXES):
        _values_of(source, place)


def _values_of(source: PublishedModel, scales: Place) -> torch.Tensor:
    dtype = torch_dtype(scales.code)
    values = torch.frombuffer(bytearray(source.read_rows(scales.name)), dtype=dtype).float()
    if not values.isfinite().all():
        in_file = "" if source.where.endswith(scales.file) else f", in {scales.file}"
        raise BadInput(
            f"{source.where} holds NaN or infinity in the scales {scales.name!r}{in_file}: elements that are "
            "multiplied by them mean nothing.",
            hint="Get the file again, or quantize the model again.",
            details={"tensor": scales.name, "file": scales.file},
        )
    return values


def scales_read(source: PublishedModel, place: Place) -> tuple[Place, Dims] | None:
    """Return the scales of a tensor in 8 bits, and how many elements along each axis share one; None if
    `in_8_bits` would refuse them."""
    found, quantization = _scales_at(source, place), source.config.get("quantization_config")
    if found is None or found.code not in _SCALE_CODES or not is_read(quantization):
        return None
    sides = sides_of(place.shape, found.shape, block_of(quantization, source.where))
    return None if sides is None else (found, sides)


def _scales_at(source: PublishedModel, place: Place) -> Place | None:
    name = scales_of(place.name, source.has)
    return None if name is None else source.place(name)


def _no_scales(source: PublishedModel, name: str, bits: str, missing: str) -> MissingTensors:
    source.refuse_quantized(name)
    return MissingTensors(
        f"{source.where} holds {name!r} in {bits} bits, and no {missing!r}: its elements mean nothing "
        "without their scales.",
        details={"missing": [missing]},
    )


class _In8Bits(TensorMemory):
    """Elements in 8 bits, multiplied by their scales."""

    def __init__(
        self, tensor: torch.Tensor, stored: torch.dtype, origin: Dims, scales: torch.Tensor, sides: Dims
    ) -> None:
        super().__init__(tensor, stored, 0)
        self._origin, self._scales, self._sides = origin, scales, sides

    def put(self, box: Box, values: torch.Tensor) -> None:
        scales = self._scales
        for axis, side in enumerate(self._sides):
            first = self._origin[axis] + box.offset[axis]
            scales = scales.index_select(axis, torch.arange(first, first + box.shape[axis]) // side)
        super().put(box, values.float() * scales)


def is_packed(source: PublishedModel, name: str) -> bool:
    """Return whether a tensor is published in 4 bits."""
    return source.has(name + _BLOCKS)


def packed_part(
    source: PublishedModel, segment: Segment, spec: TensorSpec, target: torch.Tensor
) -> PackedPart:
    """Return the memory for a segment of all experts' weights in 4 bits, two in a byte.

    They are published as `[experts, columns, groups of 32 rows, 16 bytes]`, transposed relative to the
    unpacked tensor, which is `[experts, rows, columns]`.

    spec: of the state's tensor, for errors. target: has the published order of axes.
    Raises MissingTensors if there are no scales, ShapeMismatch if shapes or dtypes do not fit.
    """
    name = segment.name
    blocks, scales = source.place(name + _BLOCKS), source.place(name + _SCALES)
    assert blocks is not None
    if scales is None:
        raise _no_scales(source, blocks.name, "4", name + _SCALES)
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


class PackedPart(TensorMemory):
    """A box of weights in 4 bits; the scales are read with them."""

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


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpack 4-bit numbers, two from each byte along the last axis, lower bits first."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return table[pairs.int()]
