"""How ranks agree: the save and load protocols, without any I/O.

Theory. A protocol is a generator. It yields what it wants done (`Put`, `Get`, `Claim`, `Pause`,
`Do`, `Alive`) and is sent the result, so the same lines run over a TCPStore with real files
(`flow/run.py`) and, thousands of times a second, in a simulation that kills, delays and reorders
(`holdfast.testing.simulate`).

Every operation has one key, `outcome`, and one atomic operation on it, `Claim`. Whoever claims
first decides: the committer claims `agreed` after it has checked that everything is there; any
rank claims `abandoned`, with the error, when it fails, when its deadline passes, or when it sees
that another rank has died or stalled. So "agreed" and "abandoned" can't both be true, and every
rank raises the same error. A save has a second key, `final`, written by the committer alone once
the index is durable. Between `agreed` and `final` lies the only window in which a rank may be
unable to know: it looks into storage, and if the index is not there it says CommitUnconfirmed.

Who waits for whom: the committer (lowest participant) waits for everyone, everyone else waits
for the outcome and keeps an eye on the committer. A rank is given up when its process is gone
(seen at once on one host), when it neither works on nor beats for `stall_timeout`, or when the
deadline passes. A rank that waits for others is not stalled while it beats.

Rejected: a barrier with a counter (names nobody), leader election (a dead committer means an
abandoned save; the next one elects itself by being the lowest participant), heartbeats of all
to all (n^2), deciding by majority (a checkpoint needs every rank's bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from holdfast.deadline import Clock, Deadline, StallTimer
from holdfast.errors import (
    CommitUnconfirmed,
    DeadlineExceeded,
    HoldfastError,
    RankFailed,
    RankInfo,
    RosterLost,
    from_message,
)
from holdfast.roster.base import Message
from holdfast.roster.presence import at_key, describe

Table = dict[str, dict[str, str]]

TRANSITIONS: Table = {
    "entered": {
        "claims": "a rank holds tensors whose replicas nobody declared",
        "writing": "this rank knows what it writes",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "claims": {
        "writing": "the committer said who writes them",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "writing": {
        "written": "this rank's files are durable",
        "failed": "an error on this rank, or an outcome `abandoned`",
    },
    "written": {
        "committing": "committer: every rank has written",
        "committed": "the committer put `final` in place",
        "unconfirmed": "agreed, but no `final` and no index by the deadline",
        "failed": "outcome `abandoned`",
    },
    "committing": {
        "committed": "the index is durable",
        "unconfirmed": "the index may or may not be durable",
        "failed": "headers disagree, shards leave a gap, or somebody abandoned first",
    },
    "committed": {},
    "failed": {},
    "unconfirmed": {},
}
"""A save on one rank: phase -> next phase -> why. docs/protocol.md draws this table."""

LOAD_TRANSITIONS: Table = {
    "entered": {"reading": "the committer named the checkpoint", "failed": "none there, or an error"},
    "reading": {"read": "all bytes verified and in place", "failed": "an error on this rank, or `abandoned`"},
    "read": {"loaded": "every rank has read", "failed": "outcome `abandoned`"},
    "loaded": {},
    "failed": {},
}


CHOICE_TRANSITIONS: Table = {
    "entered": {"chosen": "the committer named it", "failed": "an error, or `abandoned`"},
    "chosen": {},
    "failed": {},
}

_ASK = 64
"""Keys asked for at once."""
_QUOTED = 8
"""Ranks that an error or a presence message lists."""
COURTESY = 0.5
"""Seconds past the deadline that other ranks leave the committer, which knows best who is missing."""
_STAGES = {
    "claims": "enter the save",
    "told": "list its replicated tensors",
    "written": "write its part",
    "read": "read its part",
}
"""What a rank that is waited for has yet to do."""


class Put(NamedTuple):
    key: str
    message: Message


class Get(NamedTuple):
    keys: Sequence[str]


class Claim(NamedTuple):
    key: str
    message: Message


class Pause(NamedTuple):
    """Until `key` appears, at most `seconds`."""

    key: str
    seconds: float


class Do(NamedTuple):
    """Work on this rank; what it raises is raised in the protocol."""

    name: str
    action: Callable[[], Any]


class Alive(NamedTuple):
    """Is the process behind this presence message alive? True, False, or None if unseen from here."""

    message: Message


Effect = Put | Get | Claim | Pause | Do | Alive
Steps = Generator[Effect, Any, Any]


@dataclass
class Context:
    """One rank's part in one operation."""

    rank: int
    participants: tuple[int, ...]
    key: str
    title: str
    clock: Clock
    timeout: float
    stall_timeout: float
    table: Table = field(default_factory=lambda: TRANSITIONS)
    step: int | None = None
    on_phase: Callable[[str], None] = lambda phase: None
    on_wait: Callable[[Sequence[int] | None], None] = lambda ranks: None
    """Told whom this rank waits for, None when it works."""
    phase: str = "entered"
    who: str = ""
    """This rank as errors name it."""

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.timeout, self.clock)
        self.committer = min(self.participants)
        self.who = self.who or f"rank {self.rank}"
        self.meet(self.key)

    def meet(self, key: str) -> None:
        """Set the key under which the ranks of this operation meet."""
        self.key, self.outcome, self.final = key, f"{key}/outcome", f"{key}/final"

    @property
    def leads(self) -> bool:
        return self.rank == self.committer

    def enter(self, phase: str) -> None:
        """Move to a phase that the table allows."""
        if phase not in self.table[self.phase]:
            raise AssertionError(f"the protocol has no way from {self.phase!r} to {phase!r}")
        self.phase = phase
        self.on_phase(phase)

    def said(self, stage: str, rank: int) -> str:
        return f"{self.key}/{stage}/{rank}"


