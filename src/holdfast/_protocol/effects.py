"""The effects that a protocol yields, its state on one rank, and the interfaces of a save, a load and a
task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from holdfast._deadline import Deadline, Limits
from holdfast._protocol.messages import (
    Assigned,
    Chosen,
    Final,
    HaveRead,
    Outcome,
    RowList,
    Written,
    abandoned_by,
    from_roster,
    to_message,
)
from holdfast._protocol.phases import TRANSITIONS, Transitions
from holdfast._roster.presence import Seen
from holdfast._roster.whereabouts import Inquiry
from holdfast._values import Json, Message
from holdfast.errors import HoldfastError, RankInfo


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
    """Wait until `key` appears, at most `seconds`. Gives whether it has."""

    key: str
    seconds: float


class Do(NamedTuple):
    """Call a function on this rank; what it raises is raised in the protocol."""

    name: str
    action: Callable[[], object]


class Look(NamedTuple):
    """Look at ranks: what they show of themselves, and whether their processes are there. Gives a dict of
    `presence.Seen` by rank."""

    ranks: Sequence[int]


Effect = Put | Get | Claim | Count | Delete | Pause | Do | Look
Steps = Generator[Effect, Any, Any]


class Late(NamedTuple):
    """A wait that takes long, for people."""

    ranks: tuple[RankInfo, ...]
    """Some of those that are waited for."""
    everyone: int
    """How many are waited for."""
    what: str
    """What they are to do."""
    waited: float
    left: float
    """Seconds to the deadline."""
    came: bool
    """Whether the wait for these is over, because they have come."""
    hint: str = ""
    """What to do if these ranks take no part at all."""


ANSWERS = ("answer", "answered")
"""Keys of a call on which ranks wait before the outcome. Who abandons the call writes them, too: so a rank
waits for one key, whatever comes."""


def outcome_key(key: str) -> str:
    """Return the key under which the outcome of an operation is claimed."""
    return f"{key}/outcome"


def abandon(key: str, rank: int, error: HoldfastError) -> Steps:
    """Claim `abandoned` for the call of this key, and wake all who wait in it. Returns the claim that
    stands."""
    mine = abandoned_by(rank, error)
    standing = yield Claim(outcome_key(key), mine)
    if standing == mine:
        # The claim has decided. Whom this does not wake finds it at the next look.
        with suppress(HoldfastError):
            for name in ANSWERS:
                yield Put(f"{key}/{name}", {})
    return standing


@dataclass
class Context:
    """The state of one operation on one rank."""

    rank: int
    participants: tuple[int, ...]
    key: str
    title: str
    deadline: Deadline
    limits: Limits = field(default_factory=Limits)
    transitions: Transitions = field(default_factory=lambda: TRANSITIONS)
    step: int | None = None
    on_phase: Callable[[str], None] = lambda phase: None
    on_wait: Callable[[Sequence[int] | None], None] = lambda ranks: None
    """Called with the ranks that this rank waits for; None when it works."""
    on_progress: Callable[[], None] = lambda: None
    """Called on the committer when a rank that it waits for has made progress: the others wait for that rank,
    too."""
    on_late: Callable[[Late], None] = lambda late: None
    """Called on one rank when a wait takes long, and when that is over."""
    suspicion: Callable[[Seen], int] = lambda seen: 0
    """Returns a number that is lowest for the ranks that are told first."""
    inquiry: Inquiry | None = None
    """Asks ranks where their code is."""
    blocks: bool = False
    """Is this the only thread of the program that makes calls? Then it makes no other one meanwhile."""
    mine: Callable[[], Collection[str]] = tuple
    """Returns the keys of all operations that this rank is in."""
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
    collect_error: HoldfastError | None = None
    """What has kept this rank from collecting its state; raised in the call, so that it reaches all ranks."""
    explain: Callable[[HoldfastError], HoldfastError] | None = None
    """Returns a better error for one that this rank is about to tell."""
    known_outcome: Outcome | None = None
    """The outcome, once this rank knows it."""
    heard_outcome: Callable[[], Message | None] = lambda: None
    """Returns the outcome that the heart of this rank has seen."""
    idle: tuple[int, ...] = ()
    """Committer: the ranks without which it has decided to save."""
    committer_seen: Seen | None = None
    """What this rank has seen of the committer last."""
    is_decidable: bool = False
    """Whether this rank has done its part of the last round, so that all ranks may have agreed."""
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
        self.key, self.outcome_key = key, outcome_key(key)
        self.answer_key, self.answered_key = (f"{key}/{name}" for name in ANSWERS)
        self.final_key = f"{key}/final"

    def enter(self, phase: str) -> None:
        """Enter a phase. Raises AssertionError if the transition is not in the table."""
        if phase not in self.transitions[self.phase]:
            raise AssertionError(f"the protocol has no way from {self.phase!r} to {phase!r}")
        self.phase = phase
        self.deadline.note_progress()
        self.on_phase(phase)

    def heard(self) -> Outcome | None:
        """Return the outcome, if this rank or its heart has seen it."""
        if self.known_outcome is not None or (seen := self.heard_outcome()) is None:
            return self.known_outcome
        return from_roster(seen, Outcome)

    def note_progress(self) -> None:
        """Note that a rank which this one waits for goes on."""
        self.deadline.note_progress()
        if self.is_committer:
            self.on_progress()

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

    def answer(self, rank: int, message: Message | Struct) -> Put:
        """Committer: send an answer to one rank, which deletes it when it leaves the call."""
        key = self.key_of("answer", rank)
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
        """Raise if nothing can be saved there. The committer notes which version it may replace."""
        ...

    def row_digest(self) -> str | None:
        """Return a digest of the rows without a declared replica, or None if there are none."""
        ...

    def copies(self) -> list[list[tuple[int, int, int]]]:
        """Return which ranks hold the same values (`RowDigest.copies`); empty if that is not known."""
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

    def mark(self) -> None:
        """Committer, after the commit and before the others hear of it: write what belongs to the checkpoint
        but not to Holdfast. Who hears of the commit may move the checkpoint."""
        ...

    def tidy(self) -> None:
        """Committer, after the commit: remove files that are no longer needed. Never raises."""
        ...

    def is_committed(self) -> bool:
        """Return whether the index of this attempt is in storage, as far as this rank can see. Never
        raises."""
        ...

    def is_moved(self) -> bool:
        """Return whether the files that this rank has written are gone. Never raises."""
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


class LoadActions(Protocol):
    def choose(self) -> Chosen:
        """Committer: choose the checkpoint, and the version of it."""
        ...

    def read(self, chosen: Chosen) -> HaveRead: ...

    def check(self, reports: dict[int, HaveRead]) -> Json:
        """Committer, after all ranks have read: raise if the reports show an error; return what every rank is
        told."""
        ...
