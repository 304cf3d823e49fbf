"""Tensors of a checkpoint: names, dtypes and global shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple

from holdfast.errors import BadInput

Dims = tuple[int, ...]
"""The length of each axis, or an index on each."""
Replica = tuple[int, int]
"""(index, count) of a copy of a shard."""


class DType(NamedTuple):
    """An element type. A type without a safetensors tag is stored as `tag`, with `extra` elements along an
    additional last axis (complex128 is two F64)."""

    name: str
    size: int
    tag: str
    extra: int


# The index in this table is the dtype's code in index files: append, never reorder (docs/format.md).
DTYPES: tuple[DType, ...] = (
    DType("uint8", 1, "U8", 1),
    DType("float32", 4, "F32", 1),
    DType("bfloat16", 2, "BF16", 1),
    DType("float16", 2, "F16", 1),
    DType("float64", 8, "F64", 1),
    DType("int64", 8, "I64", 1),
    DType("int32", 4, "I32", 1),
    DType("int16", 2, "I16", 1),
    DType("int8", 1, "I8", 1),
    DType("bool", 1, "BOOL", 1),
    DType("uint16", 2, "U16", 1),
    DType("uint32", 4, "U32", 1),
    DType("uint64", 8, "U64", 1),
    DType("float8_e4m3fn", 1, "F8_E4M3", 1),
    DType("float8_e5m2", 1, "F8_E5M2", 1),
    DType("float8_e4m3fnuz", 1, "U8", 1),
    DType("float8_e5m2fnuz", 1, "U8", 1),
    DType("float8_e8m0fnu", 1, "U8", 1),
    DType("complex64", 8, "F32", 2),
    DType("complex128", 16, "F64", 2),
    DType("complex32", 4, "F16", 2),
)
CODE_OF = {dtype.name: code for code, dtype in enumerate(DTYPES)}

FLOATS = tuple(CODE_OF[name] for name in ("float64", "float32", "float16", "bfloat16"))
"""Floating-point dtypes that are converted into each other, the most exact first: a cast to a later one may
round."""

TENSOR, OBJECT = 0, 1
KINDS = ("tensor", "object")
_MANY = 2000


def dtype_code(name: str, where: str) -> int:
    """Return the code of a dtype by its torch name (without `torch.`)."""
    try:
        return CODE_OF[name]
    except KeyError:
        raise BadInput(
            f"{where} has dtype {name}, which Holdfast does not store; convert it first."
        ) from None


def less_exact(one: int, other: int) -> int | None:
    """Return the less exact of two dtypes, in which elements of both can be compared; None if there is
    none."""
    if one == other:
        return one
    return max(one, other, key=FLOATS.index) if one in FLOATS and other in FLOATS else None


class TensorSpec(NamedTuple):
    """A global tensor. Its name is global, too: layer and expert numbers count over the whole model."""

    name: str
    dtype: int
    shape: Dims
    kind: int = TENSOR


def nearest(name: str, names: Collection[str]) -> str | None:
    """Return the most similar name, for the hint of an error; compares a few thousand at most."""
    if len(names) > _MANY:
        tail = name.rpartition(".")[2]
        # difflib compares with each name, which takes seconds for 100,000 names. Names with the same last
        # part are the likeliest.
        names = list(islice((other for other in names if other.endswith(tail)), _MANY))
    similar = get_close_matches(name[:200], names, 1)
    return similar[0] if similar else None


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|\Z)")


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names that differ only in their numbers, as of layers and experts; the key has * for these, or is
    the name if it is alone."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_NUMBER.sub("*", name), []).append(name)
    return {same[0] if len(same) == 1 else pattern: same for pattern, same in found.items()}


def counted(names: Iterable[str], most: int = 10) -> str:
    """Return names as text for a message, those that differ only in numbers as one pattern with their
    number."""
    groups = by_pattern(names)
    texts = {key: repr(key) if len(same) == 1 else f"{key!r} ({len(same)})" for key, same in groups.items()}
    return listed(list(groups), texts.__getitem__, most)


def listed(names: Sequence[str], say: Callable[[str], str] = repr, most: int = 10) -> str:
    """Return the first few names as text for a message, each shortened to a line."""
    # What `say` returns is shortened, not its argument, which it may look up.
    texts = [say(name) for name in names[:most]]
    shown = [text if len(text) <= 450 else f"{text[:300]}…{text[-100:]}" for text in texts]
    return "; ".join(shown) + ("; and more" if len(names) > most else "")
