"""The effects that a protocol yields, its state on one rank, and the interfaces of a save, a load and a
task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from msgspec import Struct

from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.base.values import Json, Message
from holdfast._core.protocol.messages import (
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
from holdfast._core.protocol.phases import TRANSITIONS, Transitions
from holdfast._core.roster.lost import Seen
from holdfast._core.roster.whereabouts import Inquiry
from holdfast.errors import HoldfastError, RankInfo

THIS_PROCESS = "this process"
"""The name in errors of a rank that is a whole job."""


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
    """Wait up to `seconds` until `key` appears. Result: whether it has."""

    key: str
    seconds: float


class Do(NamedTuple):
    """Call a function on this rank; its exceptions are raised in the protocol."""

    name: str
    action: Callable[[], object]


class Look(NamedTuple):
    """Read the presence of ranks and check their processes. Result: a dict from rank to `presence.Seen`."""

    ranks: Sequence[int]


Effect = Put | Get | Claim | Count | Delete | Pause | Do | Look
Steps = Generator[Effect, Any, Any]


class Late(NamedTuple):
    """A report about a long wait, for logs."""

    ranks: tuple[RankInfo, ...]
    """Some of the awaited ranks."""
    everyone: int
    """The number of awaited ranks."""
    what: str
    """The action that they are expected to take."""
    waited: float
    left: float
    """Seconds until the deadline."""
    came: bool
    """Whether these ranks have arrived, so the wait for them is over."""
    hint: str = ""
    """What to do if these ranks take no part at all."""


ANSWERS = ("answer", "answered")
"""Keys of a call on which ranks wait before the outcome. Abandoning a call writes them, too, so that waiting
on one key suffices."""


def outcome_key(key: str) -> str:
    """Return the key under which the outcome of an operation is claimed."""
    return f"{key}/outcome"


def abandon(key: str, rank: int, error: HoldfastError) -> Steps:
    """Claim `abandoned` for the call with this key, and wake its waiting ranks. Returns the winning claim."""
    mine = abandoned_by(rank, error)
    standing = yield Claim(outcome_key(key), mine)
    if standing == mine:
        # The claim is final. Ranks that are not woken find it at their next poll.
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
    """Called with the ranks that this rank waits for; with None when it starts to work."""
    on_progress: Callable[[], None] = lambda: None
    """Called on the committer when an awaited rank makes progress, which other ranks indirectly wait for."""
    on_late: Callable[[Late], None] = lambda late: None
    """Called on one rank when a wait takes long, and again when it is over."""
    suspicion: Callable[[Seen], int] = lambda seen: 0
    """A sort key for reports: ranks with the lowest number are named first."""
    inquiry: Inquiry | None = None
    """Asks ranks for their stacks."""
    blocks: bool = False
    """Whether this is the only thread of the program that makes calls, so that it makes no other call before
    this one ends."""
    mine: Callable[[], Collection[str]] = tuple
    """Returns the keys of all current operations of this rank."""
    phase: str = "entered"
    who: str = ""
    """The name of this rank in errors."""
    about: Message = field(default_factory=dict)
    """The part of the presence message that describes this call (`rendezvous.CallSignature`)."""
    hint: str = ""
    """The hint of an error that names missing ranks."""
    abandoned: dict[str, int] = field(default_factory=dict)
    """Calls of this rank that were abandoned since the last call that all ranks completed
    (`protocol/rendezvous.py`). Sent with its first message."""
    collect_error: HoldfastError | None = None
    """An error while this rank collected its state; raised inside the call, so that it reaches all ranks."""
    explain: Callable[[HoldfastError], HoldfastError] | None = None
    """Returns a more informative error in place of one that this rank is about to send."""
    known_outcome: Outcome | None = None
    """The outcome, once this rank knows it."""
    heard_outcome: Callable[[], Message | None] = lambda: None
    """Returns the outcome, if the heart of this rank has read it."""
    idle: tuple[int, ...] = ()
    """Committer: the absent ranks that it has decided to save without."""
    committer_seen: Seen | None = None
    """The last presence of the committer that this rank has read."""
    is_decidable: bool = False
    """Whether this rank has done its part of the last round, so that all ranks may have agreed."""
    own: set[str] = field(default_factory=set)
    """Keys that no rank needs after this one has left the call."""
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

    @property
    def there(self) -> str:
        """Where this rank failed, for errors: ` on rank 1 (host a, pid 2)`; "" if no other rank is there."""
        return "" if self.who == THIS_PROCESS else f" on {self.who}"

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
        """Record progress of an awaited rank."""
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
        """Return a digest of the rows whose replica index is undeclared; None if there are none."""
        ...

    def copies(self) -> list[list[tuple[int, int, int]]]:
        """Return which ranks hold the same values (`RowDigest.copies`); empty if unknown."""
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
        """Committer, after the commit and before announcing it: write files of other formats (such as
        markers) into the checkpoint. A rank that knows of the commit may move the checkpoint."""
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
    """A collective task on one rank. `begin` starts the work, which may block, and returns at once; `poll`
    returns the result."""

    def contribute(self) -> Message:
        """Return this rank's report to the committer before any rank acts."""
        ...

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        """Committer: return the answer for each rank. Raises if the contributions do not fit together; no
        rank has acted yet."""
        ...

    def begin(self, answer: Message) -> None: ...

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until this rank has acted."""
        ...

    def poll(self) -> Message | None:
        """Return this rank's report, or None while it is still working. Raises the error of the work."""
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
