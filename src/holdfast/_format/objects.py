"""Encode Python values as bytes and decode them; decoding executes no code.

Plain values (None, bool, numbers, text, bytes, lists, tuples, dicts, sets) become JSON, with tags for types
that JSON lacks. Any program can read it without torch, and equal values have equal bytes on every rank. All
other values use torch's weights-only format, whose reader calls only types on an allow-list.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast._format.limits import OBJECT_BYTES
from holdfast._values import Json, shortened
from holdfast.errors import BadInput, CorruptCheckpoint

PLAIN, TORCH = b"J", b"T"
_TAG = "!"
_ONE_HASH = 1000


class _NotPlain(Exception):
    pass


def _to_json(value: Any) -> Json:
    """Return a value as JSON. Exact types only, because the additions of a subclass would be lost."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
    if kind is list:
        return [_to_json(v) for v in value]
    if kind is dict:
        if all(type(k) is str for k in value) and _TAG not in value:
            return {k: _to_json(v) for k, v in value.items()}
        return {_TAG: "dict", "v": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    if kind is tuple:
        return {_TAG: "tuple", "v": [_to_json(v) for v in value]}
    if kind in (set, frozenset):  # sorted, so that equal sets have equal bytes on all ranks
        return {_TAG: kind.__name__, "v": sorted((_to_json(v) for v in value), key=json.dumps)}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "v": value.hex()}
    if kind in _NAMED:  # by value: a pickle also depends on object identity and order
        return {_TAG: kind.__name__, "v": [[_to_json(k), _to_json(v)] for k, v in _NAMED[kind](value)]}
    if kind is complex:
        return {_TAG: "complex", "v": [_to_json(value.real), _to_json(value.imag)]}
    raise _NotPlain


_NAMED: dict[type, Callable[[Any], Iterable[tuple[object, object]]]] = {
    argparse.Namespace: lambda value: sorted(vars(value).items()),
    collections.OrderedDict: lambda value: value.items(),
}
_BUILD: dict[str, Callable[[Json], object]] = {
    "float": float,
    "tuple": lambda v: tuple(_from_json(x) for x in v),
    "set": lambda v: set(_keys(v)),
    "frozenset": lambda v: frozenset(_keys(v)),
    "dict": lambda v: dict(_items(v)),
    "Namespace": lambda v: argparse.Namespace(**{k: _from_json(x) for k, x in v}),
    "OrderedDict": lambda v: collections.OrderedDict(_items(v)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda v: complex(_number(v[0]), _number(v[1])),
}


def _number(value: Json) -> float:
    """Return the real or imaginary part of a complex number, which may be infinite or NaN."""
    number = _from_json(value)
    if not isinstance(number, int | float):
        raise TypeError("a part of a complex number is no number")
    return number


def _keys(values: list[Json]) -> list[object]:
    """Return the members of a set or keys of a dict. ValueError if too many have one hash: forged numbers
    can, and then each is compared with all others."""
    keys = [_from_json(value) for value in values]
    if len(keys) > _ONE_HASH and max(collections.Counter(map(hash, keys)).values()) > _ONE_HASH:
        raise ValueError(f"more than {_ONE_HASH} keys have one hash")
    return keys


def _items(pairs: list[Json]) -> Iterator[tuple[object, object]]:
    keys, values = [pair[0] for pair in pairs], [_from_json(pair[1]) for pair in pairs]
    return zip(_keys(keys), values, strict=True)


_UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError)
"""What decoding invalid JSON values raises; ArithmeticError: a number is too large for a float."""


def _from_json(value: Json) -> object:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if isinstance(value, dict):
        if _TAG in value:
            return _BUILD[value[_TAG]](value["v"])
        return {k: _from_json(v) for k, v in value.items()}
    return value


def encode(value: object, name: str) -> bytes:
    """Return the bytes of a value; `name` is its name, for errors."""
    try:
        data = PLAIN + json.dumps(_to_json(value), ensure_ascii=True, separators=(",", ":")).encode()
    # ValueError: an integer of more than 4300 digits, which Python does not convert to text. If torch's
    # format can't store the value either, `torch_objects` raises the error.
    except (_NotPlain, ValueError, RecursionError):
        # Imported here, because the command line and the writer process run without torch.
        from holdfast._format import torch_objects

        data = TORCH + torch_objects.encode(value, name)
    if len(data) > OBJECT_BYTES:
        raise BadInput(
            f"{name!r} is an object of {len(data)} bytes, more than the {OBJECT_BYTES} that are read as one.",
            hint="Save its tensors as tensors of the state, or its parts under names of their own.",
        )
    return data


def decode(data: bytes, name: str) -> object:
    """Return the value. LoadFailed if its type is not on the allow-list, CorruptCheckpoint if it is
    damaged."""
    if data[:1] == PLAIN:
        try:
            return _from_json(json.loads(data[1:]))
        except _UNREADABLE as error:
            raise CorruptCheckpoint(
                f"The object {name!r} can't be decoded: {shortened(repr(error))}."
            ) from None
    if data[:1] == TORCH:
        from holdfast._format import torch_objects

        return torch_objects.decode(data[1:], name)
    raise CorruptCheckpoint(
        f"The object {name!r} starts with {data[:1]!r}, which is no encoding that Holdfast knows."
    )


def preview(data: bytes, limit: int = 60) -> str:
    """Return one line that describes a value, without torch."""
    if data[:1] != PLAIN:
        return f"<{len(data) - 1} bytes, weights-only format>"
    try:
        text = repr(_from_json(json.loads(data[1:])))
    except _UNREADABLE:
        return "<damaged>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
