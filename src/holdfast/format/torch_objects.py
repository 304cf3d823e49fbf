"""Encode values that JSON can't represent in torch's weights-only format.

The reader is torch's restricted unpickler. It builds tensors and the types listed here and in
`torch.serialization.add_safe_globals`, and refuses everything else before it runs. Before it, `object_check`
refuses data that would cost more time or memory than its length justifies. The writer reads its own output
back, so that a value that can't be loaded is refused when it is saved.
"""

from __future__ import annotations

import argparse
import collections
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module

import numpy as np
import torch

from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed
from holdfast.format import object_check
from holdfast.format.archive import BadArchive
from holdfast.format.pickle_reader import BadPickle
from holdfast.layout.tensor import listed

# NumPy 2 moved the functions that pickled arrays refer to, and warns about uses of the old module.
_numpy = import_module("numpy._core" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "numpy.core")
# The classes of dtypes, such as numpy.dtypes.Float64DType: torch's unpickler sets an object's state only if
# the object's exact class is allowed.
_NUMPY_TYPES = tuple({type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"})
Allowed = Callable[..., object] | tuple[Callable[..., object], str]
"""A class or a function that a pickle may call; or (class or function, its name in pickles)."""
_ALLOWED: list[Allowed] = [
    argparse.Namespace,
    collections.OrderedDict,
    collections.Counter,
    bytes,  # the content of an empty array
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


_lock = threading.Lock()
_allowed: dict[Allowed, tuple[int, AbstractContextManager[object]]] = {}
"""What is allowed temporarily: its number of users, and the context manager that ends it."""


@contextmanager
def allowing(kinds: Iterable[Allowed]) -> Iterator[None]:
    """Let torch's unpickler build these types, too. Types that the process itself allows stay allowed, and
    those that another thread uses stay allowed until it is done."""
    mine = list(kinds)
    with _lock:  # torch's list is global: a load in another thread must not remove what this one needs
        present = set(torch.serialization.get_safe_globals())
        for kind in mine:
            if kind in _allowed:
                count, ends = _allowed[kind]
                _allowed[kind] = count + 1, ends
            elif kind not in present:
                # One context manager per type, because loads end one by one, and each removes only its own.
                manager: AbstractContextManager[object] = torch.serialization.safe_globals([kind])
                manager.__enter__()
                _allowed[kind] = 1, manager
    try:
        yield
    finally:
        with _lock:
            for kind in mine:
                if kind not in _allowed:
                    continue
                count, ends = _allowed[kind]
                if count > 1:
                    _allowed[kind] = count - 1, ends
                else:
                    ends.__exit__(None, None, None)
                    del _allowed[kind]


def _read(data: bytes) -> object:
    object_check.check(data)
    with allowing(_ALLOWED):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _reason(error: Exception) -> str:
    """Return the line of torch's long message that says what was refused."""
    lines = str(error).split("\n")
    telling = (line.partition("WeightsUnpickler error:")[2].strip() for line in lines)
    return next((line for line in telling if line), lines[0])[:200]


def encode(value: object, name: str) -> bytes:
    """Return torch's bytes of a value, after loading them back as a check."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _read(buffer.getvalue())
    except Exception as error:
        odd, reason = _odd_array(value), _reason(error)
        if odd is not None:
            raise BadInput(
                f"{name!r} has a NumPy array of {odd} in it; only arrays of numbers can be stored so that "
                "loading executes nothing.",
                hint="Store array.tolist() instead.",
            ) from None
        raise BadInput(
            f"{name!r} is a {type(value).__module__}.{type(value).__qualname__}, which can't be stored so "
            f"that loading executes nothing ({reason}).",
            hint="Store its state_dict, a dict or a tensor instead, or allow its type with "
            "torch.serialization.add_safe_globals.",
        ) from None
    return buffer.getvalue()


def _odd_array(value: object) -> str | None:
    """Return the dtype of the first non-numeric NumPy array in a value, or None."""
    if isinstance(value, np.ndarray | np.generic):
        return None if value.dtype.kind in "biufc" else str(value.dtype)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return None
    return next((odd for item in value if (odd := _odd_array(item)) is not None), None)


def decode(data: bytes, name: str) -> object:
    """Return the value, built by the restricted unpickler."""
    try:
        return _read(data)
    # Refused before torch read it, or too large for this host: no type is the cause.
    except (BadArchive, BadPickle, MemoryError) as error:
        reason, wanted = str(error) or "there is not enough memory for what it says", []
    except Exception as error:
        reason, wanted = _reason(error), _refused(data)
    if wanted:
        raise LoadFailed(
            f"The object {name!r} was not loaded, because it asks for types outside the allow-list: "
            f"{listed(wanted)}.",
            hint="If you trust them, allow them with torch.serialization.add_safe_globals; or leave it out "
            "with exclude=.",
        )
    raise CorruptCheckpoint(
        f"The object {name!r} was not loaded, because it is damaged: {reason.rstrip('.')}."
    )


def _refused(data: bytes) -> list[str]:
    """Return the types and functions that a pickle names and this process does not allow; empty if
    unknown."""
    try:
        with allowing(_ALLOWED):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:
        return []
