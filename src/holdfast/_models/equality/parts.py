"""Fingerprints whose parts are known by rank, and which ranks hold wrong elements.

A tensor's parts are boxes, each with its sums, and the ranks that hold it. If two ranks hold different
elements of one box, both are kept, and the tensor as a whole has no fingerprint: it equals nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import msgspec

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, Dims
from holdfast._models.equality.fingerprints import (
    Fingerprint,
    RankSums,
    Specs,
    add_spec,
    check_covered,
)
from holdfast._models.equality.rounding import add_up, rounded_of, total, value_of

_TRIES = 4096
"""Limit of combinations of differing copies to try."""


class EnginePart(msgspec.Struct, frozen=True):
    """A box of a tensor, as some ranks hold it."""

    ranks: tuple[int, ...]
    """All that hold these elements."""
    offset: Dims
    shape: Dims
    value: str
    """The fingerprint of these elements, 32 hex digits. Those of disjoint boxes add up to the tensor's."""
    rounded: dict[str, str] = {}
    """The same of the elements rounded to a less exact dtype, by dtype name."""
    is_added: bool = False
    """Is it a part that should be zeros, and is not? Another rank has the elements of the box."""

    def value_in(self, dtype: str, own: str) -> str:
        """Return the value in a dtype. own: the dtype of the elements."""
        return self.value if dtype == own else self.rounded.get(dtype, "")


class EngineFingerprint(Fingerprint, frozen=True):
    """The fingerprint of a tensor in an inference engine. If ranks hold different elements of one part of
    it, `value` is empty."""

    parts: tuple[EnginePart, ...] = ()
    """The boxes of it that ranks hold."""


class PartSums:
    """The sums of all ranks, of which copies may differ."""

    def __init__(self) -> None:
        self._specs: Specs = {}
        self._parts: dict[str, dict[Box, dict[str, tuple[list[int], str]]]] = {}
        """By name, box and fingerprint: the ranks with this, and its record."""
        self._added: dict[str, list[tuple[int, Box, str]]] = {}
        """By name: fingerprints of parts that should be zeros, and are not."""

    def add(self, rank: int, rows: RankSums) -> None:
        for alike in rows.alike:
            for name, record in alike.records():
                add_spec(self._specs, rank, name, alike)
                value = value_of(record)
                if not alike.is_copy:
                    found = self._parts.setdefault(name, {}).setdefault(alike.box, {})
                    found.setdefault(value, ([], record))[0].append(rank)
                elif value.strip("0"):
                    self._added.setdefault(name, []).append((rank, alike.box, value))

    def result(self) -> dict[str, EngineFingerprint]:
        fingerprints = {}
        for name, (rank, (code, shape)) in sorted(self._specs.items()):
            boxes, added = self._parts.get(name, {}), self._added.get(name, [])
            check_covered(name, shape, [box for box in boxes if box.volume], rank)
            parts = [
                EnginePart(
                    tuple(ranks),
                    *box,
                    value,
                    {key: one.value for key, one in rounded_of(code, record).items()},
                )
                for box, found in boxes.items()
                for value, (ranks, record) in found.items()
            ]
            parts += [EnginePart((rank,), *box, value, is_added=True) for rank, box, value in added]
            whole = add_up(code, [record for found in boxes.values() for _, record in [*found.values()][:1]])
            value, rounded = value_of(whole), rounded_of(code, whole)
            if added or any(len(found) > 1 for found in boxes.values()):
                value = ""
                rounded = {key: msgspec.structs.replace(one, value="") for key, one in rounded.items()}
            fingerprints[name] = EngineFingerprint(DTYPES[code].name, shape, value, rounded, tuple(parts))
        return fingerprints


def wrong_ranks(
    parts: tuple[EnginePart, ...], dtype: str, own: str, right: str, read: Callable[[Box], str] | None
) -> tuple[Dims, bool]:
    """Return the ranks that hold wrong elements, and True; if that can't be told, all ranks that hold a part,
    and False.

    dtype: in which the tensor is compared. own: that of its elements. right: the right fingerprint of the
    whole tensor. read: returns that of a box; None if only the whole is known.
    """
    found = _by_whole(parts, dtype, own, right) if read is None else _by_parts(parts, dtype, own, read)
    if found:
        return tuple(sorted(found)), True
    return tuple(sorted({rank for part in parts for rank in part.ranks})), False


def _by_parts(parts: tuple[EnginePart, ...], dtype: str, own: str, read: Callable[[Box], str]) -> set[int]:
    known: dict[Box, str] = {}
    wrong: set[int] = set()
    for part in parts:
        box = Box(part.offset, part.shape)
        if not part.is_added and box not in known:
            known[box] = read(box)
        if part.is_added or part.value_in(dtype, own) != known[box]:
            wrong.update(part.ranks)
    return wrong


def _by_whole(parts: tuple[EnginePart, ...], dtype: str, own: str, right: str) -> set[int]:
    """Where copies differ, one choice of them may have the right sums; then the others are wrong. If a single
    part is all there is, all copies of it are."""
    boxes: dict[Box, list[EnginePart]] = {}
    for part in parts:
        if not part.is_added:
            boxes.setdefault(Box(part.offset, part.shape), []).append(part)
    if prod(map(len, boxes.values())) <= _TRIES:
        for chosen in product(*boxes.values()):
            if total([part.value_in(dtype, own) for part in chosen]) == right:
                return {rank for part in parts if part not in chosen for rank in part.ranks}
    if len(boxes) == 1:
        return {rank for part in parts for rank in part.ranks}
    return set()
