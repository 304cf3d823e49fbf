"""What a protocol asks to be done, what it knows of itself, and what it needs from a save or a load."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from holdfast.deadline import Deadline
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import (
    Assigned,
    Chosen,
    Final,
    HaveRead,
    Outcome,
    RowList,
    Written,
    to_message,
)
from holdfast.protocol.phases import TRANSITIONS, Transitions
from holdfast.protocol.whereabouts import Inquiry
from holdfast.values import Message


# Effects are values, not calls. `runner.perform` carries them out for real, `tests.support.simulate` with a
# manual clock and seeded faults.
class Put(NamedTuple):
    key: str
    message: Message


class Get(NamedTuple):
    keys: Sequence[str]


class Claim(NamedTuple):
    key: str
    message: Message


class Count(NamedTuple):
    """Add one to a counter; its new value."""

    key: str


class Delete(NamedTuple):
    keys: Sequence[str]


class Pause(NamedTuple):
    """Until `key` appears, at most `seconds`."""

    key: str
    seconds: float


class Do(NamedTuple):
    """Work on this rank; what it raises is raised in the protocol."""

    name: str
    action: Callable[[], object]


class Alive(NamedTuple):
    """Is the process behind this presence message alive? True, False, or None if unseen from here."""

    message: Message


Effect = Put | Get | Claim | Count | Delete | Pause | Do | Alive
Steps = Generator[Effect, Any, Any]


@dataclass
class Context:
    """One rank's part in one operation."""

    rank: int
    participants: tuple[int, ...]
    key: str
    title: str
    deadline: Deadline
    stall_timeout: float
    transitions: Transitions = field(default_factory=lambda: TRANSITIONS)
    step: int | None = None
    on_phase: Callable[[str], None] = lambda phase: None
    on_wait: Callable[[Sequence[int] | None], None] = lambda ranks: None
    """Told whom this rank waits for, None when it works."""
    inquiry: Inquiry = field(default_factory=lambda: Inquiry(None))
    """Asks ranks that are about to be given up where they are."""
    phase: str = "entered"
    who: str = ""
    """This rank as errors name it."""
    about: Message = field(default_factory=dict)
    """What its presence message says of this call (`rendezvous.CallSignature`)."""
    hint: str = ""
    """What an error adds that names ranks which are missing."""
    abandoned: dict[str, int] = field(default_factory=dict)
    """This rank's calls that were abandoned since the last good end (`protocol/rendezvous.py`); told with its
    first message."""
    known_outcome: Outcome | None = None
    """The outcome, once this rank knows it."""
    own: set[str] = field(default_factory=set)
    """Keys that nobody needs once this rank has left."""
    answers: set[str] = field(default_factory=set)
    """Committer: keys of what it told single ranks; who reads one deletes it, unless the call was abandoned
    before."""

    def __post_init__(self) -> None:
        self.clock = self.deadline.clock
        # No election and no message: every rank computes the same one. If the committer is dead, the call is
        # abandoned.
        self.committer = min(self.participants)
        self.is_committer = self.rank == self.committer
        self.who = self.who or f"rank {self.rank}"
        # The key is empty until `rendezvous.meet` has derived it.
        self.set_key(self.key)

    def set_key(self, key: str) -> None:
        """Set the key under which the ranks of this operation meet."""
        self.key, self.outcome, self.final = key, f"{key}/outcome", f"{key}/final"

    def enter(self, phase: str) -> None:
        """Move to a phase that the table allows."""
        if phase not in self.transitions[self.phase]:
            raise AssertionError(f"the protocol has no way from {self.phase!r} to {phase!r}")
        self.phase = phase
        self.on_phase(phase)

    def key_of(self, topic: str, rank: int) -> str:
        """The key of what a rank reports, or is answered, on a topic."""
        return f"{self.key}/{topic}/{rank}"

    def report(self, topic: str, message: Message | Struct) -> Put:
        """Tell the committer; `_collect` hears it. The first message of a call carries the calls that were
        abandoned before it."""
        key = self.key_of(topic, self.rank)
        self.own.add(key)
        before = {"abandoned": self.abandoned} if self.abandoned else {}
        return Put(key, {**to_message(message), **before})

    def answer(self, topic: str, rank: int, message: Message | Struct) -> Put:
        """Committer: tell one rank, which deletes it when it leaves."""
        key = self.key_of(topic, rank)
        self.answers.add(key)
        return Put(key, to_message(message))

    def note_abandoned(self, abandoned: dict[str, int]) -> None:
        """Committer: take in which calls another rank has seen abandoned."""
        # The highest number wins, so that no rank counts back to a call that is over.
        for signature, number in abandoned.items():
            self.abandoned[signature] = max(self.abandoned.get(signature, 0), number)

    def agreed(self, value: object = None) -> Outcome:
        """The outcome of a call that all ranks bring to its end."""
        return Outcome("agreed", self.rank, abandoned=self.abandoned, value=value)


class SaveActions(Protocol):
    """What a save does on one rank; the simulation has its own."""

    def fingerprint(self) -> str | None:
        """A fingerprint of what this rank holds without a declared replica, or None if nothing."""
        ...

    def list_rows(self) -> RowList:
        """All of it, for when fingerprints differ."""
        ...

    def assign(self, lists: dict[int, RowList]) -> dict[int, Assigned]:
        """Committer: for each rank that told, which replica it is of each tensor."""
        ...

    def write(self, assigned: Assigned | None) -> Written:
        """Write and sync this rank's files; returns what the committer must know."""
        ...

    def prepare(self, written: dict[int, Written]) -> None:
        """Committer: read back, merge and check; raises what is wrong. Nothing is visible yet."""
        ...

    def publish(self) -> Final:
        """Committer: put the index in place, durably."""
        ...

    def tidy(self) -> None:
        """Committer, after the commit: remove what nobody needs any more. Never raises."""
        ...

    def is_committed(self) -> bool:
        """Is the index in storage that of this attempt, as far as can be seen from here? Never raises."""
        ...


class TaskActions(Protocol):
    """What ranks do together at one time. `begin` returns at once; what it began may block, and is asked for
    by `poll`."""

    def contribute(self) -> Message:
        """What the committer must know of this rank before any of them acts."""
        ...

    def decide(self, said: dict[int, Message]) -> dict[int, Message]:
        """Committer: for each rank its answer; raises if ranks don't fit together. Nothing was done yet."""
        ...

    def begin(self, answer: Message) -> None: ...

    def wait(self, seconds: float) -> None:
        """Until this rank has acted, at most so long."""
        ...

    def poll(self) -> Message | None:
        """This rank's report once it has acted; raises what it met."""
        ...

    def finish(self, reports: dict[int, Message]) -> Message:
        """Committer: what all ranks return."""
        ...

    def explain(self, error: HoldfastError) -> HoldfastError:
        """The error, or a better one: it looks at what other ranks say of themselves."""
        ...


class LoadActions(Protocol):
    def choose(self) -> Chosen:
        """Committer: which checkpoint, and which version of it."""
        ...

    def read(self, chosen: Chosen) -> HaveRead: ...

    def check(self, reports: dict[int, HaveRead]) -> None:
        """Committer, once all have read: is there anything wrong with what all ranks have done?"""
        ...
