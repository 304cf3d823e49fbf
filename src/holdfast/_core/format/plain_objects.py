"""Encode plain values as JSON and decode them, without torch (`objects` does the rest).

Plain are None, bool, numbers, text, bytes, lists, tuples, dicts, sets, values of some standard-library
classes, and records of user classes. Types that JSON lacks have tags. Any program can read it, and equal
values have equal bytes on every rank. Decoding executes no code.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from holdfast._core.base.values import Json
from holdfast._core.format.records import Record, put_together, taken_apart
from holdfast._core.format.stdlib_values import MAKE, PARTS

PLAIN, TORCH = b"J", b"T"
_TAG = "!"
_ONE_HASH = 1000


class NotJson(Exception):
    """JSON can't store a value."""


def to_json(value: Any) -> Json:
    """Return a value as JSON. Exact types only, because the additions of a subclass would be lost."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
    if kind is list:
        return [to_json(v) for v in value]
    if kind is dict:
        if all(type(k) is str for k in value) and _TAG not in value:
            return {k: to_json(v) for k, v in value.items()}
        return {_TAG: "dict", "v": [[to_json(k), to_json(v)] for k, v in value.items()]}
    if kind is tuple:
        return {_TAG: "tuple", "v": [to_json(v) for v in value]}
    if kind in (set, frozenset):  # sorted, so that equal sets have equal bytes on all ranks
        return {_TAG: kind.__name__, "v": sorted((to_json(v) for v in value), key=json.dumps)}
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "v": value.hex()}
    if kind in _NAMED:  # by value: a pickle also depends on object identity and order
        return {_TAG: kind.__name__, "v": [[to_json(k), to_json(v)] for k, v in _NAMED[kind](value)]}
    if kind is complex:
        return {_TAG: "complex", "v": [to_json(value.real), to_json(value.imag)]}
    if kind in PARTS:
        return {_TAG: kind.__name__, "v": [to_json(part) for part in PARTS[kind](value)]}
    record = taken_apart(value)
    if record is not None:
        return {
            _TAG: record.kind,
            "of": record.path,
            "v": [[name, to_json(part)] for name, part in record.parts],
        }
    raise NotJson


_NAMED: dict[type, Callable[[Any], Iterable[tuple[object, object]]]] = {
    argparse.Namespace: lambda value: sorted(vars(value).items()),
    collections.OrderedDict: lambda value: value.items(),
}
FindClass = Callable[[str], type]


class PlainDecoder:
    """Decodes values from JSON. find: returns the class of a record by name; None: create a `Record`."""

    def __init__(self, find: FindClass | None = None) -> None:
        self._find = find

    def read(self, value: Json) -> object:
        if isinstance(value, list):
            return [self.read(v) for v in value]
        if isinstance(value, dict):
            if _TAG not in value:
                return {k: self.read(v) for k, v in value.items()}
            return self._tagged(value[_TAG], value["v"], value.get("of"))
        return value

    def _tagged(self, tag: str, content: Json, of: Json) -> object:
        if tag in _RECORDS:
            record = Record(tag, str(of), tuple((str(name), self.read(part)) for name, part in content))
            return record if self._find is None else put_together(record, self._find(record.path))
        if tag in MAKE:
            parts = [*map(self.read, content)]
            if tag == "BytesIO" and self._find is None:  # a BytesIO is equal only to itself
                return Record("buffer", "io.BytesIO", tuple(zip(("content", "position"), parts, strict=True)))
            return MAKE[tag](*parts)
        return _BUILD[tag](self, content)

    def keys(self, values: list[Json]) -> list[object]:
        """Return the members of a set or keys of a dict. ValueError if too many have equal hashes: forged
        numbers can collide, and would then take quadratic time."""
        keys = [self.read(value) for value in values]
        if len(keys) > _ONE_HASH and max(collections.Counter(map(hash, keys)).values()) > _ONE_HASH:
            raise ValueError(f"more than {_ONE_HASH} keys have one hash")
        return keys

    def items(self, pairs: list[Json]) -> Iterator[tuple[object, object]]:
        keys, values = [pair[0] for pair in pairs], [self.read(pair[1]) for pair in pairs]
        return zip(self.keys(keys), values, strict=True)

    def number(self, value: Json) -> float:
        """Return the real or imaginary part of a complex number, which may be infinite or NaN."""
        number = self.read(value)
        if not isinstance(number, int | float):
            raise TypeError("a part of a complex number is no number")
        return number


def _namespace(attributes: dict[str, object]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(**attributes)  # not by the constructor: an attribute may be named `self`
    return made


_RECORDS = ("enum", "dataclass", "namedtuple")
_BUILD: dict[str, Callable[[PlainDecoder, Json], object]] = {
    "float": lambda reader, v: float(v),
    "tuple": lambda reader, v: tuple(map(reader.read, v)),
    "set": lambda reader, v: set(reader.keys(v)),
    "frozenset": lambda reader, v: frozenset(reader.keys(v)),
    "dict": lambda reader, v: dict(reader.items(v)),
    "Namespace": lambda reader, v: _namespace({k: reader.read(x) for k, x in v}),
    "OrderedDict": lambda reader, v: collections.OrderedDict(reader.items(v)),
    "bytes": lambda reader, v: bytes.fromhex(v),
    "bytearray": lambda reader, v: bytearray.fromhex(v),
    "complex": lambda reader, v: complex(reader.number(v[0]), reader.number(v[1])),
}
UNREADABLE = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, MemoryError)
"""Errors of decoding invalid JSON values; ArithmeticError: a number is too large for a float."""


class _Members:
    """A set for display, in the order of its encoding: that of a set differs between processes."""

    def __init__(self, kind: str, members: list[object]) -> None:
        self._kind, self._members = kind, members

    def __repr__(self) -> str:
        if not self._members:
            return f"{self._kind}()"
        members = f"{{{', '.join(map(repr, self._members))}}}"
        return members if self._kind == "set" else f"{self._kind}({members})"


class _ForDisplay(PlainDecoder):
    """With a `Record` for each value of a user class."""

    def _tagged(self, tag: str, content: Json, of: Json) -> object:
        if tag in ("set", "frozenset"):
            return _Members(tag, self.keys(content))
        return super()._tagged(tag, content, of)


def canonical(data: bytes) -> str:
    """Return text that is the same for equal plain values of the same types, and only for these: NaN equals
    NaN, and -0.0 differs from 0.0. The order in a dict or set does not count.

    Raises one of `UNREADABLE` for invalid values.
    """
    return json.dumps(_in_order(json.loads(data[1:])))


def _in_order(value: Json) -> Json:
    """Return a value as JSON, with what has no order of its own sorted."""
    if isinstance(value, list):
        return [_in_order(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {k: _in_order(v) for k, v in sorted(value.items())}
    content = _in_order(value["v"])
    if value[_TAG] in _WITHOUT_ORDER:
        content = sorted(content, key=json.dumps)
    return {**value, "v": content}


_WITHOUT_ORDER = ("set", "frozenset", "dict", "Namespace")
"""Tags of values with members in no order."""


def preview(data: bytes, limit: int = 60) -> str:
    """Return one line that describes a value, without torch; of equal values the same in each process."""
    if data[:1] != PLAIN:
        return f"<{len(data) - 1} bytes, weights-only format>"
    try:
        text = repr(_ForDisplay().read(json.loads(data[1:])))
    except UNREADABLE:
        return "<damaged>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
