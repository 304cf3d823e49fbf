"""Presence messages: the state that each rank publishes in the message store.

`at/<rank>` identifies the process and lists the operations of the rank, each with its phase, the bytes
transferred so far, and the ranks that it waits for. Errors about a missing rank quote it. The heart renews it
while the rank is in an operation or a session, also during long system calls. A neighbour that observes the
end of the process writes `gone/<rank>`. `lost` judges what follows from both.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec

from holdfast._core.base.values import Message
from holdfast._core.ready import ready
from holdfast._core.roster.process import Identity

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
    reads_for: list[str] = []
    """The sites of calls (`protocol.rendezvous.CallSignature`) that it has begun, and reads its state for."""
    serves: bool = False
    """Whether its process hosts the message store."""
    ended: str = ""
    """How its program has ended, as announced by itself; "" while it runs."""


def read(message: Message | None, kind: type[T]) -> T | None:
    """Convert a message to a type; None if it does not match."""
    with suppress(msgspec.ValidationError):
        return None if message is None else msgspec.convert(message, ready(kind))
    return None
