"""How elements of less than a byte are published, several of a row in each number: in 4 bits (e2m1) by
DeepSeek V4, as whole numbers by compressed-tensors (Kimi K2). No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast._core.layout.tensor import CODE_OF, FLOATS, Dims
from holdfast._models.views.hub_format import Place
from holdfast._models.views.quantized import BYTES, PACKED, whole_numbers

_E8M0, _INT32 = CODE_OF["float8_e8m0fnu"], CODE_OF["int32"]
_GROUP = 32
"""Elements in e2m1 of a row that share a scale."""


class PackedForm(NamedTuple):
    stored: Place
    scales: Place
    bits: int
    """Of an element; the lower bits of a number have the elements that come first."""
    per: int
    """Elements in a number."""
    group: int
    """Elements of a row that share a scale."""
    is_float: bool
    """Are they e2m1, or whole numbers to which half of their range was added?"""

    @property
    def shape(self) -> Dims:
        """The shape of the tensor, unpacked."""
        rows, numbers = self.stored.shape
        return rows, numbers * self.per

    @property
    def kind(self) -> tuple[object, ...]:
        """What two tensors have in common whose bits can be compared as they are stored."""
        both = (self.stored, self.scales)
        return (*self[2:], *((place.code, place.shape) for place in both))


def packed_form(name: str, place: Callable[[str], Place | None], quantization: object) -> PackedForm | None:
    """Return how the elements of a tensor are packed; None if they are not, or in another way.

    name: of the tensor. quantization: what the configuration says of it.
    """
    stored = place(name + PACKED)
    if stored is not None:
        return _whole_numbers(name, stored, place, whole_numbers(quantization))
    stored = place(name) if name.endswith(".weight") else None
    if stored is None or stored.code not in BYTES or len(stored.shape) != 2:
        return None
    scales = place(name.removesuffix("weight") + "scale")
    rows, numbers = stored.shape
    if scales is None or scales.code != _E8M0 or scales.shape != (rows, 2 * numbers // _GROUP):
        return None
    return PackedForm(stored, scales, 4, 2, _GROUP, True) if 2 * numbers % _GROUP == 0 else None


def _whole_numbers(
    name: str, stored: Place, place: Callable[[str], Place | None], said: tuple[int, int] | None
) -> PackedForm | None:
    scales = place(name + "_scale")
    # In an order of their own, or with a zero of their own.
    others = place(name + "_g_idx") or place(name + "_zero_point")
    if said is None or scales is None or others is not None or scales.code not in FLOATS:
        return None
    bits, group = said
    if stored.code != _INT32 or len(stored.shape) != 2 or 0 in stored.shape:
        return None
    form = PackedForm(stored, scales, bits, 32 // bits, group or stored.shape[1] * 32 // bits, False)
    rows, columns = form.shape
    fits = form.group <= columns and scales.shape == (rows, -(-columns // form.group))
    return form if fits else None
