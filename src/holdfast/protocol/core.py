"""How ranks agree: the save and load protocols, without any I/O.

Theory. A protocol is a generator. It yields what it wants done (`Put`, `Get`, `Claim`, `Pause`,
`Do`, `Alive`) and is sent the result, so the same lines run over a TCPStore with real files
(`protocol/runner.py`) and, thousands of times a second, in a simulation that kills, delays and reorders
(`tests.support.simulate`).

Every operation has one key, `outcome`, and one atomic operation on it, `Claim`. Whoever claims
first decides: the committer claims `agreed` after it has checked that everything is there; any
rank claims `abandoned`, with the error, when it fails, when its deadline passes, or when it sees
that another rank has died or stalled. So "agreed" and "abandoned" can't both be true, and every
rank raises the same error. A save has a second key, `final`, written by the committer alone once
the index is durable. Between `agreed` and `final` lies the only window in which a rank may be
unable to know: it looks into storage, and if the index is not there it says CommitUnconfirmed.
No rank but the committer believes a message that says `committed`: it looks for the index of this attempt
itself.

Who waits for whom: the committer (lowest participant) waits for everyone, everyone else waits
for the outcome and keeps an eye on the committer. A rank is given up when its process is gone
(seen at once on one host), when it neither works on nor beats for `stall_timeout`, or when the
deadline passes. A rank that waits for others is not stalled while it beats.

Rejected: a barrier with a counter (names nobody), leader election (a dead committer means an
abandoned save; the next one elects itself by being the lowest participant), heartbeats of all
to all (n^2), deciding by majority (a checkpoint needs every rank's bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.errors import CommitUnconfirmed, DeadlineExceeded, HoldfastError, RosterLost, from_message
from holdfast.protocol.effects import (
    Claim,
    Context,
    Do,
    Get,
    LoadWork,
    Pause,
    Put,
    SaveWork,
    Steps,
    TaskWork,
)
from holdfast.protocol.liveness import ASK, QUOTED, PeerMonitor
from holdfast.protocol.messages import Assigned, Chosen, Claims, Listed, M, from_roster, to_message
from holdfast.roster.base import Message

VISIBLE_WITHIN = 75.0
"""Seconds that a network file system may take to show another host's file: NFS keeps what it knows of a
folder for 60."""
UNDISTURBED = 0.25
"""Seconds that what ranks do together is left alone before anybody looks how it goes: mostly it is over by
then."""
_STAGES = {
    "claims": "enter the save",
    "told": "list its replicated tensors",
    "written": "write its part",
    "read": "read its part",
    "asked": "enter",
    "acted": "do its part",
}
"""What a rank that is waited for has yet to do."""


def save_steps(at: Context, work: SaveWork) -> Steps:
    """One rank's save; returns the `final` message or raises the error that all ranks raise."""
    try:
        assigned = None
        yield from _refuse_late(at)
        mine = yield Do("claims", work.claims)
        if len(at.participants) > 1 or mine is not None:
            assigned = yield from _agree_on_claims(at, mine, work)
        at.enter("writing")
        message = yield Do("write", partial(work.write, assigned))
        at.enter("written")
        if at.is_committer:
            written = yield from _collect_typed(at, "written", message, at.participants)
            at.enter("committing")
            yield Do("prepare", partial(work.prepare, written))
            yield from _claim_agreed(at)
            final = yield from _publish(at, work)
            with suppress(HoldfastError):  # the save has succeeded: an interruption changes nothing
                yield Do("tidy", work.tidy)
            return final
        yield at.say("written", message)
        return (yield from _await_final(at, work))
    except _Settled as settled:
        raise settled.error from None
    except CommitUnconfirmed:
        at.enter("unconfirmed")
        raise
    except RosterLost as error:
        return (yield from _without_roster(at, work, error))
    except HoldfastError as error:
        abandoned = yield from _abandon(at, error)
        if abandoned is None and at.phase not in ("written", "committing"):
            abandoned = _not_ours(at)
        elif abandoned is None:  # every rank had written, this one too: somebody will have committed
            at.enter("unconfirmed")
            abandoned = _unconfirmed(at, error)
        raise abandoned from error.__cause__


