"""The exception hierarchy.

    HoldfastError
    ├── BadInput(ValueError)     the call itself can't be honoured; nothing was started
    ├── SaveFailed               this save did not become a checkpoint, on any rank
    │   ├── IdleRanks            ranks are absent whose data other ranks also hold; handled internally
    │   ├── CoverageError        the shards of all ranks do not tile a tensor exactly once
    │   ├── ReplicaMismatch      ranks hold different bytes under one name
    │   ├── Vanished             tensors that the previous step (or `expected=`) had are gone
    │   └── Conflict             another save committed into the same folder meanwhile
    ├── LoadFailed               the state was not restored
    │   ├── NotCommitted         there is no committed checkpoint there
    │   ├── Replaced             the checkpoint was replaced or removed while it was being loaded
    │   ├── Unplaced             a shard has no offset; a load handles this by itself
    │   ├── MissingTensors       the state asks for names that the checkpoint does not hold
    │   └── ShapeMismatch        same name, other shape or dtype
    ├── CorruptCheckpoint        bytes on disk are not what was written
    ├── GroupsFailed             process groups could not be opened, warmed up or closed
    ├── RankFailed               another rank raised, died or stopped making progress
    │   └── DeadlineExceeded     the time given for the call has passed
    ├── CommitUnconfirmed        committed or not, or perhaps not durable; nothing deleted; look with `latest`
    ├── RosterLost               the message store is gone, so ranks can't agree any more
    ├── NotStarted               the system starts no more threads or processes
    └── StorageError(OSError)    the file system or object store refused

Every error can be pickled, has its data in fields, and is sent between ranks as JSON (`to_message` and
`from_message`), so that all ranks raise the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from holdfast._core.ready import ready


class RankInfo(msgspec.Struct, frozen=True):
    """The last known state of a rank."""

    rank: int
    host: str = ""
    pid: int = 0
    phase: str = ""
    seconds_since_seen: float | None = None
    note: str = ""
    at: str = ""
    """Its stack when other ranks asked for it, innermost call last; "" if it did not answer."""

    def __str__(self) -> str:
        who = f"rank {self.rank}"
        if self.host:
            who += f" (host {self.host}, pid {self.pid})"
        if self.phase:
            who += f", last seen in phase {self.phase!r}"
            if self.seconds_since_seen is not None:
                who += f" {self.seconds_since_seen:.1f} s ago"
        else:
            who += ", which has not been heard of"
        # For a stopped process, `note` already contains the kernel's description of where it is.
        notes = self.note if self.at in self.note else "; ".join(filter(None, (self.note, self.at)))
        return f"{who}: {notes}" if notes else who


class HoldfastError(Exception):
    """The base class. `message` is one or two sentences for people; the other fields are for programs.

    Fields: `step` (int or None), `phase` (str), `rank` (the rank that caused it, or None),
    `missing` (tuple of RankInfo), `hint` (what to do next), `details` (a dict of JSON values).
    """

    plain: ClassVar[type[HoldfastError] | None] = None
    """For a class that also inherits from a framework's exception: the Holdfast class without it."""

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        phase: str = "",
        rank: int | None = None,
        missing: tuple[RankInfo, ...] = (),
        hint: str = "",
        details: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step
        self.phase = phase
        self.rank = rank
        self.missing: tuple[RankInfo, ...] = tuple(missing)
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})
        # `errno` is an attribute of OSError and no field of the message, so it travels among the details.
        this: Exception = self
        if isinstance(this, OSError):
            this.errno = self.details.get("errno")

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self).plain or type(self), self.to_message()))

    def to_message(self) -> dict[str, object]:
        """Encode the error as plain JSON values."""
        return {
            "kind": type(self).__name__,
            "message": self.message,
            "step": self.step,
            "phase": self.phase,
            "rank": self.rank,
            "missing": [msgspec.to_builtins(info) for info in self.missing],
            "hint": self.hint,
            "details": self.details,
        }


