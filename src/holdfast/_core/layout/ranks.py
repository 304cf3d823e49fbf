"""Runs of integers, and lists of ranks as text: `8-15`, `0,4,8-11`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from holdfast.errors import BadInput

_PART = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST = 1 << 20
"""Limit of ranks in one text."""


def ranks_of(text: str) -> tuple[int, ...]:
    """Return the ranks that a text lists, ascending, each once. BadInput if it lists none."""
    ranks: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip()) if text.isascii() else None
        low = int(match[1]) if match else 0
        high = int(match[2] or match[1]) if match else -1
        if high < low or high - low >= MOST:
            raise BadInput(f"{part.strip()[:100]!r} names no ranks.", hint="Write 8-15, or 0,4,8-11.")
        ranks.update(range(low, high + 1))
        if len(ranks) > MOST:
            raise BadInput(f"{text[:100]!r} names more than {MOST} ranks.")
    return tuple(sorted(ranks))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return the shortest text that `ranks_of` reads as these ranks."""
    found = runs(sorted(set(ranks)))
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in found)


def runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each run of consecutive integers as (first, last)."""
    start, count = 0, len(values)
    for i in range(1, count + 1):
        if i == count or values[i] != values[i - 1] + 1:
            yield values[start], values[i - 1]
            start = i


def progressions(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranks as arithmetic progressions (first, step, count).

    A group of a layout is one or a few of them, however many ranks it has.
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 1
        count = 1
        while start + count < len(ranks) and ranks[start + count] - ranks[start + count - 1] == step:
            count += 1
        found.append((ranks[start], step, count))
        start += count
    return found


def from_progressions(found: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of progressions: the inverse of `progressions`."""
    return [first + step * index for first, step, count in found for index in range(count)]
