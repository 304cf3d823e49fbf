"""Collects the findings of the readers in bounded memory, and builds `Evidence` from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from holdfast._watch.evidence import (
    Ending,
    Evidence,
    Frame,
    GroupOperation,
    GroupProgress,
    Opening,
    OwnVerdict,
    Rank,
    Remark,
    SourceLine,
    Stack,
)
from holdfast._watch.looks_like import Symptom

MOST = 64
"""Maximum number of values of one kind for each rank, and of remarks of one kind; the first ones are kept."""
IN_ALL = 1_000_000
"""Maximum number of values in total."""
RANKS = 100_000
"""Maximum world size: a larger rank in a log is treated as corrupt."""
T = TypeVar("T")


class _Seen:
    def __init__(self, rank: int) -> None:
        self.operations: list[GroupOperation] = []
        self.progress: dict[str, GroupProgress] = {}
        self.endings: list[Ending] = []
        self.stacks: list[Stack] = []
        self.later: list[Stack] = []
        self.rest = Rank(rank)
        """The single-valued fields of a rank."""


class Collector:
    """The common output of all readers of one diagnosis."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Seen] = {}
        self._remarks: dict[str, list[Remark]] = {}
        self._loose: list[GroupOperation] = []
        self._raised: list[Ending] = []
        self._members: dict[str, tuple[int, ...]] = {}
        self._opening: dict[str, Opening] = {}
        self._world: int | None = None
        self._first: tuple[float, float] | None = None
        """Time of the first logged timeout, and its limit."""
        self._room = IN_ALL
        self._ended: dict[Ending, float] = {}
        self.hidden = 0
        self.own: OwnVerdict | None = None
        """The latest verdict of Holdfast in a log."""

    def rank(self, rank: int) -> _Seen:
        if rank >= RANKS:
            return _Seen(rank)  # no such rank: discard its values
        return self._ranks.setdefault(rank, _Seen(rank))

    def note(self, rank: int, **values: object) -> None:
        """Set single-valued fields of a rank, by their names in `Rank`."""
        seen = self.rank(rank)
        seen.rest = msgspec.structs.replace(seen.rest, **values)

    def note_answer(self, found: Rank) -> None:
        """Add the answer of a rank to a roll call."""
        seen = self.rank(found.rank)
        seen.operations += found.operations
        seen.progress |= {one.group: one for one in found.progress}
        seen.endings += found.endings
        seen.stacks += [stack for stack in found.stacks if stack.calls]
        seen.later += [stack for stack in found.later if stack.calls]
        seen.rest = msgspec.structs.replace(found, last=seen.rest.last)

    def note_operation(self, rank: int | None, operation: GroupOperation) -> None:
        self._keep(self._loose if rank is None else self.rank(rank).operations, operation)

    def note_progress(self, rank: int, progress: GroupProgress) -> None:
        seen = self.rank(rank).progress
        if progress.group in seen or (len(seen) < MOST and self._room > 0):
            self._room -= 1
            seen[progress.group] = progress

    def note_calls(self, rank: int | None, calls: tuple[Frame, ...]) -> None:
        """Set the call stack of a rank's last timeout."""
        operations = self._loose if rank is None else self.rank(rank).operations
        for at in range(len(operations) - 1, -1, -1):
            if operations[at].state == "timed out":
                operations[at] = msgspec.structs.replace(operations[at], calls=calls)
                return

    def note_ending(self, rank: int | None, ending: Ending, at: float | None = None) -> None:
        """Add the ending of a rank. at: its time, on the scale of `is_near`."""
        self._keep(self._raised if rank is None else self.rank(rank).endings, ending)
        if at is not None:
            self._ended[ending] = at

    def once(self, kind: str, text: str, source: SourceLine, *values: str) -> None:
        """Add a remark, unless there is one of this kind with the same values."""
        if not any(one.values == values for one in self._remarks.get(kind, ())):
            self.remark(kind, text, source, *values)

    def alike(self, parts: Iterable[Symptom], text: str, source: SourceLine) -> None:
        """Add matching symptoms of known cases, each symptom once."""
        for part in parts:
            self.once("looks like", text.strip(), source, *part)

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
        # After a restart by the launcher, the next timeout comes at least one limit later.
        return abs(at - self._first[0]) <= max(60.0, self._first[1], limit or 0.0)

    def note_opening(self, name: str, size: int, rank: int, source: SourceLine, is_ready: bool) -> None:
        """Record that a communicator begins to open on a rank, or is open there."""
        one = self._opening.setdefault(name, Opening(name, size, {}, set()))
        if is_ready:
            one.ready.add(rank)
        else:
            one.begun[rank] = source
        if one.begun.keys() <= one.ready or len(self._opening) > RANKS:
            del self._opening[name]

    def remark(self, kind: str, text: str, source: SourceLine, *values: str) -> None:
        self._keep(self._remarks.setdefault(kind, []), Remark(kind, text[:400], source, values))

    def evidence(self) -> Evidence:
        """Return everything collected so far."""
        ranks = {
            number: msgspec.structs.replace(
                seen.rest,
                operations=tuple(_with_group(one, seen.progress.values()) for one in seen.operations),
                progress=tuple(seen.progress.values()),
                endings=tuple(map(self._before_timeouts, seen.endings)),
                stacks=tuple(seen.stacks),
                later=tuple(seen.later),
            )
            for number, seen in sorted(self._ranks.items())
        }
        return Evidence(
            ranks,
            tuple(one for kind in self._remarks.values() for one in kind),
            # The world size in a log may be that of a group, or of another job.
            self._world if all(rank < (self._world or RANKS) for rank in ranks) else None,
            self._members,
            self.hidden,
            tuple(self._loose),
            tuple(self._raised),
            tuple(self._opening.values()),
            self.own,
        )

    def _before_timeouts(self, ending: Ending) -> Ending:
        """Return the ending, marked as no cause if it is later than the first timeout."""
        late = self._first is not None and self._ended.get(ending, 0.0) >= self._first[0]
        return msgspec.structs.replace(ending, is_cause=False) if late else ending

    def _keep(self, values: list[T], value: T) -> None:
        if len(values) < MOST and self._room > 0:
            self._room -= 1
            values.append(value)


def _with_group(one: GroupOperation, progress: Iterable[GroupProgress]) -> GroupOperation:
    """Fill in the group of an operation. The watchdog's first line lacks it; the line after it has it, with
    the same number."""
    fits = [each.group for each in progress if each.completed < one.number <= each.enqueued]
    return msgspec.structs.replace(one, group=fits[0]) if not one.group and len(fits) == 1 else one
