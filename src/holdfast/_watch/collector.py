"""Collects what readers find, in bounded memory, and makes `Evidence` of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from holdfast._watch.evidence import (
    Call,
    Ending,
    Evidence,
    Opening,
    Operation,
    Progress,
    Rank,
    Remark,
    Source,
    Stack,
)
from holdfast._watch.looks_like import Part

MOST = 64
"""Values of one kind that are kept of one rank, and remarks of one kind: the first ones."""
IN_ALL = 1_000_000
"""Values that are kept in all."""
RANKS = 100_000
"""Ranks of a job, at most: a larger number in a log is damage."""
T = TypeVar("T")


class _Seen:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.progress: dict[str, Progress] = {}
        self.endings: list[Ending] = []
        self.stacks: list[Stack] = []
        self.later: list[Stack] = []
        self.busy: float | None = None
        self.moved = 0
        self.starved = 0.0
        self.state = self.phase = ""
        self.last: Source | None = None


class Collector:
    """What all readers of one diagnosis write to."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Seen] = {}
        self._remarks: dict[str, list[Remark]] = {}
        self._loose: list[Operation] = []
        self._raised: list[Ending] = []
        self._members: dict[str, tuple[int, ...]] = {}
        self._opening: dict[str, tuple[int, dict[int, Source], set[int]]] = {}
        self._world: int | None = None
        self._first: tuple[float, float] | None = None
        """When the first timeout was told, and its limit."""
        self._room = IN_ALL
        self._ended: dict[Ending, float] = {}
        self._alike: set[Part] = set()
        self.hidden = 0
        self.files: list[str] = []

    def rank(self, rank: int) -> _Seen:
        if rank >= RANKS:
            return _Seen()  # no such rank: what is said of it is not kept
        return self._ranks.setdefault(rank, _Seen())

    def note_operation(self, rank: int | None, operation: Operation) -> None:
        self._keep(self._loose if rank is None else self.rank(rank).operations, operation)

    def note_progress(self, rank: int, progress: Progress) -> None:
        seen = self.rank(rank).progress
        if progress.group in seen or (len(seen) < MOST and self._room > 0):
            self._room -= 1
            seen[progress.group] = progress

    def note_calls(self, rank: int | None, calls: tuple[Call, ...]) -> None:
        """Note where the last timeout of a rank was called."""
        operations = self._loose if rank is None else self.rank(rank).operations
        for at in range(len(operations) - 1, -1, -1):
            if operations[at].state == "timed out":
                operations[at] = msgspec.structs.replace(operations[at], calls=calls)
                return

    def note_ending(self, rank: int | None, ending: Ending, at: float | None = None) -> None:
        """Note how a rank has ended. at: when, in the seconds of `is_near`."""
        self._keep(self._raised if rank is None else self.rank(rank).endings, ending)
        if at is not None:
            self._ended[ending] = at

    def once(self, kind: str, value: str, text: str, source: Source) -> None:
        """Note the first line of a kind that has a value."""
        if not any(one.values == (value,) for one in self._remarks.get(kind, ())):
            self.remark(kind, text, source, value)

    def alike(self, parts: Iterable[Part], text: str, source: Source) -> None:
        """Note what is part of a fingerprint, each part once."""
        for part in parts:
            if part not in self._alike:
                self._alike.add(part)
                self.remark("looks like", text.strip(), source, *part)

    def note_stack(self, rank: int, stack: Stack, is_later: bool) -> None:
        seen = self.rank(rank)
        self._keep(seen.later if is_later else seen.stacks, stack)

    def note_members(self, group: str, ranks: tuple[int, ...]) -> None:
        if len(self._members) < RANKS:
            self._members[group] = ranks

    def note_world(self, size: int) -> None:
        if 0 < size <= RANKS:
            self._world = max(size, self._world or 0)

    def is_near(self, at: float, limit: float | None) -> bool:
        """Return whether a time, in seconds, may belong to the same hang as the first timeout."""
        if self._first is None:
            if limit is not None:
                self._first = at, limit
            return True
        # The job that a launcher starts again hangs after another limit, at the soonest.
        return abs(at - self._first[0]) <= max(60.0, self._first[1], limit or 0.0)

    def note_opening(self, name: str, size: int, rank: int, source: Source, is_ready: bool) -> None:
        """Note that a communicator begins to open on a rank, or is open there."""
        _, begun, ready = self._opening.setdefault(name, (size, {}, set()))
        if is_ready:
            ready.add(rank)
        else:
            begun[rank] = source
        if begun.keys() <= ready or len(self._opening) > RANKS:
            del self._opening[name]

    def remark(self, kind: str, text: str, source: Source, *values: str) -> None:
        self._keep(self._remarks.setdefault(kind, []), Remark(kind, text[:400], source, values))

    def evidence(self) -> Evidence:
        """Return all that was found."""
        ranks = {}
        for number, seen in sorted(self._ranks.items()):
            known = self._with_group_of_progress(seen)
            ranks[number] = Rank(
                number,
                tuple(known),
                tuple(seen.progress.values()),
                tuple(map(self._before_timeouts, seen.endings)),
                tuple(seen.stacks),
                tuple(seen.later),
                seen.busy,
                seen.moved,
                seen.starved,
                seen.state,
                seen.phase,
                seen.last,
            )
        world = self._world if self._world is None or all(rank < self._world for rank in ranks) else None
        remarks = tuple(one for kind in self._remarks.values() for one in kind)
        return Evidence(
            ranks,
            remarks,
            world,
            self._members,
            self.hidden,
            tuple(self._loose),
            tuple(self._raised),
            tuple(
                Opening(name, size, begun, tuple(ready))
                for name, (size, begun, ready) in self._opening.items()
            ),
        )

    def _before_timeouts(self, ending: Ending) -> Ending:
        """Return an ending, which is no cause if it is later than the first timeout."""
        late = self._first is not None and self._ended.get(ending, 0.0) >= self._first[0]
        return msgspec.structs.replace(ending, is_cause=False) if late else ending

    def _with_group_of_progress(self, seen: _Seen) -> list[Operation]:
        """Return the operations of a rank. A watchdog's first line has no group: the line after it has, with
        the same number."""
        found = []
        for one in seen.operations:
            fits = [
                progress.group
                for progress in seen.progress.values()
                if progress.completed < one.number <= progress.enqueued
            ]
            known = not one.group and len(fits) == 1
            found.append(msgspec.structs.replace(one, group=fits[0]) if known else one)
        return found

    def _keep(self, values: list[T], value: T) -> None:
        if len(values) < MOST and self._room > 0:
            self._room -= 1
            values.append(value)
