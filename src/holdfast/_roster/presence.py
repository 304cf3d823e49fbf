"""Presence: what each rank shows of itself in the message store, and what can be known of it besides.

`at/<rank>` says who the process is, and for each operation of the rank its phase, the bytes moved so far, and
the ranks that it waits for, if it does not work. Errors quote it about a missing rank. The heart renews it
while the rank is in an operation or in a session, also while the rank is deep in a system call.

A message that is not renewed proves nothing: the process may hold the GIL, or be stopped. Whether it is
there, the kernel says: of a process of this machine directly, of others by `gone/<rank>`, which a neighbour
writes that can see it (`neighbours`). A process that has spoken after that has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from holdfast._ready import ready
from holdfast._roster.base import Roster, get_ours
from holdfast._roster.process import HELD, Identity
from holdfast._values import Message
from holdfast.errors import RankInfo

T = TypeVar("T", bound=msgspec.Struct)
ANSWERED = 160
"""Ranks of a large world that look at the message store in one second."""


def pace(ranks: int, stall_timeout: float | None = None) -> float:
    """Return the seconds between two looks of a rank of so many at the message store. It is woken for what
    it waits for; looks find what nobody could tell."""
    return min(max(1.0, ranks / ANSWERED), 60.0, (stall_timeout or 240.0) / 4)


def spread(rank: int) -> float:
    """Return a part of 1 by which this rank does things later, so that not all do them in one instant."""
    return rank * 0.618034 % 1.0


def at_key(rank: int) -> str:
    return f"at/{rank}"


def gone_key(rank: int) -> str:
    return f"gone/{rank}"


class Vitals(msgspec.Struct, frozen=True, omit_defaults=True):
    """The presence message of one rank."""

    who: Identity
    operations: dict[str, Message] = {}
    """By key, what it is in (`beacon.Presence.record`)."""
    last: Message = {}
    """The operation that it was in last."""
    beat: int = 0
    """Others compare this count, never `wall`: clocks of hosts differ."""
    wall: float = 0.0
    hears: list[int] = []
    """Neighbours for whose processes the kernel answers this rank; only where some are on other hosts."""
    ended: str = ""
    """How its program has ended, in its own words; "" while it runs."""


class Gone(msgspec.Struct, frozen=True):
    """`gone/<rank>`: the word of a rank that has seen the end of another."""

    token: str
    """Of the process that has ended: the rank may have another one by now."""
    how: str
    clean: bool = False
    """Was its exit code 0, or has it said itself that it ends?"""
    beat: int = 0
    """Its last `Vitals.beat` by then."""

    def is_of(self, vitals: Vitals) -> bool:
        """Return whether this is about that process, and that has not spoken since."""
        return self.token == vitals.who.token and vitals.beat <= self.beat


class Seen(NamedTuple):
    """What a rank knows of another one now."""

    vitals: Vitals | None = None
    """None if it has never shown itself."""
    ended: str = ""
    """Why it will not come any more: the kernel says so, or the rank itself; "" if it may come."""
    gone: Gone | None = None
    """What a neighbour of it has seen, if it has not spoken since."""
    there: bool | None = None
    """Is its process there? None: that can't be seen from here."""
    state: str = ""
    """The state letter of its process, if that can be seen from here."""

    def is_in(self, key: str) -> bool:
        """Does it show itself in an operation?"""
        return self.vitals is not None and key in self.vitals.operations

    def held(self) -> str:
        """Say what keeps its process from doing anything, as `it is stopped by a signal (state T)`; "" if
        nothing does."""
        return f"it is {HELD[self.state]} (state {self.state})" if self.state in HELD else ""


def see(roster: Roster, ranks: Sequence[int]) -> dict[int, Seen]:
    """Look at ranks: at what they show, and at their processes."""
    messages = get_ours(roster.base(), [key for rank in ranks for key in (at_key(rank), gone_key(rank))])
    pairs = zip(messages[::2], messages[1::2], strict=True)
    return {rank: judge(*pair) for rank, pair in zip(ranks, pairs, strict=True)}


def judge(at: Message | None, gone: Message | None) -> Seen:
    """Return what is known of a rank by its messages, and by a look at its process, if it is of this
    machine."""
    vitals, witness = read(at, Vitals), read(gone, Gone)
    if vitals is None:
        return Seen()
    ended, there, state = vitals.ended, None, ""
    if witness is not None and not witness.is_of(vitals):
        witness = None
    if witness is not None:
        ended, there = ended or witness.how, False
    elif vitals.who.is_of_this_machine():
        state = vitals.who.state()
        ended, there = ended or ("" if state else vitals.who.how_it_ended()), bool(state)
    return Seen(vitals, ended, witness, there, state)


def ended_since(seen: Seen) -> str:
    """Return how a process has ended, of this machine also since it was looked at; "" if that is unknown."""
    if seen.ended or seen.vitals is None or not seen.vitals.who.is_of_this_machine():
        return seen.ended
    return "" if seen.vitals.who.state() else seen.vitals.who.how_it_ended()


def read(message: Message | None, kind: type[T]) -> T | None:
    """Convert a message to its type; None if it does not fit."""
    with suppress(msgspec.ValidationError):
        return None if message is None else msgspec.convert(message, ready(kind))
    return None


def describe(rank: int, seen: Seen, wall: float, note: str = "", key: str = "") -> RankInfo:
    """Describe a rank for an error at the time `wall`: what it says of the operation `key`, or else of its
    last one."""
    vitals = seen.vitals
    if vitals is None:
        return RankInfo(rank, note=note)
    # If the rank is not in `key`, quote the operation that it began last.
    doing = vitals.operations.get(key) or next(reversed(vitals.operations.values()), None)
    operation = doing or vitals.last
    phase = f"{operation.get('title', '')}: {operation.get('phase', '')}" if operation else "idle"
    return RankInfo(
        rank,
        vitals.who.host,
        vitals.who.pid,
        phase if doing or not operation else f"idle since {phase}",
        round(max(0.0, wall - vitals.wall), 2),
        "; ".join(part for part in (note, str((doing or {}).get("doing", ""))) if part),
    )