class SaveWork(Protocol):
    """What a save does on one rank; the simulation has its own."""

    def claims(self) -> str | None:
        """A fingerprint of what this rank holds without a declared replica, or None if nothing."""
        ...

    def tell(self) -> Message:
        """All of it, for when fingerprints differ."""
        ...

    def assign(self, told: dict[int, Message]) -> dict[int, Message]:
        """Committer: for each rank that told, which replica it is of each tensor."""
        ...

    def write(self, assigned: Message | None) -> Message:
        """Write and sync this rank's files; returns what the committer must know."""
        ...

    def prepare(self, written: dict[int, Message]) -> None:
        """Committer: read back, merge and check; raises what is wrong. Nothing is visible yet."""
        ...

    def publish(self) -> Message:
        """Committer: put the index in place, durably."""
        ...

    def is_committed(self) -> bool:
        """Does the index in storage name this rank's files?"""
        ...


class LoadWork(Protocol):
    def choose(self) -> Message:
        """Committer: which checkpoint, and which version of it."""
        ...

    def read(self, chosen: Message) -> Message: ...


def save_steps(at: Context, work: SaveWork) -> Steps:
    """One rank's save; returns the `final` message or raises the error that all ranks raise."""
    try:
        assigned = None
        yield from _refuse_late(at)
        mine = yield Do("claims", work.claims)
        if len(at.participants) > 1 or mine is not None:
            assigned = yield from _agree_on_claims(at, mine, work)
        at.enter("writing")
        message = yield Do("write", lambda: work.write(assigned))
        at.enter("written")
        if at.leads:
            written = yield from _collect(at, "written", message, at.participants)
            at.enter("committing")
            yield Do("prepare", lambda: work.prepare(written))
            yield from _claim_agreed(at)
            return (yield from _publish(at, work))
        yield Put(at.said("written", at.rank), message)
        return (yield from _await_final(at, work))
    except _Settled as settled:
        raise settled.error from None
    except CommitUnconfirmed:
        at.enter("unconfirmed")
        raise
    except RosterLost as error:
        return (yield from _without_roster(at, work, error))
    except HoldfastError as error:
        raise (yield from _abandon(at, error)) from error.__cause__


