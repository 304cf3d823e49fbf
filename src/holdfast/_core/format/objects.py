"""Encode Python values as bytes and decode them; decoding executes no code.

Plain values become JSON (`plain_objects`). All other values use torch's weights-only format, whose reader
calls only types on an allow-list (`torch_objects`).
"""

from __future__ import annotations

import json
from functools import cache

from holdfast._core.base.values import shortened
from holdfast._core.format import torch_objects
from holdfast._core.format.limits import OBJECT_BYTES
from holdfast._core.format.plain_objects import (
    PLAIN,
    TORCH,
    UNREADABLE,
    FindClass,
    NotJson,
    PlainDecoder,
    to_json,
)
from holdfast._core.format.records import OtherFields, classes_in
from holdfast.errors import BadInput, CorruptCheckpoint, LoadFailed


def encode(value: object, name: str) -> bytes:
    """Return the bytes of a value; `name` is its name, for errors."""
    try:
        data = PLAIN + json.dumps(to_json(value), ensure_ascii=True, separators=(",", ":")).encode()
    # ValueError: an integer of more than 4300 digits, which Python does not convert to text. If torch's
    # format can't store the value either, `torch_objects` raises the error.
    except (NotJson, ValueError, RecursionError):
        data = TORCH + torch_objects.encode(value, name)
    if len(data) > OBJECT_BYTES:
        raise BadInput(
            f"{name!r} is an object of {len(data)} bytes, more than the {OBJECT_BYTES} that are read as one.",
            hint="Save its tensors as tensors of the state, or its parts under names of their own.",
        )
    return data


def decode(data: bytes, name: str, like: object = None) -> object:
    """Return the value. LoadFailed if its type is not on the allow-list, CorruptCheckpoint if it is damaged.

    like: the present value, which it will replace; the classes in it are allowed, too.
    """
    if data[:1] == PLAIN:
        try:
            return PlainDecoder(_finder(name, like)).read(json.loads(data[1:]))
        except OtherFields as error:
            raise LoadFailed(
                f"The object {name!r} was not loaded, because a class has changed: {error}.",
                hint="Give the class what it had, or leave the object out of the load.",
            ) from None
        except UNREADABLE as error:
            raise CorruptCheckpoint(
                f"The object {name!r} can't be decoded: {shortened(repr(error))}."
            ) from None
    if data[:1] == TORCH:
        return torch_objects.decode(data[1:], name)
    raise CorruptCheckpoint(
        f"The object {name!r} starts with {data[:1]!r}, which is no encoding that Holdfast knows."
    )


def _finder(name: str, like: object) -> FindClass:
    """Return a function that finds an allowed class by name, and otherwise raises LoadFailed."""
    there = cache(lambda: classes_in(like))  # computed once, and only if there is a record

    def find(path: str) -> type:
        if (kind := there().get(path)) is not None:
            return kind
        if (kind := torch_objects.allowed_class(path)) is not None:
            return kind
        raise LoadFailed(
            f"The object {name!r} was not loaded, because it is of a class that neither the state has in "
            f"its place nor this process allows: {path}.",
            hint="Give a value of that class in the state, or allow it with "
            "torch.serialization.add_safe_globals; or leave it out of the load.",
        )

    return find
