"""The dtypes of an export: in which one a tensor is written, which tensors can't take the place of published
ones, and which values a cast loses."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

import torch

from holdfast._core.format.index import Index
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, TensorSpec
from holdfast._core.state.memory import TensorMemory
from holdfast._models.equality.rounding import cast
from holdfast._models.views import hub_format as hf
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.quantized import scales_of
from holdfast.errors import BadInput

WRITTEN_AS = ("bfloat16", "float16", "float32")
"""Dtypes that weights may be converted to."""
_IN_8_BITS, _COMPLEX, _WHOLE = "floats of 8 bits", "complex numbers", "whole numbers or booleans"
_FLOAT = "floating point"


def code_to_write(spec: TensorSpec, wanted: int | None, only_less_exact: bool) -> int:
    """Return the code of the dtype in which a tensor is written."""
    if spec.dtype not in hf.TAG_OF_CODE:
        name = DTYPES[spec.dtype].name
        raise BadInput(f"{spec.name!r} is {name}, which safetensors has no name for; convert it first.")
    # A router's bias selects experts by small differences; transformers does not convert it either.
    if wanted is None or spec.dtype not in FLOATS or spec.name.endswith("expert_bias"):
        return spec.dtype
    return max(spec.dtype, wanted, key=FLOATS.index) if only_less_exact else wanted


def published_float(folder: HuggingFaceFolder | None, name: str) -> int | None:
    """Return the dtype of a published tensor; None if it is missing, quantized, or no floating point."""
    place = folder.place(name) if folder is not None else None
    return place.code if place is not None and place.code in FLOATS else None


def check_kind(
    spec: TensorSpec,
    name: str,
    folder: HuggingFaceFolder | None,
    index: Index,
    where: str,
    is_quantized: bool,
) -> None:
    """Raise BadInput if elements of the checkpoint have no meaning in the place of a published tensor: an
    export converts floating point only, and writes neither scales nor their configuration.

    name: of the published tensor. where: the published folder. is_quantized: whether its configuration says
    that weights in it are.
    """
    place = folder.place(name) if folder is not None else None
    is_quantized = is_quantized or (folder is not None and scales_of(name, folder.has) is not None)
    stored, mine = DTYPES[spec.dtype].name, _kind(spec.dtype)
    # No method of quantization has int64: these are indices, such as those of experts in DeepSeek V4.
    is_plain = mine == _FLOAT or (stored == "int64" and place is not None and place.code == spec.dtype)
    if is_quantized and not is_plain:
        raise BadInput(
            f"{index.where} holds {spec.name!r} in {stored}, and {where} is quantized: such weights are not "
            f"exported.",
            hint="Load them into a model in floating point, and export what that saves.",
            details={"tensor": spec.name},
        )
    if place is None:
        # Without published weights the table has the names: all are weights, but for indices.
        fits = mine == _FLOAT or stored == "int64" or folder is not None
        theirs, said = _FLOAT, f"as {_FLOAT} without weights there that say otherwise"
    else:
        theirs, said = _kind(place.code), f"in {DTYPES[place.code].name}"
        # A model published in 8 bits, or packed, is exported in floating point.
        fits = mine == theirs or (mine == _FLOAT and (is_quantized or theirs == _IN_8_BITS))
    if not fits:
        raise BadInput(
            f"{index.where} holds {spec.name!r} in {stored}, and {name!r} is published {said} in {where}: an "
            f"export does not convert {mine} to {theirs}.",
            hint="Save it in the published dtype; quantized elements must be multiplied by their scales.",
            details={"tensor": spec.name},
        )


def _kind(code: int) -> str:
    """Return the kind of a dtype, of which an export writes the elements as they are or converts them."""
    if code in FLOATS:
        return _FLOAT
    name = DTYPES[code].name
    return _IN_8_BITS if name.startswith("float8") else _COMPLEX if name.startswith("complex") else _WHOLE


@dataclass
class CastLosses:
    """What casts have lost of the values of a tensor, by the rule of `holdfast.same`. Threads add to it."""

    infinite: bool = False
    """Whether a cast has made a value infinite."""
    was_infinite: bool = False
    """Whether a value was infinite before a cast."""
    stays: bool = False
    """Whether a value is not zero after its cast."""
    zeros: int = 0
    """Number of values that a cast has made zero, as far as they were counted: only while none stays."""
    elements: int = 0
    stored: set[int] = field(default_factory=set)
    """Dtypes that were cast."""
    _lock: Lock = field(default_factory=Lock)

    def add(self, values: torch.Tensor, made: torch.Tensor) -> None:
        """Note what a cast has lost. made: the values in another dtype."""
        # Most casts lose nothing, which these two passes show.
        infinite, stays = bool(made.isinf().any()), bool(made.any())
        lost = cast(values, made.dtype).lost if infinite or not stays else None
        with self._lock:
            self.stored.add(CODE_OF[str(values.dtype).removeprefix("torch.")])
            self.elements += values.numel()
            self.stays = self.stays or stays
            if lost is not None:
                self.infinite = self.infinite or bool(lost[0].any())
                self.zeros += int(lost[1].sum())
            self.was_infinite = self.was_infinite or (infinite and bool(values.isinf().any()))

    def refuse_infinite(self, name: str, code: int) -> None:
        """Raise BadInput if a value is infinite after its cast to the dtype `code`."""
        if self.infinite:
            raise BadInput(
                f"{name!r}, which is stored in {self._dtypes}, has values that are infinite in "
                f"{DTYPES[code].name}.",
                hint="Give a dtype that can hold them, such as bfloat16 or float32.",
                details={"tensor": name},
            )
        if self.was_infinite:
            raise BadInput(
                f"{name!r} has values that are infinite as they are stored, in {self._dtypes}: the cast to "
                f"{DTYPES[code].name} is not the cause.",
                hint="Export a checkpoint from before they became infinite.",
                details={"tensor": name},
            )

    def refuse_zeros(self, name: str, code: int) -> None:
        """Raise BadInput if casts have left no value of a whole tensor, most of which were not zero.

        Single values, also all few of a tensor of zeros, are too small in healthy models as well.
        """
        if not self.stays and 2 * self.zeros > self.elements:
            raise BadInput(
                f"{name!r}, which is stored in {self._dtypes}, would have only zeros in {DTYPES[code].name}: "
                f"{self.zeros} of its {self.elements} values are not zero, and too small for that dtype.",
                hint="Give a dtype that can hold them, such as bfloat16 or float32.",
                details={"tensor": name},
            )

    @property
    def _dtypes(self) -> str:
        return " and ".join(DTYPES[code].name for code in sorted(self.stored))


class CastMemory(TensorMemory):
    """A tensor whose elements are the stored ones, plus a number, in another dtype. It notes what the cast
    loses."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype, shift: float, losses: CastLosses) -> None:
        super().__init__(tensor, stored, 0)  # bytes must not be read directly into the tensor
        self._shift, self._losses = shift, losses

    def put(self, box: Box, values: torch.Tensor) -> None:
        shifted = values.float() + self._shift if self._shift else values
        super().put(box, shifted)
        if shifted.dtype != self.tensor.dtype and values.numel():
            self._losses.add(shifted, self.tensor.detach()[box.slices()])