def load_steps(at: Context, work: LoadWork) -> Steps:
    """One rank's load; all ranks load the same version, and none succeeds unless all do."""
    try:
        yield from _refuse_late(at)
        if at.is_committer:
            chosen = yield Do("choose", work.choose)
            yield Put(f"{at.key}/chosen", to_message(chosen))
        else:
            message = yield from _await(at, f"{at.key}/chosen", "name the checkpoint")
            chosen = from_roster(message, Chosen, at.committer)
        at.enter("reading")
        message = yield Do("read", partial(work.read, chosen))
        at.enter("read")
        if at.is_committer:
            reports = yield from _collect_typed(at, "read", message, at.participants)
            yield Do("check", partial(work.check, reports))
            yield from _claim_agreed(at)
        else:
            yield at.say("read", message)
            yield from _await(at, at.outcome, "say that every rank has read")
        at.enter("loaded")
        return message
    except RosterLost:
        at.enter("failed")
        raise
    except HoldfastError as error:
        abandoned = yield from _abandon(at, error)
        if (
            abandoned is None and at.phase == "read"
        ):  # every rank has read, and this one's patience ended a moment early
            at.enter("loaded")
            return message
        raise (abandoned or _not_ours(at)) from error.__cause__


def choice_steps(at: Context, choose: Callable[[dict[int, Any]], Any], mine: Any = None) -> Steps:
    """The committer's answer, on every rank, once every rank has said its part of the question."""
    asked = False
    try:
        yield from _refuse_late(at)
        if at.is_committer:
            heard = yield from _collect(at, "asked", {"mine": mine}, at.participants)
            said = {rank: message["mine"] for rank, message in heard.items()}
            value = yield Do("choose", partial(choose, said))
            yield from _claim_agreed(at, value=value)
        else:
            yield at.say("asked", {"mine": mine})
            asked = True
            value = (yield from _await(at, at.outcome, "choose"))["value"]
        at.enter("chosen")
        return value
    except RosterLost:
        at.enter("failed")
        raise
    except HoldfastError as error:
        abandoned = yield from _abandon(at, error)
        if abandoned is None and asked:
            at.enter("chosen")
            return at.settled["value"]  # type: ignore[index]
        raise (abandoned or _not_ours(at)) from error.__cause__


def task_steps(at: Context, work: TaskWork) -> Steps:
    """Everybody says what it has, the committer answers each, everybody acts; none has succeeded unless all
    have.

    What a rank does may block for ever, so it goes on beside this, and whoever waits keeps an eye on the
    others.
    """
    try:
        yield from _refuse_late(at)
        mine = yield Do("mine", work.contribute)
        if at.is_committer:
            asked = yield from _collect(at, "asked", mine, at.participants)
            answers = yield Do("choose", partial(work.decide, asked))
            for rank in at.participants:
                if rank != at.rank:
                    yield at.tell("answer", rank, answers[rank])
            answer = answers[at.rank]
        else:
            yield at.say("asked", mine)
            at.own.add(at.said("answer", at.rank))
            answer = yield from _await(at, at.said("answer", at.rank), "answer")
        at.enter("acting")
        yield Do("begin", partial(work.begin, answer))
        yield Do("rest", partial(work.wait, min(UNDISTURBED, at.deadline.left())))
        if at.is_committer:
            reports = yield from _collect(at, "acted", {}, at.participants, work.poll)
            reports[at.rank] = yield from _act(at, work)
            at.enter("acted")
            value = yield Do("finish", partial(work.finish, reports))
            yield from _claim_agreed(at, value=value)
        else:
            report = yield from _act(at, work)
            at.enter("acted")
            yield at.say("acted", report)
            value = (yield from _await(at, at.outcome, "say that every rank has done its part"))["value"]
        at.enter("done")
        return value
    except RosterLost:
        at.enter("failed")
        raise
    except HoldfastError as error:
        better = yield Do("explain", partial(work.explain, error))
        abandoned = yield from _abandon(at, better)
        if abandoned is None and at.phase == "acted":  # all ranks had done their part
            at.enter("done")
            return at.settled["value"]  # type: ignore[index]
        raise (abandoned or _not_ours(at)) from error.__cause__


# -- the parts ------------------------------------------------------------------------------


def _refuse_late(at: Context) -> Steps:
    """A rank that comes after its operation was abandoned gets the same error at once."""
    outcome = (yield Get([at.outcome]))[0]
    if outcome is not None:
        at.settled = outcome
        raise _not_ours(at) if outcome["state"] == "agreed" else from_message(outcome["error"])


def _not_ours(at: Context) -> HoldfastError:
    """An outcome that can't be: no rank can agree before this one has done its part."""
    if at.phase != "failed":
        at.enter("failed")
    return HoldfastError(
        f"{at.title}: the message store says that all ranks agreed, but rank {at.rank} had not done its part "
        f"yet. Nothing that it says of "
        "this call can be believed.",
        step=at.step,
        rank=at.rank,
        hint="Something else writes into the message store of this job, or ranks were restarted one by one; "
        "see docs/security.md.",
    )


