"""The coordination store: small messages between ranks, under keys, with no collective.

A message is a JSON object, written once, or by one rank only, but for `claim`, the one operation that
decides, and `count`. A roster never interprets what it carries, and nothing received is ever unpickled. When
the place that keeps the messages is gone, every method raises `RosterLost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from holdfast.errors import RosterLost
from holdfast.values import Message


class Roster(Protocol):
    """Which ranks there are, and what they say."""

    rank: int
    world_size: int

    def put(self, key: str, message: Message) -> None: ...

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        """The messages that are there now; None for each that is not. Never waits."""
        ...

    def claim(self, key: str, message: Message) -> Message:
        """Put the message unless one stands there already; returns the one that stands. Atomic."""
        ...

    def count(self, key: str) -> int:
        """Add one to a counter, which begins at 0; returns the new value. Atomic. A counter is no message:
        `get` does not read it."""
        ...

    def wait(self, key: str, seconds: float) -> bool:
        """Until the key is there, at most so long (a real clock's seconds)."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove messages and counters; one that is not there is no error."""
        ...

    def job(self) -> str:
        """A name of this job that all its ranks share, and no other job has."""
        ...

    def second(self) -> Roster:
        """Another client of the same messages, so that one thread's call holds no other up. Kept."""
        ...

    def lane(self, name: str) -> Roster:
        """The same ranks and clients with messages of their own, for what goes on beside the rest. Kept."""
        ...

    def renew(self) -> None:
        """Forget the connections: a thread that was given up may be stuck in one."""
        ...


# Found by isinstance. Ranks of other rosters, users' own among them, are not asked where they are.
@runtime_checkable
class Wakeable(Roster, Protocol):
    """A roster on which a thread of a rank can wait for as long as the job goes on, and ask nobody
    meanwhile."""

    def base(self, client: str = "main") -> Wakeable:
        """The same ranks, outside of all lanes, over the client of this name. Kept, and equal for all lanes.
        It does not keep the place of the messages alive."""
        ...

    def wait_long(self, key: str) -> None:
        """Until the key is there, however long that takes. Nobody else can use this client meanwhile."""
        ...

    def on_end(self, listener: Callable[[], None]) -> None:
        """Call `listener` when this process lets go of the place of the messages, which still answers."""
        ...


def decode(data: bytes, key: str) -> Message:
    try:
        return msgspec.json.decode(data, type=Message)
    except (msgspec.DecodeError, ValueError) as error:
        # Whatever has written this: the store can't be trusted to decide a call, so it counts as lost.
        raise RosterLost(f"The message {key!r} is not what a rank of Holdfast writes ({error}).") from None
