"""Quantised elements in 8 bits (e4m3), with scales of blocks, rows, experts or whole tensors. They are
multiplied by their scales as they are read."""

from __future__ import annotations

import torch

from holdfast._core.io.raw_read import slabs
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, Dims
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._models.views.hub_format import Place
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import (
    IN_8_BITS,
    SUFFIXES,
    base_of,
    block_of,
    is_read,
    scale_names,
    scales_of,
    sides_of,
)
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch

SCALE_CODES = (*FLOATS, CODE_OF["float8_e8m0fnu"])
"""Dtypes of the scales of elements in 8 bits."""


AT_ONCE = 1 << 18
"""Elements that are multiplied at once: so many stay in a core's cache."""
_NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The values of e4m3. To look them up takes a third of the time of torch's conversion."""


def in_8_bits(source: PublishedModel, place: Place, target: torch.Tensor, origin: Dims) -> TensorMemory:
    """Make memory for elements in 8 bits, which multiplies them by their scales.

    target: has the published order of axes. origin: its start in the published tensor.
    Raises MissingTensors if there are no scales, ShapeMismatch if they do not fit the tensor, BadInput if the
    model was quantised in a way that is not read, or if scales are not finite.
    """
    source.refuse_quantized(place.name)
    found = _scales_at(source, place)
    if found is None:
        raise no_scales(source, place.name, "8", place.name + SUFFIXES[0])
    block = block_of(source.quantization, source.where)
    sides = sides_of(place.shape, found.shape, block)
    if sides is None or found.code not in SCALE_CODES:
        ways = f"blocks of {list(block)}" if block else "blocks of 128 by 128, rows, experts or the whole"
        raise ShapeMismatch(
            f"{source.where} holds scales of shape {list(found.shape)} in {DTYPES[found.code].name} for "
            f"{place.name!r} of shape {list(place.shape)}. Scales are read in floating point, of {ways}.",
            hint="Sides of blocks are read from quantization_config in config.json.",
            details={"tensor": found.name},
        )
    values = values_of(source, found)
    grid = tuple(-(-n // side) for n, side in zip(place.shape, sides, strict=True))
    return _In8Bits(target, torch_dtype(place.code), origin, values.view(grid), sides)


def check_scales(source: PublishedModel, place: Place) -> None:
    """Raise BadInput if a tensor is the scales of one in 8 bits, or of packed elements, and has NaN or
    infinity in it."""
    name = base_of(place.name)
    base, packed = source.place(name), source.packed(name)
    if packed is not None:
        are_scales = packed.scales.name == place.name
    else:
        is_in_8_bits = base is not None and base.code == IN_8_BITS and place.code in SCALE_CODES
        are_scales = is_in_8_bits and place.name in scale_names(name)
    if are_scales:
        values_of(source, place)


def values_of(source: PublishedModel, scales: Place, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Return the scales of a tensor in float32, one after the other, or those of `(first, count)` rows.
    Raises BadInput if they are not finite."""
    dtype = torch_dtype(scales.code)
    values = torch.frombuffer(bytearray(source.read_rows(scales.name, rows)), dtype=dtype).float()
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
    found, quantization = _scales_at(source, place), source.quantization
    if found is None or found.code not in SCALE_CODES or not is_read(quantization):
        return None
    sides = sides_of(place.shape, found.shape, block_of(quantization, source.where))
    return None if sides is None else (found, sides)


def _scales_at(source: PublishedModel, place: Place) -> Place | None:
    name = scales_of(place.name, source.has)
    return None if name is None else source.place(name)


def no_scales(source: PublishedModel, name: str, bits: str, missing: str) -> MissingTensors:
    """Return the error for quantised elements without scales."""
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
        for part in slabs(whole(box.shape), 1, AT_ONCE):
            offset = tuple(a + b for a, b in zip(box.offset, part.offset, strict=True))
            scales = self._scales
            for axis, side in enumerate(self._sides):
                first = self._origin[axis] + offset[axis]
                scales = scales.index_select(axis, torch.arange(first, first + part.shape[axis]) // side)
            numbers = _NUMBERS.take(values[part.slices()].view(torch.uint8).numpy())
            super().put(Box(offset, part.shape), torch.from_numpy(numbers).mul_(scales))