def load_steps(at: Context, work: LoadWork) -> Steps:
    """One rank's load; all ranks load the same version, and none succeeds unless all do."""
    try:
        yield from _refuse_late(at)
        if at.leads:
            chosen = yield Do("choose", work.choose)
            yield Put(f"{at.key}/chosen", chosen)
        else:
            chosen = yield from _await(at, f"{at.key}/chosen", "name the checkpoint")
        at.enter("reading")
        message = yield Do("read", lambda: work.read(chosen))
        at.enter("read")
        if at.leads:
            yield from _collect(at, "read", message, at.participants)
            yield from _claim_agreed(at)
        else:
            yield Put(at.said("read", at.rank), message)
            yield from _await(at, at.outcome, "say that every rank has read")
        at.enter("loaded")
        return message
    except HoldfastError as error:
        if isinstance(error, RosterLost):
            at.enter("failed")
            raise
        raise (yield from _abandon(at, error)) from error.__cause__


def choice_steps(at: Context, choose: Callable[[], Any]) -> Steps:
    """The committer's answer to a question, on every rank."""
    try:
        yield from _refuse_late(at)
        if at.leads:
            value = yield Do("choose", choose)
            yield Put(f"{at.key}/chosen", {"value": value})
        else:
            value = (yield from _await(at, f"{at.key}/chosen", "choose"))["value"]
        at.enter("chosen")
        return value
    except RosterLost:
        at.enter("failed")
        raise
    except HoldfastError as error:
        raise (yield from _abandon(at, error)) from error.__cause__


# -- the parts ------------------------------------------------------------------------------


def _refuse_late(at: Context) -> Steps:
    """A rank that comes after its operation was abandoned gets the same error at once."""
    outcome = (yield Get([at.outcome]))[0]
    if outcome is not None and outcome["state"] == "abandoned":
        raise from_message(outcome["error"])


def _agree_on_claims(at: Context, mine: str | None, work: SaveWork) -> Steps:
    """Which replica this rank is of what nobody declared.

    Mostly every rank holds the same names, and one round of fingerprints shows it; only where
    they differ does everyone send its list. Ranks without such tensors say so and go on.
    """
    if not at.leads:
        yield Put(at.said("claims", at.rank), {"claims": mine})
        if mine is None:
            return None
        at.enter("claims")
        assigned = yield from _await(at, f"{at.key}/assigned", "say who writes replicated tensors")
        if "tell" not in assigned:
            return assigned
        yield Put(at.said("told", at.rank), (yield Do("tell", work.tell)))
        return (yield from _await(at, f"{at.key}/assigned/{at.rank}", "say who writes replicated tensors"))
    if mine is not None:
        at.enter("claims")
    messages = yield from _collect(at, "claims", {"claims": mine}, at.participants)
    holders = [rank for rank in at.participants if messages[rank]["claims"] is not None]
    if not holders:
        return None
    if len({messages[rank]["claims"] for rank in holders}) == 1:
        yield Put(f"{at.key}/assigned", {"holders": holders})
        return {"holders": holders} if mine is not None else None
    yield Put(f"{at.key}/assigned", {"tell": True})
    own = {"none": True} if mine is None else (yield Do("tell", work.tell))
    told = yield from _collect(at, "told", own, tuple({at.rank, *holders}))
    assigned = yield Do("assign", lambda: work.assign({rank: told[rank] for rank in holders}))
    for rank, message in assigned.items():
        if rank != at.rank:
            yield Put(f"{at.key}/assigned/{rank}", message)
    return assigned.get(at.rank)


def _collect(at: Context, stage: str, mine: Message, ranks: Sequence[int]) -> Steps:
    """Committer: everybody's message for a stage, or the error that names who is missing."""
    found = {at.rank: mine}
    missing = sorted(rank for rank in ranks if rank != at.rank)
    watch = _Watch(at)
    while missing:
        at.on_wait(missing[:_QUOTED])
        yield from _raise_if_abandoned(at)
        some = missing[:_ASK]  # a bounded question, however large the world
        messages = yield Get([at.said(stage, rank) for rank in some])
        heard = {rank: message for rank, message in zip(some, messages, strict=True) if message is not None}
        found.update(heard)
        missing = [rank for rank in missing if rank not in heard]
        if len(heard) == len(some):
            continue
        if missing:
            yield from watch.look(missing, _STAGES[stage])
            yield Pause(at.said(stage, missing[0]), watch.patience())
    at.on_wait(None)
    return found


