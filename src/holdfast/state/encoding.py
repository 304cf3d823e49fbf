"""Values that are no tensors as bytes, and what is said of those that can't be stored."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holdfast.errors import BadInput
from holdfast.format import objects


def encoded(name: str, value: object) -> bytes:
    """The bytes that stand for a value; BadInput, in one sentence, for one that has none."""
    try:
        return objects.encode(value, name)
    except BadInput:
        odd = _odd_array(value)
        if odd is None:
            raise
        raise BadInput(
            f"{name!r} has a NumPy array of {odd} in it; only arrays of numbers can be stored so that "
            f"loading executes nothing.",
            hint="Store array.tolist() instead.",
        ) from None


def _odd_array(value: object) -> str | None:
    """The dtype of a NumPy array in a value that is not of numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.kind in "biufc" else str(value.dtype)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return None
    return next((odd for item in value if (odd := _odd_array(item)) is not None), None)
