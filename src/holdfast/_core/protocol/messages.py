"""The messages of a save and a load. A message that does not have its type is refused when it is read.

Unknown fields are ignored: the first message of a call also carries the calls that were abandoned before it
(`effects.Context.report`).
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from holdfast._core.base.values import Json, Message
from holdfast._core.format.names import WrittenFile
from holdfast._core.ready import ready
from holdfast.errors import HoldfastError


class Generation(msgspec.Struct, frozen=True):
    """The owner of a generation number of a rank: the process that has drawn this token."""

    token: str


class Opened(msgspec.Struct, frozen=True):
    """From the first rank of a call to all: the call has begun."""

    rank: int
    attempt: str
    """A name of this attempt that no other attempt has."""


# An empty dict is a safe default here: msgspec makes a new one for each instance.
class Before(msgspec.Struct, frozen=True):
    """The additional field of the first message of a call: the calls that were abandoned before it."""

    abandoned: dict[str, int] = {}
    """By call signature, the number of the next call."""


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one decision of a call: the rank that claims its key first decides for all ranks."""

    state: Literal["agreed", "abandoned"]
    rank: int
    """The rank that has claimed it."""
    error: Message = {}
    """Of an abandoned call, the error that every rank raises (`HoldfastError.to_message`)."""
    abandoned: dict[str, int] = {}
    """Of an agreed call: as in `Before`, the highest number of all ranks."""
    value: Json = None
    """Of an agreed choice or task, its result. It is any JSON."""


class Final(msgspec.Struct, frozen=True, omit_defaults=True):
    """From the committer to all: the result of its last step, which comes after the outcome."""

    error: Message | None = None
    """The error that was raised instead."""


class Said(msgspec.Struct, frozen=True):
    """From each rank to the committer: its value for a choice, any JSON."""

    value: Json = None


class TimeIsUp(msgspec.Struct, frozen=True):
    """From the committer to all: it is time to save; or from a rank that has closed its run: it is not."""

    due: bool
    rank: int
    asked: int
    """How many steps that rank had asked for since the last save."""


class StopAsked(msgspec.Struct, frozen=True):
    """From a rank to all: stop at the same step, and save."""

    reason: str
    pid: int


class RowDigest(msgspec.Struct, frozen=True):
    """From each rank to the committer, as it enters a save."""

    digest: str | None
    """Of the rows without a declared replica; None if there are none."""
    copies: list[list[tuple[int, int, int]]] = []
    """For each kind of its values, the ranks that hold the same ones, in the order of their replica numbers
    (`ranks.progressions`); empty if that is not known of all its values."""


class RowList(msgspec.Struct, frozen=True):
    """From each holder of such rows to the committer, if digests differ: the rows themselves."""

    keys: list[str]
    """Identifies each row by its name and box; then each tie, by both names."""
    specs: list[str]
    """Dtype, shape and so on of each row; must be equal on all holders."""


class Assigned(msgspec.Struct, frozen=True):
    """The committer's answer: which replica of its undeclared rows a rank holds."""

    holders: list[int] | None = None
    """All ranks that have such rows, if all have the same; a rank's position in it is its replica index."""
    lists_wanted: bool = False
    """The rows differ: each holder is to send its list."""
    replicas: list[tuple[int, int]] | None = None
    """(index, count) of each row of one rank's list, in its order."""


class Written(msgspec.Struct, frozen=True):
    """From each rank to the committer: what it has written, durably."""

    step: int | None
    grid: Message | None
    files: list[WrittenFile]
    report: Message = {}
    """The report of an integration (`SaveRequest.report`)."""


class Chosen(msgspec.Struct, frozen=True):
    """From the committer to all: the version of the checkpoint that is loaded."""

    identity: str
    created: Json = None
    """Seconds since the epoch, copied from the index: any JSON."""


class HaveRead(msgspec.Struct, frozen=True):
    """From each rank to the committer: it has read its part."""

    bytes: int
    asked: int
    """Rows that it requested."""
    tensors: tuple[int, int] = (0, 0)
    """How many tensors it wants filled, and how many of these the checkpoint has."""
    kept: tuple[str, ...] = ()
    """Names that keep their values: the checkpoint lacks them, or has another shape. The first ones."""
    rows: list[tuple[int, int]] = []
    """Runs of rows of the index that it read, as (first, last): 100,000 names from each rank are more than a
    roster should carry."""
    left_out: list[str] = []
    """Names that it does not ask for on purpose; one that ends with a dot is all below it."""


class LoadRest(msgspec.Struct, frozen=True):
    """From the committer to all: what a load has left, on all ranks together."""

    unasked: tuple[str, ...] = ()
    """Names that no rank has asked for; the first ones."""
    unasked_total: int = 0
    kept: tuple[str, ...] = ()
    """Names that keep their values on some rank; the first ones."""


M = TypeVar("M", bound=msgspec.Struct)


def to_message(value: Message | msgspec.Struct) -> Message:
    """Return the JSON object that is sent over the roster."""
    if isinstance(value, msgspec.Struct):
        message: Message = msgspec.to_builtins(value)
        return message
    return value


def from_roster(message: Message, kind: type[M], rank: int | None = None) -> M:
    """Convert a message to its type. Raises HoldfastError if it does not fit.

    rank: the sender, or None if it can be any rank.
    """
    try:
        return msgspec.convert(message, ready(kind))
    except msgspec.ValidationError as error:
        raise HoldfastError(
            f"{'A rank' if rank is None else f'Rank {rank}'} has sent a message that "
            f"is no {kind.__name__}: {error}.",
            rank=rank,
            hint="Do all ranks run the same version of Holdfast? See docs/security.md for who can write "
            "messages.",
        ) from None


def abandoned_by(rank: int, error: HoldfastError) -> Message:
    """Return the outcome that a rank claims for a call that it gives up."""
    return to_message(Outcome("abandoned", rank, error.to_message()))
