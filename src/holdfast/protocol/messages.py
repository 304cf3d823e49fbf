"""What ranks tell each other in a save and a load. A message that is not of its type is refused where it is
read.

Fields that a type does not have are ignored: the first message of a call also carries the calls that were
abandoned before it (`effects.Context.report`).
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from holdfast.errors import HoldfastError
from holdfast.format.container import WrittenFile
from holdfast.values import Json, Message


class Generation(msgspec.Struct, frozen=True):
    """Whose a generation number of a rank is: that of the process that has drawn this token."""

    token: str


class Opened(msgspec.Struct, frozen=True):
    """The first rank of a call to all: the call has begun."""

    rank: int
    attempt: str
    """A name of this attempt that no other has."""


# An empty dict is a safe default here: msgspec makes a new one for each instance.
class Before(msgspec.Struct, frozen=True):
    """What the first message of a call carries besides: the calls that were abandoned before it."""

    abandoned: dict[str, int] = {}
    """By call signature, the number of the next call."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one decision of a call: whoever claims its key first decides for all ranks."""

    state: Literal["agreed", "abandoned"]
    rank: int
    """Who has claimed it."""
    error: Message = {}
    """Of an abandoned call, what every rank raises (`HoldfastError.to_message`)."""
    abandoned: dict[str, int] = {}
    """Of an agreed call, as in `Before`, the highest numbers of all ranks."""
    value: Json = None
    """Of an agreed choice or task, its result. It is any JSON."""


class Final(msgspec.Struct, frozen=True, omit_defaults=True):
    """The committer to all: how its last step ended, which comes after the outcome."""

    index: str = ""
    """Version of the index that is in place, as hex digits."""
    error: Message | None = None
    """What was raised instead."""


class Said(msgspec.Struct, frozen=True):
    """Each rank to the committer: what it has to say to a choice. It is any JSON."""

    value: Json = None


class Fingerprint(msgspec.Struct, frozen=True):
    """Each rank to the committer: a digest of the rows whose holders are not declared; None if all are."""

    fingerprint: str | None


class RowList(msgspec.Struct, frozen=True):
    """Each such rank to the committer, where digests differ: the rows themselves."""

    keys: list[str]
    """What identifies each row."""
    specs: list[str]
    """What must be equal on all that hold it."""


class Assigned(msgspec.Struct, frozen=True):
    """The committer's answer: which copy of its undeclared rows a rank holds."""

    holders: list[int] | None = None
    """All ranks that have such rows, if all have the same; a rank's place among them is its copy's number."""
    lists_wanted: bool = False
    """They are not the same: each is to send its list."""
    replicas: list[tuple[int, int]] | None = None
    """(index, count) of each row of one rank's list, in its order."""


class Written(msgspec.Struct, frozen=True):
    """Each rank to the committer: what it has written, durably."""

    step: int | None
    grid: Message | None
    files: list[WrittenFile]
    report: Message = {}
    """What an integration tells besides (`SaveRequest.report`)."""


class Chosen(msgspec.Struct, frozen=True):
    """The committer to all: which version of a checkpoint is loaded."""

    identity: str
    created: Json = None
    """Seconds since the epoch, as the index says it. It is any JSON."""


class HaveRead(msgspec.Struct, frozen=True):
    """Each rank to the committer: it has read its part."""

    bytes: int
    asked: int
    """Rows that it asked for."""


M = TypeVar("M", bound=msgspec.Struct)


def to_message(value: Message | msgspec.Struct) -> Message:
    """What goes to the roster."""
    if isinstance(value, msgspec.Struct):
        message: Message = msgspec.to_builtins(value)
        return message
    return value


def from_roster(message: Message, kind: type[M], rank: int | None = None) -> M:
    """A message of rank `rank`, None where any rank may have written it. Raises HoldfastError if it is not of
    its type."""
    try:
        return msgspec.convert(message, kind)
    except msgspec.ValidationError as error:
        raise HoldfastError(
            f"{'A rank' if rank is None else f'Rank {rank}'} has sent a message that "
            f"is no {kind.__name__}: {error}.",
            rank=rank,
            hint="Do all ranks run the same version of Holdfast? See docs/security.md for who can write "
            "messages.",
        ) from None


def abandoned_by(rank: int, error: HoldfastError) -> Message:
    """What a rank claims as the outcome of a call that it gives up."""
    return to_message(Outcome("abandoned", rank, error.to_message()))