def _await(at: Context, key: str, what: str) -> Steps:
    """Another rank's: the committer's message under a key."""
    watch = _Watch(at)
    at.on_wait([at.committer])
    while True:
        found = (yield Get([key]))[0]
        if found is not None and (key != at.outcome or found["state"] == "agreed"):
            at.on_wait(None)
            return found
        yield from _raise_if_abandoned(at)
        yield from watch.look([at.committer], what)
        yield Pause(key, watch.patience())


def _await_final(at: Context, work: SaveWork) -> Steps:
    yield from _await(at, at.outcome, "commit")
    watch = _Watch(at)
    at.on_wait([at.committer])
    while True:
        final = (yield Get([at.final]))[0]
        if final is not None:
            if "error" in final:
                error = from_message(final["error"])
                if isinstance(error, CommitUnconfirmed):
                    raise error
                at.enter("failed")
                raise _Settled(error)
            at.enter("committed")
            return final
        try:
            yield from watch.look([at.committer], "put the index in place")
        except HoldfastError as error:
            if (yield Do("look", work.is_committed)):
                at.enter("committed")
                return {"state": "committed"}
            raise _unconfirmed(at, error) from None
        yield Pause(at.final, watch.patience())


def _unconfirmed(at: Context, cause: HoldfastError) -> CommitUnconfirmed:
    return CommitUnconfirmed(
        f"{at.title}: all ranks had written, but this rank could not learn whether the index was put in place ({cause.message})",
        step=at.step,
        phase=at.phase,
        rank=cause.rank,
        missing=cause.missing,
        hint="Once storage is reachable, `holdfast latest` tells; the checkpoint is whole or not there.",
    )


def _claim_agreed(at: Context) -> Steps:
    standing = yield Claim(at.outcome, {"state": "agreed", "rank": at.rank})
    if standing["state"] == "abandoned":
        raise from_message(standing["error"])


def _publish(at: Context, work: SaveWork) -> Steps:
    """After `agreed`: only the committer acts, and it tells the others how it went."""
    try:
        final = yield Do("publish", work.publish)
    except RosterLost:
        raise
    except HoldfastError as error:
        with suppress(RosterLost):  # the others will look into storage
            yield Put(at.final, {"error": error.to_message()})
        if isinstance(error, CommitUnconfirmed):
            raise
        at.enter("failed")
        raise _Settled(error) from None
    with suppress(
        RosterLost
    ):  # the index is there: that is what committed means, and the others will find it
        yield Put(at.final, final)
    at.enter("committed")
    return final


class _Settled(Exception):
    """Carries an error past `_abandon`: the outcome is decided and everybody has been told."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(error.message)
        self.error = error


def _abandon(at: Context, error: HoldfastError) -> Steps:
    """Publish the failure first, then raise: the first one to be published is everyone's."""
    if error.rank is None and not error.missing and at.phase != "committing":
        error.rank = at.rank
    if error.rank == at.rank and not error.missing and not error.phase:
        error.message = f"{at.title} failed on {at.who} in phase {at.phase!r}: {error.message}"
    error.step = at.step if error.step is None else error.step
    error.phase = error.phase or at.phase
    at.on_wait(None)
    try:
        standing = yield Claim(
            at.outcome, {"state": "abandoned", "rank": at.rank, "error": error.to_message()}
        )
    except RosterLost:
        at.enter("failed")
        return error
    if standing["state"] == "agreed":  # only after this rank had written: somebody will have committed
        at.enter("unconfirmed")
        return _unconfirmed(at, error)
    at.enter("failed")
    return error if standing["rank"] == at.rank else from_message(standing["error"])


def _without_roster(at: Context, work: SaveWork, error: RosterLost) -> Steps:
    """The message store is gone. What is in storage is all there is to know."""
    error.step, error.phase = at.step, error.phase or at.phase
    if at.phase in ("written", "committing"):
        if at.leads:  # the committer alone creates the index, and it has not
            at.enter("failed")
            raise error
        ends = at.clock.now() + min(at.deadline.left(), 5.0)
        while True:
            if (yield Do("look", work.is_committed)):
                at.enter("committed")
                return {"state": "committed"}
            if at.clock.now() >= ends:
                break
            yield Do("rest", lambda: at.clock.sleep(0.1))
        at.enter("unconfirmed")
        raise _unconfirmed(at, error)
    at.enter("failed")
    raise error


