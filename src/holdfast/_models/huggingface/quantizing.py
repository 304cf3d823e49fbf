"""Weights in 8 bits with a scale for each block of rows and columns, as DeepSeek and Qwen publish them: which
tensors of an export get them, their arithmetic, and their configuration.

The arithmetic is that of transformers' own converter (`Fp8Quantize`), bit for bit: in float32, a block is
multiplied by 448 divided by its largest absolute value, and the inverse of that factor is kept.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, Dims
from holdfast._core.store.local import LocalStore
from holdfast._models.huggingface.published_tensors import PublishedTensor, config_of
from holdfast._models.views.hub_format import CONFIG
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.published_model import quantization_of
from holdfast._models.views.quantized import IN_8_BITS, SUFFIXES, block_of
from holdfast.errors import BadInput

METHODS = ("fp8",)
"""Values of `quantize` in an export."""
_E4M3 = torch.float8_e4m3fn
_MOST = torch.finfo(_E4M3).max
_SIDES = (128, 128)
"""Rows and columns of a block, unless the published model is in 8 bits already and has others."""
_LINEAR = re.compile(
    r"(model|model\.language_model|language_model\.model)\.layers\.\d+\..*\."
    r"([qkvo]_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|qkv_proj"
    r"|(gate|up|down|gate_up)_proj|w[123])\.weight"
)
"""Names of linear layers in the layers of a language model. Others stay as they are: routers, norms,
embeddings and outputs, and layers of which it is not known that they are published in 8 bits."""
_STACKED = re.compile(r".*\.experts\.[^.]*proj[^.]*")
"""Names of tensors with all experts of a layer."""


@dataclass
class QuantizedTensor(PublishedTensor):
    """A tensor that is written in 8 bits. Its scales follow it in the same file."""

    sides: Dims = _SIDES

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored())

    def stored(self) -> list[PublishedTensor]:
        grid = tuple(-(-size // side) for size, side in zip(self.shape, self.sides, strict=True))
        return [
            PublishedTensor(self.name, self.code, self.shape, self.pieces),
            PublishedTensor(self.name + SUFFIXES[0], CODE_OF["float32"], grid),
        ]

    def bands(self, most: int) -> Iterator[Box]:
        """Yield whole rows of blocks, of at most `most` elements if that is more than one row of blocks."""
        rows, columns = self.shape
        step = max(most // max(columns, 1) // self.sides[0], 1) * self.sides[0]
        for first in range(0, rows, step):
            yield Box((first, 0), (min(step, rows - first), columns))

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole rows of blocks in 8 bits, and the scales of the blocks.

        values: in float32. Raises BadInput for values that are not finite, and for a block of which no value
        is large enough for a scale.
        """
        elements = torch.empty(values.shape, dtype=_E4M3)
        scales = []
        height, width = self.sides
        for band, made in zip(torch.split(values, height), torch.split(elements, height), strict=True):
            missing = -band.shape[1] % width
            # A block at the end may have fewer columns; zeros change no largest value.
            whole = torch.nn.functional.pad(band, (0, missing)).view(len(band), -1, width)
            largest = whole.abs().amax((0, 2))
            factors = torch.where(largest > 0, _MOST / largest, 1.0)
            if not (largest.isfinite() & factors.isfinite()).all():
                raise BadInput(
                    f"{self.name!r} has a block of {height} by {width} elements with no scale in 8 bits: an "
                    "element is infinite or NaN, or all are too small.",
                    hint="Export without quantize= (--quantize).",
                    details={"tensor": self.name},
                )
            scaled = (whole * factors[:, None]).clamp_(-_MOST, _MOST).view(len(band), -1)
            made.copy_(scaled[:, : band.shape[1]])
            scales.append(1.0 / factors)
        return elements, torch.stack(scales)


def quantized(tensors: Sequence[PublishedTensor], base: LocalStore) -> list[PublishedTensor]:
    """Return the tensors of an export, those that are written in 8 bits as QuantizedTensor.

    base: the published folder. If it has tensors in 8 bits, these are written so, else linear layers
    (`_LINEAR`).
    """
    folder = HuggingFaceFolder.at(base)
    places = map(folder.place, folder.names()) if folder is not None else ()
    in_8_bits = {place.name for place in places if place is not None and place.code == IN_8_BITS}
    block = block_of(quantization_of(config_of(base)), f"{base.url}/{CONFIG}")
    sides = (block if in_8_bits else None) or _SIDES
    made: list[PublishedTensor] = []
    for tensor in tensors:
        is_linear = tensor.name in in_8_bits if in_8_bits else _LINEAR.fullmatch(tensor.name)
        if len(tensor.shape) == 3 and (is_linear or _STACKED.fullmatch(tensor.name)):
            raise BadInput(
                f"{tensor.name!r} has all experts of a layer in one tensor of shape {list(tensor.shape)}: "
                "Holdfast writes 8 bits of matrices only.",
                hint="Export without quantize= (--quantize).",
                details={"tensor": tensor.name},
            )
        if not is_linear:
            made.append(tensor)
            continue
        dtypes = {piece.spec.dtype for piece in tensor.pieces}
        if len(tensor.shape) != 2 or len(sides) != 2 or not dtypes <= set(FLOATS):
            names = ", ".join(sorted(DTYPES[code].name for code in dtypes))
            raise BadInput(
                f"{tensor.name!r}, of shape {list(tensor.shape)} in {names}, can't be written in 8 bits with "
                f"blocks of {list(sides)}: only matrices in floating point can, with two sides.",
                hint="Export without quantize= (--quantize).",
                details={"tensor": tensor.name},
            )
        made.append(QuantizedTensor(tensor.name, IN_8_BITS, tensor.shape, tensor.pieces, sides))
    if not any(isinstance(tensor, QuantizedTensor) for tensor in made):
        raise BadInput(
            "No tensor of the export is known to be a linear layer, so none would be in 8 bits.",
            hint="Export without quantize= (--quantize).",
        )
    return made


def configuration(tensors: Sequence[PublishedTensor]) -> dict[str, object] | None:
    """Return the `quantization_config` of an export; None if nothing is in 8 bits.

    Raises BadInput if transformers would not take a tensor for one in 8 bits: it leaves out all modules whose
    names begin with that of a module that is not in 8 bits.
    """
    blocks = [tensor for tensor in tensors if isinstance(tensor, QuantizedTensor)]
    if not blocks:
        return None
    modules = sorted(_module(tensor.name) for tensor in blocks)
    others = {_module(tensor.name) for tensor in tensors if len(tensor.shape) > 1}.difference(modules)
    others.add("lm_head")  # also where it is the embedding, and so no tensor
    for other in sorted(others):
        place = bisect_left(modules, other)
        if place < len(modules) and modules[place].startswith(other):
            raise BadInput(
                f"{modules[place]!r} would be in 8 bits and {other!r} not, and transformers takes the first "
                "for a part of the second.",
                hint="Export without quantize= (--quantize).",
                details={"module": modules[place]},
            )
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(blocks[0].sides),
        "modules_to_not_convert": sorted(others),
    }


def _module(name: str) -> str:
    return name.removesuffix(".weight")
