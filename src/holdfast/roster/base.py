"""The coordination store: small messages between ranks, under keys, with no collective.

A message is a JSON object. It is written once, or by one rank only, except by `claim`, the one operation that
decides, and `count`. A roster never interprets messages, and never unpickles anything that it receives. If
the store behind it is gone, every method raises `RosterLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from holdfast.errors import RosterLost
from holdfast.values import Message


class Roster(Protocol):
    """The ranks, and the messages between them."""

    rank: int
    world_size: int

    def put(self, key: str, message: Message) -> None: ...

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        """Return the messages that are there now; None for each that is not. Never waits."""
        ...

    def claim(self, key: str, message: Message) -> Message:
        """Put the message unless the key has one already; return the message that the key has now. Atomic."""
        ...

    def count(self, key: str) -> int:
        """Add one to a counter, which begins at 0; return the new value. Atomic. `get` does not read
        counters."""
        ...

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until the key is there, at most so long (by the real clock); return whether it is."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove messages and counters; a missing one is no error."""
        ...

    def job(self) -> str:
        """Return a name of this job that all its ranks share, and no other job has."""
        ...

    def second(self) -> Roster:
        """Return another client of the same messages, so that a call of one thread does not block others.
        Kept."""
        ...

    def lane(self, name: str) -> Roster:
        """Return a roster of the same ranks and clients with separate messages, for concurrent work. Kept."""
        ...

    def renew(self) -> None:
        """Drop the connections: a thread that was given up may be stuck in one."""
        ...


# Checked by isinstance. Ranks of other rosters, for example users' own, are not asked where they are.
@runtime_checkable
class Wakeable(Roster, Protocol):
    """A roster on which a thread can wait for as long as the job runs, without sending requests."""

    def base(self, client: str = "main") -> Wakeable:
        """Return the roster of the same ranks outside of all lanes, over the client of this name. Kept, and
        the same for all lanes. It does not keep the store alive."""
        ...

    def wait_long(self, key: str) -> None:
        """Wait until the key is there, without a limit. Nobody else can use this client meanwhile."""
        ...

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` before this process closes the store, which still answers then."""
        ...


def decode(data: bytes, key: str) -> Message:
    try:
        return msgspec.json.decode(data, type=Message)
    except (msgspec.DecodeError, ValueError) as error:
        # A store with foreign messages can't be trusted to decide a call, so it counts as lost.
        raise RosterLost(f"The message {key!r} is not what a rank of Holdfast writes ({error}).") from None