def _agree_on_claims(at: Context, mine: str | None, work: SaveWork) -> Steps:
    """Which replica this rank is of what nobody declared.

    Mostly every rank holds the same names, and one round of fingerprints shows it; only where
    they differ does everyone send its list. Ranks without such tensors say so and go on.
    """
    if not at.is_committer:
        yield at.say("claims", Claims(mine))
        if mine is None:
            return None
        at.enter("claims")
        message = yield from _await(at, f"{at.key}/assigned", "say who writes replicated tensors")
        assigned = from_roster(message, Assigned, at.committer)
        if not assigned.lists_wanted:
            return assigned
        yield at.say("told", (yield Do("tell", work.tell)))
        at.own.add(at.said("assigned", at.rank))
        message = yield from _await(at, at.said("assigned", at.rank), "say who writes replicated tensors")
        return from_roster(message, Assigned, at.committer)
    if mine is not None:
        at.enter("claims")
    messages = yield from _collect_typed(at, "claims", Claims(mine), at.participants)
    holders = [rank for rank in at.participants if messages[rank].claims is not None]
    if not holders:
        return None
    if len({messages[rank].claims for rank in holders}) == 1:
        yield Put(f"{at.key}/assigned", to_message(Assigned(holders)))
        return Assigned(holders) if mine is not None else None
    yield Put(f"{at.key}/assigned", to_message(Assigned(lists_wanted=True)))
    own = Listed([], []) if mine is None else (yield Do("tell", work.tell))
    told = yield from _collect_typed(at, "told", own, tuple({at.rank, *holders}))
    assigned = yield Do("assign", partial(work.assign, {rank: told[rank] for rank in holders}))
    for rank, message in assigned.items():
        if rank != at.rank:
            yield at.tell("assigned", rank, message)
    return assigned.get(at.rank)


def _act(at: Context, work: TaskWork) -> Steps:
    """Until this rank has done its part."""
    watch = PeerMonitor(at)
    at.on_wait([])  # what it does may wait for any of the others
    while True:
        report = yield Do("poll", work.poll)
        if report is not None:
            at.on_wait(None)
            return report
        yield from _raise_if_abandoned(at)
        if not at.is_committer:
            yield from watch.look([at.committer], "do its part")
        elif at.deadline.passed():
            raise DeadlineExceeded(
                f"{at.who} did not do its part in {at.deadline.seconds:g} s.", rank=at.rank
            )
        yield Do("rest", partial(work.wait, watch.patience()))


def _collect(
    at: Context, stage: str, mine: Message, ranks: Sequence[int], poll: Callable[[], Any] = lambda: None
) -> Steps:
    """Committer: everybody's message for a stage, or the error that names who is missing.

    `poll` raises what this rank itself has met meanwhile.
    """
    found = {at.rank: mine}
    missing = sorted(rank for rank in ranks if rank != at.rank)
    if not missing:
        return found
    watch = PeerMonitor(at)
    while missing:
        at.on_wait(missing[:QUOTED])
        yield from _raise_if_abandoned(at)
        yield Do("poll", poll)
        some = missing[:ASK]  # a bounded question, however large the world
        messages = yield Get([at.said(stage, rank) for rank in some])
        heard = {rank: message for rank, message in zip(some, messages, strict=True) if message is not None}
        for message in heard.values():
            at.hear(message)
        found.update(heard)
        missing = [rank for rank in missing if rank not in heard]
        if len(heard) == len(some):
            continue
        if missing:
            yield from watch.look(missing, _STAGES[stage])
            yield Pause(at.said(stage, missing[0]), watch.patience())
    at.on_wait(None)
    return found


def _collect_typed(at: Context, stage: str, mine: M, ranks: Sequence[int]) -> Steps:
    """`_collect`, of messages that are all of the type of this rank's own."""
    raw = yield from _collect(at, stage, {}, ranks)
    return {rank: mine if rank == at.rank else from_roster(raw[rank], type(mine), rank) for rank in raw}


def _await(at: Context, key: str, what: str) -> Steps:
    """Another rank's: the committer's message under a key."""
    watch = PeerMonitor(at)
    at.on_wait([at.committer])
    while True:
        found = (yield Get([key]))[0]
        if found is not None and (key != at.outcome or found["state"] == "agreed"):
            if key == at.outcome:
                at.settled = found
            at.on_wait(None)
            return found
        yield from _raise_if_abandoned(at)
        yield from watch.look([at.committer], what)
        yield Pause(key, watch.patience())