def _raise_if_abandoned(at: Context) -> Steps:
    outcome = (yield Get([at.outcome]))[0]
    if outcome is not None and outcome["state"] == "abandoned":
        raise from_message(outcome["error"])


class _Watch:
    """An eye on ranks that are waited for: gone, stalled, or out of time."""

    LOOK_EVERY = 0.25

    def __init__(self, at: Context) -> None:
        self.at = at
        self.timers: dict[int, StallTimer] = {}
        self.next_look = at.clock.now() + self.LOOK_EVERY / 2
        self.rounds = 0
        self.turn = 0

    def patience(self) -> float:
        """How long to pause before looking again: short at first, longer in a long wait."""
        self.rounds += 1
        limit = min(self.LOOK_EVERY, self.at.stall_timeout / 4)
        return max(0.001, min(0.01 * 1.3**self.rounds, limit, self.at.deadline.left() + 0.05))

    def look(self, ranks: list[int], what: str) -> Steps:
        at = self.at
        now = at.clock.now()
        if now < self.next_look and not at.deadline.passed():
            return
        self.next_look = now + min(self.LOOK_EVERY, at.stall_timeout / 4)
        if len(ranks) > 4 * _ASK:  # large worlds are looked at in turns
            self.turn = (self.turn + 4 * _ASK) % len(ranks)
            ranks = (ranks[self.turn :] + ranks[: self.turn])[: 4 * _ASK]
        messages = yield Get([at_key(rank) for rank in ranks])
        here = dict(zip(ranks, messages, strict=True))
        lost: list[RankInfo] = []
        for rank, message in here.items():
            timer = self.timers.setdefault(rank, StallTimer(at.stall_timeout, at.clock))
            if message is not None:
                if (yield Alive(message)) is False:
                    lost.append(describe(rank, message, "its process has ended"))
                    continue
                inside = message.get("operation") == at.key
                beating = message.get("beat") if inside and message.get("waiting_for") is not None else None
                timer.see((message.get("operation"), message.get("phase"), message.get("progress"), beating))
            if timer.stalled():
                quiet = f"no progress for {timer.quiet_for():.1f} s"
                lost.append(describe(rank, message, self._where(message) or quiet))
        if lost:
            raise self._failed(lost, what, RankFailed)
        if at.deadline.passed() and (at.leads or now >= at.deadline.at + COURTESY):
            waits_for = self._waits_for(here.get(at.committer)) if not at.leads else []
            if waits_for:  # the committer itself only waits: name those that it waits for
                messages = yield Get([at_key(rank) for rank in waits_for])
                here, what = dict(zip(waits_for, messages, strict=True)), f"let rank {at.committer} go on"
            out = [describe(rank, message, self._where(message)) for rank, message in here.items()]
            raise self._failed(out, what, DeadlineExceeded)

    def _waits_for(self, message: Message | None) -> list[int]:
        """Whom a rank in this very operation waits for, as it says itself."""
        if message is None or message.get("operation") != self.at.key:
            return []
        return [
            rank
            for rank in message.get("waiting_for") or ()
            if rank in self.at.participants and rank != self.at.rank
        ]

    def _where(self, message: Message | None) -> str:
        if message is None:
            return f"it never entered {self.at.title}"
        if message.get("operation") != self.at.key:
            return f"it has not entered {self.at.title}"
        return ""

    def _failed(self, infos: list[RankInfo], what: str, kind: type[RankFailed]) -> RankFailed:
        at = self.at
        shown = "; ".join(str(info) for info in infos[:_QUOTED]) + (
            f"; and {len(infos) - _QUOTED} more" if len(infos) > _QUOTED else ""
        )
        why = "the deadline passed" if kind is DeadlineExceeded else "a rank was given up"
        waited = at.deadline.elapsed()
        return kind(
            f"{at.title} failed after {waited:.1f} s, {why} while rank {at.rank} waited for "
            f"{'rank ' + str(infos[0].rank) if len(infos) == 1 else str(len(infos)) + ' ranks'} to {what}: {shown}.",
            step=at.step,
            phase=at.phase,
            rank=infos[0].rank,
            missing=tuple(infos),
            hint="Nothing was committed; what was committed before is untouched.",
        )
