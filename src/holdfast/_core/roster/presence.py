"""Presence messages: the state that each rank publishes in the message store, and checks of its process.

`at/<rank>` identifies the process and lists the operations of the rank, each with its phase, the bytes
transferred so far, and the ranks that it waits for. Errors about a missing rank quote it. The heart renews it
while the rank is in an operation or a session, also during long system calls.

A message that is not renewed proves nothing: the process may hold the GIL, or be stopped. Only the kernel
knows
whether a process is alive: for processes of this machine it is asked directly; for others, a neighbour that
can observe the process writes `gone/<rank>` when it has ended (`neighbours`). A process that renews its
message after that has not ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from holdfast._core.base.values import Message
from holdfast._core.ready import ready
from holdfast._core.roster.base import Roster, get_ours
from holdfast._core.roster.process import HELD, Identity
from holdfast.errors import RankInfo

T = TypeVar("T", bound=msgspec.Struct)
ANSWERED = 160
"""Polls of the message store per second, over all ranks of a large world."""


def pace(ranks: int, stall_timeout: float | None = None) -> float:
    """Return the seconds between two polls of the message store by one of `ranks` ranks. Arriving messages
    wake a waiting rank at once; polls detect failures that no rank could announce."""
    return min(max(1.0, ranks / ANSWERED), 60.0, (stall_timeout or 240.0) / 4)


def spread(rank: int) -> float:
    """Return this rank's share (0 to 1) of a delay that spreads the ranks' requests over time."""
    return rank * 0.618034 % 1.0


def at_key(rank: int) -> str:
    return f"at/{rank}"


def gone_key(rank: int) -> str:
    return f"gone/{rank}"


class Vitals(msgspec.Struct, frozen=True, omit_defaults=True):
    """The presence message of one rank."""

    who: Identity
    operations: dict[str, Message] = {}
    """Current operations by key (`beacon.Presence.record`)."""
    last: Message = {}
    """The last operation that it left."""
    beat: int = 0
    """Count of messages. Others compare it, never `wall`, because the clocks of hosts differ."""
    wall: float = 0.0
    hears: list[int] = []
    """Neighbours whose processes this rank can observe to be alive; only if some are on other hosts."""
    ended: str = ""
    """How its program has ended, as announced by itself; "" while it runs."""


class Gone(msgspec.Struct, frozen=True):
    """`gone/<rank>`: the report of a rank that has observed the end of another rank's process."""

    token: str
    """`Identity.token` of the ended process: the rank may have a new process by now."""
    how: str
    clean: bool = False
    """Whether its exit code was 0, or it had announced its end."""
    beat: int = 0
    """Its last `Vitals.beat` at that time."""

    def is_of(self, vitals: Vitals) -> bool:
        """Return whether this report is about that process, which has sent no message since."""
        return self.token == vitals.who.token and vitals.beat <= self.beat


class Seen(NamedTuple):
    """A rank's current knowledge about another rank."""

    vitals: Vitals | None = None
    """Its presence message; None if it has never sent one."""
    ended: str = ""
    """Why it can't arrive any more, by the kernel or its own announcement; "" if it may arrive."""
    gone: Gone | None = None
    """A neighbour's report of its end, if it has sent no message since."""
    there: bool | None = None
    """Whether its process is alive; None if this host can't tell."""
    state: str = ""
    """The state letter of its process in /proc; "" if not visible from this host."""

    def is_in(self, key: str) -> bool:
        """Return whether its message lists an operation."""
        return self.vitals is not None and key in self.vitals.operations

    def held(self) -> str:
        """Return why its process can't run, such as `it is stopped by a signal (state T)`; "" if it can."""
        return f"it is {HELD[self.state]} (state {self.state})" if self.state in HELD else ""


def see(roster: Roster, ranks: Sequence[int]) -> dict[int, Seen]:
    """Read the presence of ranks, and check their processes."""
    messages = get_ours(roster.base(), [key for rank in ranks for key in (at_key(rank), gone_key(rank))])
    pairs = zip(messages[::2], messages[1::2], strict=True)
    return {rank: judge(*pair) for rank, pair in zip(ranks, pairs, strict=True)}


def judge(at: Message | None, gone: Message | None) -> Seen:
    """Combine a rank's messages with a check of its process, if it is on this machine."""
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
    """Return how a process has ended, with a new check if it is on this machine; "" if it has not, or
    unknown."""
    if seen.ended or seen.vitals is None or not seen.vitals.who.is_of_this_machine():
        return seen.ended
    return "" if seen.vitals.who.state() else seen.vitals.who.how_it_ended()


def read(message: Message | None, kind: type[T]) -> T | None:
    """Convert a message to a type; None if it does not match."""
    with suppress(msgspec.ValidationError):
        return None if message is None else msgspec.convert(message, ready(kind))
    return None


def describe(rank: int, seen: Seen, wall: float, note: str = "", key: str = "") -> RankInfo:
    """Describe a rank for an error at the time `wall` by its message about the operation `key`, or else about
    its last operation."""
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
