"""The coordination store: small messages between ranks, under keys, with no collective.

A message is a JSON object. It is written once, or by one rank only, except by `claim`, the one operation that
decides, and `count`. A roster never interprets messages, and never unpickles anything that it receives. If
the store behind it is gone, every method raises `RosterLost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast._ready import ready
from holdfast._values import NO_JSON, Message
from holdfast.errors import HoldfastError, RosterLost


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

    def lane(self, name: str) -> Roster:
        """Return a roster of the same ranks with separate messages, for concurrent work. Kept."""
        ...

    def base(self) -> Roster:
        """Return the roster of the same ranks outside of all lanes. Kept."""
        ...

    def bounded(self) -> Roster:
        """Return a roster of the same messages whose calls raise RosterLost if the store does not answer
        within a few seconds; those of other rosters may wait as long as it takes. Kept."""
        ...

    def way(self) -> tuple[str, str]:
        """Return the address of this host on its way to the store, and that of the store's host; empty where
        that is not known."""
        ...

    def serves(self) -> bool:
        """Return whether the store is in this process, so that it ends with it."""
        ...


def is_foreign(error: HoldfastError) -> bool:
    """Return whether a message was refused because no rank of this job has written it: the store answers."""
    return bool(error.details.get("foreign"))


def get_ours(roster: Roster, keys: Sequence[str]) -> list[Message | None]:
    """Return the messages that are there now, as `get` does; None also for each that is not of this job. For
    those who can go on without."""
    try:
        return roster.get(keys)
    except RosterLost as error:
        if not is_foreign(error):
            raise
    messages: list[Message | None] = []
    for key in keys:
        try:
            messages += roster.get([key])
        except RosterLost as error:
            if not is_foreign(error):
                raise
            messages.append(None)
    return messages


def decode(data: bytes, key: str) -> Message:
    try:
        return msgspec.json.decode(data, type=ready(Message))
    except NO_JSON as error:
        # A store with foreign messages can't be trusted to decide a call, so it counts as lost.
        raise RosterLost(
            f"The message {key!r} is not what a rank of Holdfast writes ({error}).", details={"foreign": True}
        ) from None