class BadInput(HoldfastError, ValueError):
    """The call can't be honoured as it stands; nothing was started and nothing written."""


class SaveFailed(HoldfastError):
    """The save did not become a checkpoint. The folder holds what it held before."""


class IdleRanks(SaveFailed):
    """Ranks are absent, but other ranks hold the same values. Internal: all ranks get this error and save
    again without the absent ones, so callers never see it."""


class CoverageError(SaveFailed):
    """Shards leave a gap, overlap, or disagree on a tensor's shape or dtype."""


class ReplicaMismatch(SaveFailed):
    """Ranks hold different bytes, shapes or dtypes under one name."""


class Vanished(SaveFailed):
    """Names that the previous committed step, or `expected=`, has are not in this save."""


class Conflict(SaveFailed):
    """The folder is in use: another save committed there since this one began, another job saves there, or
    the step to delete is being read."""


class LoadFailed(HoldfastError):
    """The state was not restored; it may be partly overwritten."""


class NotCommitted(LoadFailed):
    """There is no committed checkpoint at that place."""


class Replaced(LoadFailed):
    """The checkpoint was replaced or removed while it was being loaded."""


class Unplaced(LoadFailed):
    """A rank has a shard without an offset. Internal: all ranks get this error, exchange their lengths and
    load again, so callers never see it."""


class MissingTensors(LoadFailed):
    """The state asks for names that the checkpoint does not hold."""


class ShapeMismatch(LoadFailed):
    """A name is in the checkpoint with another shape, dtype or kind."""


class CorruptCheckpoint(HoldfastError):
    """Bytes in storage differ from those written. The message names the file, the position and the digest."""


class GroupsFailed(HoldfastError):
    """A process group could not be opened, warmed up or closed. The message names the group and the cause."""


class RankFailed(HoldfastError):
    """Another rank raised, died, stopped, or never came."""


class DeadlineExceeded(RankFailed):
    """The call's timeout has passed; `missing` lists the ranks that did not arrive."""


class CommitUnconfirmed(HoldfastError):
    """This rank can't tell whether the save was committed, or whether it is durable. It is never
    half-committed, and no data was deleted."""


class RosterLost(HoldfastError):
    """The message store (its host process, mostly rank 0) can't be reached any more."""


class NotStarted(HoldfastError):
    """The system refused to start a thread or process. The message names the limit and how to raise it."""


class StorageError(HoldfastError, OSError):
    """An operation of the file system or object store failed: full, read-only, unreachable."""


def _tree(root: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        # A class with `plain` has the same name as the Holdfast class, and would replace it in this table.
        if child.plain is None:
            kinds.update(_tree(child))
    return {name: kind for name, kind in kinds.items() if not name.startswith("_")}


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, without the stack that torch may append; its type if the
    text is empty."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def from_message(message: dict[str, Any]) -> HoldfastError:
    """Decode the result of `HoldfastError.to_message`; an unknown kind becomes a HoldfastError."""
    # By name, in this tree only: a message comes from another process, and must not name any other class.
    kind = _tree(HoldfastError).get(str(message.get("kind")), HoldfastError)
    return _rebuild(kind, message)


def _rebuild(kind: type[HoldfastError], message: dict[str, Any]) -> HoldfastError:
    missing = []
    for info in message.get("missing") or ():
        try:
            missing.append(msgspec.convert(info, ready(RankInfo)))
        except msgspec.ValidationError:
            continue  # written by another version; the error's message still contains it
    # Each field is converted: a sender of another version, or a stranger, may have written it.
    details = message.get("details")
    return kind(
        str(message.get("message", "")),
        step=message.get("step"),
        phase=str(message.get("phase") or ""),
        rank=message.get("rank"),
        missing=tuple(missing),
        hint=str(message.get("hint") or ""),
        details=details if isinstance(details, dict) else {},
    )
