"""The effects that a protocol yields, its state on one rank, and the interfaces of a save, a load and a
task."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
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
from holdfast.values import Message


# Effects are values, not calls. `runner.perform` executes them on a roster, `tests.support.simulate` with a
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
    """Add one to a counter and return its new value."""

    key: str


class Delete(NamedTuple):
    keys: Sequence[str]


class Pause(NamedTuple):
    """Wait until `key` appears, at most `seconds`."""

    key: str
    seconds: float


class Do(NamedTuple):
    """Call a function on this rank; what it raises is raised in the protocol."""

    name: str
    action: Callable[[], object]


class Alive(NamedTuple):
    """Tell whether the process behind a presence message is alive: True, False, or None if this host can't
    see."""

    message: Message


Effect = Put | Get | Claim | Count | Delete | Pause | Do | Alive
Steps = Generator[Effect, Any, Any]


class Questions(Protocol):
    """The questions of one call to ranks that it waits for (`whereabouts.Inquiry`)."""

    def ask(self, ranks: Iterable[int], call: str) -> None:
        """Ask those that were not asked yet, without waiting for the answers."""
        ...

    def answers(self, ranks: Sequence[int], patience: float) -> dict[int, str]:
        """Return the locations of ranks that have answered within `patience` seconds."""
        ...


@dataclass
class Context:
    """The state of one operation on one rank."""

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
    """Called with the ranks that this rank waits for; None when it works."""
    inquiry: Questions | None = None
    """Asks ranks that are about to be given up where their code is."""
    phase: str = "entered"
    who: str = ""
    """This rank as errors name it."""
    about: Message = field(default_factory=dict)
    """The part of the presence message that describes this call (`rendezvous.CallSignature`)."""
    hint: str = ""
    """The hint of an error that names missing ranks."""
    abandoned: dict[str, int] = field(default_factory=dict)
    """Calls of this rank that were abandoned since the last call that all ranks completed
    (`protocol/rendezvous.py`). Sent with its first message."""
    known_outcome: Outcome | None = None
    """The outcome, once this rank knows it."""
    own: set[str] = field(default_factory=set)
    """Keys that nobody needs after this rank has left."""
    answers: set[str] = field(default_factory=set)
    """Committer: keys of its answers to single ranks. The reader deletes its answer, unless the call was
    abandoned before."""

    def __post_init__(self) -> None:
        self.clock = self.deadline.clock
        # No election and no message: every rank computes the same committer. If it is dead, the call is
        # abandoned.
        self.committer = min(self.participants)
        self.is_committer = self.rank == self.committer
        self.who = self.who or f"rank {self.rank}"
        # The key is empty until `rendezvous.meet` has derived it.
        self.set_key(self.key)

    def set_key(self, key: str) -> None:
        """Set the key under which the ranks of this operation meet."""
        self.key, self.outcome_key, self.final_key = key, f"{key}/outcome", f"{key}/final"

    def enter(self, phase: str) -> None:
        """Enter a phase. Raises AssertionError if the transition is not in the table."""
        if phase not in self.transitions[self.phase]:
            raise AssertionError(f"the protocol has no way from {self.phase!r} to {phase!r}")
        self.phase = phase
        self.on_phase(phase)

    def key_of(self, topic: str, rank: int) -> str:
        """Return the key under which a rank reports, or is answered, on a topic."""
        return f"{self.key}/{topic}/{rank}"

    def report(self, topic: str, message: Message | Struct) -> Put:
        """Send a report to the committer (`_collect` reads it).

        The first message of a call also lists the calls that were abandoned before it.
        """
        key = self.key_of(topic, self.rank)
        self.own.add(key)
        before = {"abandoned": self.abandoned} if self.abandoned else {}
        return Put(key, {**to_message(message), **before})

    def answer(self, topic: str, rank: int, message: Message | Struct) -> Put:
        """Committer: send an answer to one rank, which deletes it when it leaves the call."""
        key = self.key_of(topic, rank)
        self.answers.add(key)
        return Put(key, to_message(message))

    def note_abandoned(self, abandoned: dict[str, int]) -> None:
        """Committer: note which calls another rank has seen abandoned."""
        # The highest number wins, so that no rank goes back to a call that is over.
        for signature, number in abandoned.items():
            self.abandoned[signature] = max(self.abandoned.get(signature, 0), number)


class SaveActions(Protocol):
    """The work of a save on one rank. The simulation implements it, too."""

    def enter(self) -> None:
        """Raise what keeps this rank from saving. The committer notes which version it may replace."""
        ...

    def row_digest(self) -> str | None:
        """Return a digest of the rows without a declared replica, or None if there are none."""
        ...

    def list_rows(self) -> RowList:
        """Return these rows themselves; called if the digests of the ranks differ."""
        ...

    def assign(self, lists: dict[int, RowList]) -> dict[int, Assigned]:
        """Committer: choose for each rank that sent a list which replica it is of each of its rows."""
        ...

    def write(self, assigned: Assigned | None) -> Written:
        """Write and sync this rank's files; return what the committer needs to know of them."""
        ...

    def prepare(self, written: dict[int, Written]) -> None:
        """Committer: read back, merge and check. Raises if anything is wrong. Nothing is visible yet."""
        ...

    def publish(self) -> Final:
        """Committer: put the index in place, durably."""
        ...

    def tidy(self) -> None:
        """Committer, after the commit: remove files that are no longer needed. Never raises."""
        ...

    def is_committed(self) -> bool:
        """Return whether the index of this attempt is in storage, as far as this rank can see. Never
        raises."""
        ...


class TaskActions(Protocol):
    """A collective task on one rank. `begin` returns at once. The work that it starts may block; `poll` asks
    for the result."""

    def contribute(self) -> Message:
        """Return what the committer needs to know of this rank before any rank acts."""
        ...

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        """Committer: return the answer for each rank. Raises if the contributions do not fit together; no
        rank has acted yet."""
        ...

    def begin(self, answer: Message) -> None: ...

    def wait(self, seconds: float) -> None:
        """Wait until this rank has acted, at most so long."""
        ...

    def poll(self) -> Message | None:
        """Return this rank's report, or None if it has not acted yet. Raises what the work has raised."""
        ...

    def finish(self, reports: dict[int, Message]) -> Message:
        """Committer: return the result that all ranks return."""
        ...

    def explain(self, error: HoldfastError) -> HoldfastError:
        """Return the error, or a better one, made from the presence messages of the other ranks."""
        ...


class LoadActions(Protocol):
    def choose(self) -> Chosen:
        """Committer: choose the checkpoint, and the version of it."""
        ...

    def read(self, chosen: Chosen) -> HaveRead: ...

    def check(self, reports: dict[int, HaveRead]) -> None:
        """Committer, after all ranks have read: raise if the reports show an error."""
        ...
