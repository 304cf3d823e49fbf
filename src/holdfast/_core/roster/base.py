"""The message store between ranks: a key-value store of small messages, used without collectives.

A message is a JSON object. Each key is written once, or by one rank only, except through the atomic
operations `claim`, which makes decisions, and `count`. A roster never interprets messages, and never
unpickles anything that it receives. If the store behind it is gone, every method raises `RosterLost`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from holdfast._core.base.values import NO_JSON, Message
from holdfast._core.ready import ready
from holdfast.errors import HoldfastError, RosterLost


class Roster(Protocol):
    """One rank's connection to the message store of all ranks."""

    rank: int
    world_size: int

    def put(self, key: str, message: Message) -> None: ...

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        """Return the messages under these keys; None for each missing one. Does not wait for them."""
        ...

    def claim(self, key: str, message: Message) -> Message:
        """Set the message if the key is unset; return the message that is then stored. Atomic."""
        ...

    def count(self, key: str) -> int:
        """Add one to a counter, which begins at 0; return the new value. Atomic. `get` does not read
        counters."""
        ...

    def wait(self, key: str, seconds: float) -> bool:
        """Wait up to `seconds` (real time) until the key is set; return whether it is."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove messages and counters; missing keys are ignored."""
        ...

    def job(self) -> str:
        """Return a name of this job: equal on all its ranks, and unique to it."""
        ...

    def lane(self, name: str) -> Roster:
        """Return a roster of the same ranks with its own key namespace, for concurrent calls. Cached."""
        ...

    def base(self) -> Roster:
        """Return the roster of the same ranks outside all lanes. Cached."""
        ...

    def bounded(self) -> Roster:
        """Return a roster over the same messages whose calls raise RosterLost if the store does not answer
        within a few seconds. Other rosters wait without a limit. Cached."""
        ...

    def way(self) -> tuple[str, str]:
        """Return the local and remote IP addresses of the connection to the store; empty if unknown."""
        ...

    def serves(self) -> bool:
        """Return whether this process hosts the store, which then ends with it."""
        ...


def is_foreign(error: HoldfastError) -> bool:
    """Return whether the error is a message without this job's seal. (The store itself still answers.)"""
    return bool(error.details.get("foreign"))


def get_ours(roster: Roster, keys: Sequence[str]) -> list[Message | None]:
    """Like `get`, but return None for messages of other jobs instead of raising. For optional messages."""
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