def _await_final(at: Context, work: SaveWork) -> Steps:
    yield from _await(at, at.outcome, "commit")
    watch = PeerMonitor(at)
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
            at.on_wait(None)
            yield from _look(at, work, VISIBLE_WITHIN, f"rank {at.committer} says that it is committed")
            return final
        try:
            yield from watch.look([at.committer], "put the index in place")
        except HoldfastError as error:
            yield from _look(at, work, 0.0, error)
            return {"state": "committed"}
        yield Pause(at.final, watch.patience())


def _look(at: Context, work: SaveWork, seconds: float, cause: HoldfastError | str) -> Steps:
    """Until the index of this attempt is seen in storage. Raises CommitUnconfirmed if it is not within so
    many seconds, or the deadline."""
    ends = at.clock.now() + min(at.deadline.left(), seconds)
    pause = 0.01
    while not (yield Do("look", work.is_committed)):
        if at.clock.now() >= ends:
            if isinstance(cause, str):
                cause = HoldfastError(
                    f"{cause}, but its index is not to be seen from here", rank=at.committer
                )
            raise _unconfirmed(at, cause) from None
        yield Do("rest", partial(at.clock.sleep, pause))
        pause = min(2 * pause, 1.0)
    at.enter("committed")


def _unconfirmed(at: Context, cause: HoldfastError) -> CommitUnconfirmed:
    return CommitUnconfirmed(
        f"{at.title}: all ranks had written, but this rank could not learn whether the index was put in "
        f"place ({cause.message})",
        step=at.step,
        phase=at.phase,
        rank=cause.rank,
        missing=cause.missing,
        hint="Once storage is reachable, `holdfast latest` tells; the checkpoint is whole or not there.",
    )


def _claim_agreed(at: Context, **more: Any) -> Steps:
    standing = yield Claim(at.outcome, at.agreed(**more))
    at.settled = standing
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
    for _ in range(2):
        try:
            yield Put(at.final, final)
            break
        except RosterLost:
            break  # the index is there: that is what committed means, and the others will find it
        except HoldfastError:
            continue  # this rank was interrupted; the others must hear of the commit all the same
    at.enter("committed")
    return final


class _Settled(Exception):
    """Carries an error past `_abandon`: the outcome is decided and everybody has been told."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(error.message)
        self.error = error


def _abandon(at: Context, error: HoldfastError) -> Steps:
    """Publish the failure first, then raise: the first one to be published is everyone's.

    Returns the error to raise, or None where all ranks had agreed before.
    """
    judging = at.is_committer and at.phase in ("claims", "committing", "read")  # of what others said
    if error.rank is None and not error.missing and not judging:
        error.rank = at.rank
    if error.rank == at.rank and not error.missing and not error.phase:
        error.message = f"{at.title} failed on {at.who} in phase {at.phase!r}: {error.message}"
    error.step = at.step if error.step is None else error.step
    error.phase = error.phase or at.phase
    at.on_wait(None)
    try:
        standing = yield Claim(
            at.outcome,
            {"state": "abandoned", "rank": at.rank, "error": error.to_message()},
        )
    except RosterLost:
        if at.phase == "written" and not at.is_committer:  # the others may commit what this rank has written
            at.enter("unconfirmed")
            return _unconfirmed(at, error)
        at.enter("failed")
        return error
    at.settled = standing
    if standing["state"] == "agreed":
        return None
    at.enter("failed")
    return error if standing["rank"] == at.rank else from_message(standing["error"])


def _without_roster(at: Context, work: SaveWork, error: RosterLost) -> Steps:
    """The message store is gone. What is in storage is all there is to know."""
    error.step, error.phase = at.step, error.phase or at.phase
    if at.phase in ("written", "committing"):
        if at.is_committer:  # the committer alone creates the index, and it has not
            at.enter("failed")
            raise error
        try:
            yield from _look(at, work, 5.0, error)
        except CommitUnconfirmed:
            at.enter("unconfirmed")
            raise
        return {"state": "committed"}
    at.enter("failed")
    raise error


def _raise_if_abandoned(at: Context) -> Steps:
    outcome = (yield Get([at.outcome]))[0]
    if outcome is not None and outcome["state"] == "abandoned":
        at.settled = outcome
        raise from_message(outcome["error"])
