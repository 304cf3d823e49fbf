"""Quantized tensors: the names of their parts, and which elements share a scale. No torch.

Elements are multiplied by their scale, in every method of `is_read`. Scales of activations and of caches lie
beside them, and belong to no weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from holdfast._core.layout.tensor import CODE_OF, Dims
from holdfast.errors import BadInput

IN_8_BITS = CODE_OF["float8_e4m3fn"]
BYTES = (CODE_OF["int8"], CODE_OF["uint8"])
"""Dtypes of bytes that hold two elements in 4 bits, if scales lie beside them."""
SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of the scales of a tensor: as DeepSeek publishes them, and as compressed-tensors, modelopt and
fbgemm do. DeepSeek V4 has `scale` in the place of `weight`."""
PACKED = "_packed"
"""Suffix of a tensor of compressed-tensors that holds several whole numbers in each of its elements."""
_BASES = {
    ".input_scale": ".weight",
    ".activation_scale": ".weight",
    ".output_scale": ".weight",
    ".k_scale": ".k_proj.weight",
    ".v_scale": ".v_proj.weight",
    ".scale": ".weight",
    "_shape": "",
    **dict.fromkeys(SUFFIXES, ""),
}
"""What the endings of scales become in the name of the tensor that they lie beside."""
_PLAIN_METHODS = (None, "fp8", "mxfp4", "fbgemm_fp8")
"""Values of `quant_method` whose scales are read, without a look at the rest of the configuration; None: no
such key."""
_SIDE = 128
"""Rows and columns of a block, unless the configuration says otherwise."""


def base_of(name: str) -> str:
    """Return the name of the tensor beside which scales of this name lie; the name itself if it is not one of
    scales."""
    ending = next((ending for ending in _BASES if name.endswith(ending)), None)
    return name if ending is None else name.removesuffix(ending) + _BASES[ending]


def is_scale(name: str, is_quantized: Callable[[str], bool]) -> bool:
    """Return whether a tensor is scales: of elements in 4 bits, or beside a quantized tensor. Beside any
    other tensor, one of such a name is a weight: models may have one of that name."""
    base = base_of(name)
    return name.endswith("_scales") or (base != name and is_quantized(base))


def scale_names(name: str) -> tuple[str, ...]:
    """Return the names that the scales of a tensor may have."""
    plain = tuple(name + suffix for suffix in SUFFIXES)
    return (*plain, name.removesuffix("weight") + "scale") if name.endswith(".weight") else plain


def scales_of(name: str, has: Callable[[str], bool]) -> str | None:
    """Return the name of a tensor's scales; None if it has none."""
    return next(filter(has, scale_names(name)), None)


def unpacked_name(name: str) -> str:
    """Return the name of a tensor that is published in 4 bits under this one; else the name itself."""
    return name.removesuffix("_blocks").removesuffix(PACKED)


def is_read(quantization: object) -> bool:
    """Return whether Holdfast reads weights that `quantization_config` describes: in `fp8`, `mxfp4`,
    `fbgemm_fp8`, those of modelopt and compressed-tensors in which all weights are floats of 8 bits, and
    those of `whole_numbers`."""
    if not isinstance(quantization, Mapping):
        return True
    method = quantization.get("quant_method")
    if method == "modelopt":
        return str(quantization.get("quant_algo")).startswith("FP8")
    if method == "compressed-tensors":
        groups = _weights(quantization)
        return bool(groups) and (
            all(map(_is_float_of_8_bits, groups)) or whole_numbers(quantization) is not None
        )
    return method in _PLAIN_METHODS


def whole_numbers(quantization: object) -> tuple[int, int] | None:
    """Return the bits of whole numbers that compressed-tensors has packed, and how many of a row share a
    scale (0: all); None if the configuration describes weights in another way, or in several."""
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "compressed-tensors":
        return None
    found = set[tuple[int, int]]()
    for weights in _weights(quantization):
        bits, strategy = weights.get("num_bits"), weights.get("strategy")
        group = {"group": weights.get("group_size"), "channel": 0}.get(str(strategy))
        is_plain = weights.get("type") == "int" and weights.get("symmetric") is not False
        if not is_plain or type(bits) is not int or bits not in (4, 8) or type(group) is not int or group < 0:
            return None
        found.add((bits, group))
    is_packed = quantization.get("format") == "pack-quantized"
    return found.pop() if is_packed and len(found) == 1 else None


def _weights(quantization: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Return what each of compressed-tensors' groups says of weights: {} if nothing."""
    groups = quantization.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    said = [group.get("weights") if isinstance(group, Mapping) else None for group in groups]
    return [weights if isinstance(weights, Mapping) else {} for weights in said]


def _is_float_of_8_bits(weights: Mapping[str, object]) -> bool:
    is_float = weights.get("type") == "float" and weights.get("num_bits") == 8
    return is_float and weights.get("symmetric") is not False


def block_of(quantization: object, where: str) -> Dims | None:
    """Return the rows and columns of a block by `quantization_config`; None if it names no blocks.

    Raises BadInput if that is no shape. where: of the configuration, for the error.
    """
    if not isinstance(quantization, Mapping):
        return None
    named = [weights.get("block_structure") for weights in _weights(quantization)]
    sides = next((one for one in (quantization.get("weight_block_size"), *named) if one is not None), None)
    if sides is None:
        return None
    if not isinstance(sides, list) or not all(type(side) is int and side > 0 for side in sides):
        raise BadInput(f"{where}: weight_block_size={sides!r} in config.json is no shape.")
    return tuple(sides)


def sides_of(shape: Dims, scales: Dims, block: Dims | None) -> Dims | None:
    """Return how many elements along each axis share a scale; None if scales of this shape fit in no way.

    block: rows and columns of a block, if the configuration names them: then no other way fits.
    The ways: one scale for each block of rows and columns, for each row, for each expert, for all elements.
    """
    if 0 in shape:
        return None
    lead = shape[:-2]
    ones = (1,) * len(lead)
    sides = block or (_SIDE, _SIDE)
    ways: list[tuple[Dims, Dims]] = []
    if len(shape) - len(lead) == len(sides):
        blocks = tuple(-(-n // side) for n, side in zip(shape[len(lead) :], sides, strict=True))
        ways.append(((*lead, *blocks), (*ones, *sides)))
    if block is None:
        if len(shape) > 1:
            a_row = (*(1,) * (len(shape) - 1), shape[-1])
            ways += [(shape[:-1], a_row), ((*shape[:-1], 1), a_row)]
        if lead:
            each = (*ones, *shape[-2:])
            ways += [(lead, each), ((*lead, 1, 1), each)]
        if math.prod(scales) == 1 and len(scales) <= len(shape):
            ways.append((scales, shape))
    return next((sides for fitting, sides in ways if fitting == scales), None)
