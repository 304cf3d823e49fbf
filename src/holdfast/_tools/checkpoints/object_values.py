"""Whether two objects of a checkpoint are equal values of the same types, however each is encoded.

Values of JSON are compared without torch. The other encoding is torch's, as of what was imported from torch
DCP: to decode it imports torch, and may be refused.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from holdfast._core.format import plain_objects
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    import torch

_LEAVES = ("torch.dtype", "torch.device", "torch.Size", "torch.layout", "torch.memory_format")
"""Types whose == is true only of the same value."""
_SPARSE = {
    "sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}
"""The parts of a sparse tensor, by its layout: what it stores is its value."""


def are_equal(a: bytes, b: bytes, decode: Callable[[bytes], object]) -> bool | None:
    """Return whether two objects of different bytes are equal; None if that can't be told.

    NaN equals NaN, and -0.0 differs from 0.0. decode: decodes an object; HoldfastError if it is refused.
    """
    try:
        texts = [plain_objects.canonical(data) if _is_json(data) else None for data in (a, b)]
        if None not in texts:
            return texts[0] == texts[1]
        # What is JSON is compared as such: to decode it may need classes that this process does not have.
        values = [decode(data) if text is None else None for text, data in zip(texts, (a, b), strict=True)]
        made = [_text(value) if text is None else text for text, value in zip(texts, values, strict=True)]
        if made != [None, None]:  # what is not JSON is of other types than what is
            return made[0] == made[1]
        return _alike(*values)
    except (HoldfastError, RuntimeError, *plain_objects.UNREADABLE):  # torch's own refusals are RuntimeErrors
        return None


def _is_json(data: bytes) -> bool:
    return data[:1] == plain_objects.PLAIN


def _text(value: object) -> str | None:
    """Return the text of a value that is the same for equal values; None if JSON can't store it."""
    try:
        data = json.dumps(plain_objects.to_json(value)).encode()
    except plain_objects.NotJson:
        return None
    return plain_objects.canonical(plain_objects.PLAIN + data)


def _alike(a: object, b: object) -> bool | None:
    """Return whether two values are equal; None if that can't be told."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping) and type(a) in (dict, OrderedDict):
        return _are_alike_dicts(a, b, type(a) is dict)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and type(a) in (list, tuple):
        return len(a) == len(b) and _all(_alike(x, y) for x, y in zip(a, b, strict=True))
    kind = f"{type(a).__module__}.{type(a).__qualname__}"
    if getattr(a, "is_nested", False) or kind in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _are_alike_tensors(a, b)
    if isinstance(a, np.ndarray | np.generic) and isinstance(b, np.ndarray | np.generic):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if kind in _LEAVES:
        return a == b
    text = _text(a)
    return None if text is None else text == _text(b)


def _are_alike_dicts(
    a: Mapping[object, object], b: Mapping[object, object], in_any_order: bool
) -> bool | None:
    # With their types: 1, 1.0 and True are one key of a dict.
    mine, theirs = ([(type(key), key) for key in one] for one in (a, b))
    if mine != theirs and not (in_any_order and set(mine) == set(theirs)):
        return False
    return _all(_alike(value, b[key]) for key, value in a.items())


def _are_alike_tensors(a: object, b: object) -> bool | None:
    import torch  # which has decoded them

    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    if (a.dtype, a.layout, a.is_nested, a.is_quantized) != (b.dtype, b.layout, b.is_nested, b.is_quantized):
        return False
    if a.is_nested:
        return _alike(list(a.unbind()), list(b.unbind()))
    if a.shape != b.shape:
        return False
    if a.is_quantized:
        return None
    if a.layout is torch.strided:
        x, y = (one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b))
        return torch.equal(x, y)
    return _are_alike_sparse(a, b)


def _are_alike_sparse(a: torch.Tensor, b: torch.Tensor) -> bool | None:
    kind = str(a.layout).removeprefix("torch.")
    if kind not in _SPARSE:
        return None
    mine, theirs = ([getattr(one.detach(), name)() for name in _SPARSE[kind]] for one in (a, b))
    if _alike(mine, theirs) or kind != "sparse_coo" or (a.is_coalesced() and b.is_coalesced()):
        return _alike(mine, theirs)
    return None  # an element may be the sum of several


def _all(found: Iterable[bool | None]) -> bool | None:
    """Return False if any is False, else None if any is None, else True."""
    every = list(found)
    return False if False in every else None if None in every else True
