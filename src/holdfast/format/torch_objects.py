"""Values that JSON can't carry, in torch's weights-only format.

The reader is torch's restricted unpickler: it builds tensors and the types listed here and in
`torch.serialization.add_safe_globals`, and refuses everything else before running it. The writer
reads back what it wrote, so that what can't be loaded is refused while it can still be mended.
"""

from __future__ import annotations

import argparse
import collections
import io
from importlib import import_module
from typing import Any

import numpy as np
import torch

from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed
from holdfast.layout.tensor import listed

_numpy: Any = import_module("numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core")
_NUMPY_TYPES = tuple({type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"})
_ALLOWED: list[Any] = [
    argparse.Namespace,
    collections.OrderedDict,
    collections.Counter,
    bytes,  # how an empty array's content is pickled
    np.ndarray,
    np.dtype,
    np.float64,
    np.float32,
    np.int64,
    np.int32,
    np.bool_,
    _numpy.multiarray._reconstruct,
    _numpy.multiarray.scalar,
    *_NUMPY_TYPES,
]


def _read(data: bytes) -> Any:
    with torch.serialization.safe_globals(_ALLOWED):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """The line of torch's long message that says what was refused."""
    lines = str(error).split("\n")
    telling = (line.partition("WeightsUnpickler error:")[2].strip() for line in lines)
    return next((line for line in telling if line), lines[0])[:200]


def encode(value: Any, name: str) -> bytes:
    """torch's bytes for a value, once they were shown to load again."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _read(buffer.getvalue())
    except Exception as error:
        reason = _reason(error)
        raise BadInput(
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, which can't be stored so that loading "
            f"executes nothing ({reason}).",
            hint="Store its state_dict, a dict or a tensor instead, or allow its type with torch.serialization.add_safe_globals.",
        ) from None
    return buffer.getvalue()


def decode(data: bytes, name: str) -> Any:
    """The value, built by the restricted unpickler."""
    try:
        return _read(data)
    except Exception as error:
        reason = _reason(error)
        wanted = _refused(data)
    if wanted:
        raise LoadFailed(
            f"The object {name!r} was not loaded, because it asks for types outside the allow-list: {listed(wanted)}.",
            hint="If you trust them, allow them with torch.serialization.add_safe_globals; or leave it out with exclude=.",
        )
    raise CorruptCheckpoint(f"The object {name!r} was not loaded, because it is damaged: {reason}")


def _refused(data: bytes) -> list[str]:
    """Types and functions that a pickle names and this process does not allow; empty where that can't be told."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:
        return []
