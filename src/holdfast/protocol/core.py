"""How ranks agree: the save and load protocols, without any I/O.

A protocol is a generator. It yields effects (`Put`, `Get`, `Claim`, `Pause`, `Do`, `Alive`) and is sent their
results, so the same code runs over a TCPStore with real files (`protocol/runner.py`) and, thousands of times
per second, in a simulation that kills ranks and delays and reorders messages (`tests.support.simulate`).

Every operation has one key, `outcome`, and one atomic operation on it, `Claim`. The first rank that claims it
decides: the committer claims `agreed` after it has checked that everything is there; any rank claims
`abandoned`, with the error, when it fails, when its deadline passes, or when it sees that another rank has
died or stalled. So "agreed" and "abandoned" can't both be true, and every rank raises the same error. A save
has a second key, `final`, which the committer alone writes, after the index is durable. Only between `agreed`
and `final` may a rank be unable to know the result: it looks into storage, and raises CommitUnconfirmed if
the index is not there. Ranks other than the committer do not trust a message that says `committed`: each
looks for the index of this attempt itself.

Who waits for whom: the committer (lowest participant) waits for all ranks; every other rank waits for the
outcome and monitors the committer. A rank is given up when its process is gone (seen at once on one host),
when it makes no progress for `stall_timeout`, or when the deadline passes. A heartbeat counts as progress
only for a rank that waits for others.

Rejected: a barrier with a counter (it can't name who is missing), leader election (if the committer is dead
the save is abandoned; the lowest participant of the next save is its committer), heartbeats from all to all
(n^2), majority decisions (a checkpoint needs every rank's bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from holdfast.errors import CommitUnconfirmed, DeadlineExceeded, HoldfastError, RosterLost, from_message
from holdfast.protocol.effects import (
    Claim,
    Context,
    Do,
    Get,
    LoadActions,
    Pause,
    Put,
    SaveActions,
    Steps,
    TaskActions,
)
from holdfast.protocol.liveness import ASK, QUOTED, PeerMonitor
from holdfast.protocol.messages import (
    Assigned,
    Before,
    Chosen,
    Final,
    M,
    Outcome,
    RowDigest,
    RowList,
    Said,
    abandoned_by,
    from_roster,
    to_message,
)
from holdfast.store.base import VISIBLE_WITHIN
from holdfast.values import Json, Message

UNDISTURBED = 0.25
"""Seconds before ranks look how a collective task goes: mostly it is over by then."""
_DUTIES = {
    "row_digest": "enter the save",
    "rows": "list its replicated tensors",
    "written": "write its part",
    "read": "read its part",
    "asked": "enter",
    "acted": "do its part",
}
"""By topic, what a rank that is waited for has not done yet; for errors."""


def save_steps(context: Context, job: SaveActions) -> Steps:
    """Run the save of one rank. Returns the `final` message, or raises the error that all ranks raise."""
    try:
        assigned = None  # declared replicas need no answer: every rank knows its own
        yield from _refuse_late(context)
        yield Do("enter", job.enter)
        mine = yield Do("row_digest", job.row_digest)
        # A rank without undeclared rows reports that, because the committer can't know who has none.
        if len(context.participants) > 1 or mine is not None:
            assigned = yield from _agree_on_replicas(context, mine, job)
        context.enter("writing")
        message = yield Do("write", partial(job.write, assigned))
        # From here on the others may commit what this rank has written, even if this rank fails.
        context.enter("written")
        if context.is_committer:
            written = yield from _collect_typed(context, "written", message, context.participants)
            context.enter("committing")
            yield Do("prepare", partial(job.prepare, written))
            # The point of no return: nothing can abandon the save after this claim, and only this rank acts.
            yield from _claim_agreed(context)
            final = yield from _publish(context, job)
            with suppress(HoldfastError):  # the save has succeeded: an interruption changes nothing
                yield Do("tidy", job.tidy)
            return final
        yield context.report("written", message)
        return (yield from _await_final(context, job))
    except _Decided as decided:
        raise decided.error from None
    except CommitUnconfirmed:
        context.enter("unconfirmed")
        raise
    except RosterLost as error:
        return (yield from _without_roster(context, job, error))
    except HoldfastError as error:
        abandoned = yield from _abandon(context, error)
        if abandoned is None and context.phase not in ("written", "committing"):
            abandoned = _not_ours(context)
        # The outcome is `agreed`. On another rank: the committer may have committed. On the committer: its
        # claim was interrupted after it took effect, and nothing was published.
        elif abandoned is None:
            context.enter("unconfirmed")
            abandoned = _unconfirmed(context, error)
        raise abandoned from error.__cause__


def load_steps(context: Context, job: LoadActions) -> Steps:
    """Run the load of one rank. All ranks load the same version, and it succeeds on all ranks or on none."""
    try:
        yield from _refuse_late(context)
        if context.is_committer:
            chosen = yield Do("choose", job.choose)
            # Not part of the outcome: the others must know the version before they can read.
            yield Put(f"{context.key}/chosen", to_message(chosen))
        else:
            message = yield from _await(context, f"{context.key}/chosen", "name the checkpoint")
            chosen = from_roster(message, Chosen, context.committer)
        context.enter("reading")
        message = yield Do("read", partial(job.read, chosen))
        context.enter("read")
        if context.is_committer:
            reports = yield from _collect_typed(context, "read", message, context.participants)
            yield Do("check", partial(job.check, reports))
            yield from _claim_agreed(context)
        else:
            yield context.report("read", message)
            yield from _await_agreed(context, "say that every rank has read")
        context.enter("loaded")
        return message
    except RosterLost:
        context.enter("failed")
        raise
    except HoldfastError as error:
        abandoned = yield from _abandon(context, error)
        # Every rank had read, including this one; its deadline passed just before it saw the outcome.
        if abandoned is None and context.phase == "read":
            context.enter("loaded")
            return message
        raise (abandoned or _not_ours(context)) from error.__cause__


def choice_steps(context: Context, choose: Callable[[dict[int, Json]], Json], mine: Json = None) -> Steps:
    """Return the committer's answer on every rank, after every rank has sent its value."""
    asked = False
    try:
        yield from _refuse_late(context)
        if context.is_committer:
            heard = yield from _collect_typed(context, "asked", Said(mine), context.participants)
            values = {rank: message.value for rank, message in heard.items()}
            value = yield Do("choose", partial(choose, values))
            yield from _claim_agreed(context, value)
        else:
            yield context.report("asked", Said(mine))
            asked = True  # only now can the others agree without this rank
            value = (yield from _await_agreed(context, "choose")).value
        context.enter("chosen")
        return value
    except RosterLost:
        context.enter("failed")
        raise
    except HoldfastError as error:
        abandoned = yield from _abandon(context, error)
        if abandoned is None and asked:
            context.enter("chosen")
            assert context.known_outcome is not None
            return context.known_outcome.value
        raise (abandoned or _not_ours(context)) from error.__cause__


def task_steps(context: Context, job: TaskActions) -> Steps:
    """Run a collective task on one rank: all contribute, the committer answers each, all act. It succeeds on
    all ranks or on none.

    The work of a rank may block for ever, so it runs on another thread, and a rank that waits monitors the
    others.
    """
    try:
        yield from _refuse_late(context)
        mine = yield Do("contribute", job.contribute)
        if context.is_committer:
            asked = yield from _collect(context, "asked", mine, context.participants)
            answers = yield Do("choose", partial(job.decide, asked))
            # One message a rank, because answers differ (a rank's groups, its part of a table).
            for rank in context.participants:
                if rank != context.rank:
                    yield context.answer("answer", rank, answers[rank])
            answer = answers[context.rank]
        else:
            yield context.report("asked", mine)
            context.own.add(context.key_of("answer", context.rank))
            answer = yield from _await(context, context.key_of("answer", context.rank), "answer")
        context.enter("acting")
        yield Do("begin", partial(job.begin, answer))
        # Messages take CPU time from the threads that act, so look only if this takes longer than usual.
        yield Do("rest", partial(job.wait, min(UNDISTURBED, context.deadline.left())))
        if context.is_committer:
            # This rank's own part runs meanwhile on its thread; `poll` raises the error if it fails.
            reports = yield from _collect(context, "acted", {}, context.participants, job.poll)
            reports[context.rank] = yield from _act(context, job)
            context.enter("acted")
            value = yield Do("finish", partial(job.finish, reports))
            yield from _claim_agreed(context, value)
        else:
            report = yield from _act(context, job)
            context.enter("acted")
            yield context.report("acted", report)
            value = (yield from _await_agreed(context, "say that every rank has done its part")).value
        context.enter("done")
        return value
    except RosterLost:
        context.enter("failed")
        raise
    except HoldfastError as error:
        better = yield Do("explain", partial(job.explain, error))
        abandoned = yield from _abandon(context, better)
        if abandoned is None and context.phase == "acted":  # all ranks had done their part
            context.enter("done")
            assert context.known_outcome is not None
            return context.known_outcome.value
        raise (abandoned or _not_ours(context)) from error.__cause__


# -- the parts ------------------------------------------------------------------------------


def _refuse_late(context: Context) -> Steps:
    """Raise the error of the call if it was abandoned before this rank came."""
    context.known_outcome = yield from _raise_if_abandoned(context)
    if context.known_outcome is not None:
        raise _not_ours(context)


def _not_ours(context: Context) -> HoldfastError:
    """End in phase `failed`, and return the error: the store says `agreed`, but this rank has not reported,
    so the store can't be trusted."""
    if context.phase != "failed":
        context.enter("failed")
    return HoldfastError(
        f"{context.title}: the message store says that all ranks agreed, but rank {context.rank} had not "
        "done its part yet. Nothing that it says of this call can be believed.",
        step=context.step,
        rank=context.rank,
        hint="Something else writes into the message store of this job, or ranks were restarted one by one; "
        "see docs/security.md.",
    )


def _agree_on_replicas(context: Context, mine: str | None, job: SaveActions) -> Steps:
    """Return which replica this rank holds of each row whose replica nobody declared.

    Mostly every rank holds the same names, and one round of digests shows it. Only where they differ
    does every rank send its list. Ranks without such rows report that and go on.
    """
    if not context.is_committer:
        yield context.report("row_digest", RowDigest(mine))
        if mine is None:
            return None
        context.enter("assigning")
        message = yield from _await(context, f"{context.key}/assigned", "say who writes replicated tensors")
        assigned = from_roster(message, Assigned, context.committer)
        if not assigned.lists_wanted:
            return assigned
        yield context.report("rows", (yield Do("list_rows", job.list_rows)))
        context.own.add(context.key_of("assigned", context.rank))
        message = yield from _await(
            context, context.key_of("assigned", context.rank), "say who writes replicated tensors"
        )
        return from_roster(message, Assigned, context.committer)
    if mine is not None:
        context.enter("assigning")
    messages = yield from _collect_typed(context, "row_digest", RowDigest(mine), context.participants)
    holders = [rank for rank in context.participants if messages[rank].digest is not None]
    if not holders:
        return None
    # The usual case: one digest per rank, however many tensors it has. Lists are longer, so they come second.
    if len({messages[rank].digest for rank in holders}) == 1:
        yield Put(f"{context.key}/assigned", to_message(Assigned(holders)))
        return Assigned(holders) if mine is not None else None
    yield Put(f"{context.key}/assigned", to_message(Assigned(lists_wanted=True)))
    # `_collect` always counts this rank in. `assign` gets the lists of the holders only.
    own = RowList([], []) if mine is None else (yield Do("list_rows", job.list_rows))
    lists = yield from _collect_typed(context, "rows", own, tuple({context.rank, *holders}))
    assigned = yield Do("assign", partial(job.assign, {rank: lists[rank] for rank in holders}))
    for rank, message in assigned.items():
        if rank != context.rank:
            yield context.answer("assigned", rank, message)
    return assigned.get(context.rank)


def _act(context: Context, job: TaskActions) -> Steps:
    """Wait until this rank has done its part; return its report."""
    watch = PeerMonitor(context)
    context.on_wait([])  # its work may wait for any of the others
    while True:
        report = yield Do("poll", job.poll)
        if report is not None:
            context.on_wait(None)
            return report
        yield from _raise_if_abandoned(context)
        # The committer comes here after all others have acted (`_collect`), so it waits only for itself.
        if not context.is_committer:
            yield from watch.look([context.committer], "do its part")
        elif context.deadline.passed():
            raise DeadlineExceeded(
                f"{context.who} did not do its part in {context.deadline.seconds:g} s.", rank=context.rank
            )
        yield Do("rest", partial(job.wait, watch.patience()))


def _collect(
    context: Context,
    topic: str,
    mine: Message,
    ranks: Sequence[int],
    poll: Callable[[], object] = lambda: None,
) -> Steps:
    """Committer: return the message of every rank on a topic, or raise an error that names the missing ranks.

    `poll` raises errors of this rank's own work meanwhile.
    """
    reports = {context.rank: mine}
    missing = sorted(rank for rank in ranks if rank != context.rank)
    if not missing:
        return reports
    watch = PeerMonitor(context)
    while missing:
        context.on_wait(missing[:QUOTED])
        yield from _raise_if_abandoned(context)
        yield Do("poll", poll)
        # Ranks that have reported are not asked again: one read per rank, not one per rank and look.
        some = missing[:ASK]  # a bounded request, however large the world
        messages = yield Get([context.key_of(topic, rank) for rank in some])
        heard = {rank: message for rank, message in zip(some, messages, strict=True) if message is not None}
        for rank, message in heard.items():
            context.note_abandoned(from_roster(message, Before, rank).abandoned)
        reports.update(heard)
        missing = [rank for rank in missing if rank not in heard]
        if len(heard) == len(some):
            continue  # all of these were there, so the next ones may be there as well: no pause
        if missing:
            yield from watch.look(missing, _DUTIES[topic])
            yield Pause(context.key_of(topic, missing[0]), watch.patience())
    context.on_wait(None)
    return reports


def _collect_typed(context: Context, topic: str, mine: M, ranks: Sequence[int]) -> Steps:
    """Call `_collect` and check that all messages have the type of this rank's own."""
    raw = yield from _collect(context, topic, {}, ranks)
    return {rank: mine if rank == context.rank else from_roster(raw[rank], type(mine), rank) for rank in raw}


def _await(context: Context, key: str, what: str) -> Steps:
    """Return the message that the committer puts under a key."""
    watch = PeerMonitor(context)
    context.on_wait([context.committer])
    while True:
        message = (yield Get([key]))[0]
        if message is not None:
            context.on_wait(None)
            return message
        yield from _raise_if_abandoned(context)
        yield from watch.look([context.committer], what)
        yield Pause(key, watch.patience())


def _await_agreed(context: Context, what: str) -> Steps:
    """Return the outcome after the committer has agreed."""
    watch = PeerMonitor(context)
    context.on_wait([context.committer])
    while True:
        outcome = yield from _raise_if_abandoned(context)
        if outcome is not None:
            context.known_outcome = outcome
            context.on_wait(None)
            return outcome
        yield from watch.look([context.committer], what)
        yield Pause(context.outcome_key, watch.patience())


def _await_final(context: Context, job: SaveActions) -> Steps:
    yield from _await_agreed(context, "commit")
    watch = PeerMonitor(context)
    context.on_wait([context.committer])
    while True:
        message = (yield Get([context.final_key]))[0]
        if message is not None:
            final = from_roster(message, Final, context.committer)
            if final.error is not None:
                error = from_message(final.error)
                if isinstance(error, CommitUnconfirmed):
                    raise error
                context.enter("failed")
                raise _Decided(error)
            context.on_wait(None)
            yield from _look(
                context, job, VISIBLE_WITHIN, f"rank {context.committer} says that it is committed"
            )
            return final
        try:
            yield from watch.look([context.committer], "put the index in place")
        except HoldfastError as error:
            # The committer is gone, or the deadline has passed. After `agreed` only storage can tell.
            yield from _look(context, job, 0.0, error)
            return Final()
        yield Pause(context.final_key, watch.patience())


def _look(context: Context, job: SaveActions, seconds: float, cause: HoldfastError | str) -> Steps:
    """Wait until the index of this attempt is in storage. Raises CommitUnconfirmed if it is not seen within
    `seconds` or by the deadline."""
    ends = context.clock.now() + min(context.deadline.left(), seconds)
    pause = 0.01
    while not (yield Do("look", job.is_committed)):
        if context.clock.now() >= ends:
            if isinstance(cause, str):
                cause = HoldfastError(
                    f"{cause}, but its index is not to be seen from here", rank=context.committer
                )
            raise _unconfirmed(context, cause) from None
        # A network file system may show another host's file late; looking more often does not help.
        yield Do("rest", partial(context.clock.sleep, pause))
        pause = min(2 * pause, 1.0)
    context.enter("committed")


def _unconfirmed(context: Context, cause: HoldfastError) -> CommitUnconfirmed:
    return CommitUnconfirmed(
        f"{context.title}: all ranks had written, but this rank could not learn whether the index was put in "
        f"place ({cause.message})",
        step=context.step,
        phase=context.phase,
        rank=cause.rank,
        missing=cause.missing,
        hint="Once storage is reachable, `holdfast latest` tells; the checkpoint is whole or not there.",
    )


def _claim_agreed(context: Context, value: object = None) -> Steps:
    agreed = Outcome("agreed", context.rank, abandoned=context.abandoned, value=value)
    standing = from_roster((yield Claim(context.outcome_key, to_message(agreed))), Outcome)
    context.known_outcome = standing
    # Another rank has abandoned the call first, so nothing may be put in place.
    if standing.state == "abandoned":
        raise from_message(standing.error)


def _publish(context: Context, job: SaveActions) -> Steps:
    """Put the index in place after `agreed`, and tell the others how it ended."""
    try:
        final = yield Do("publish", job.publish)
    except RosterLost:
        raise
    except HoldfastError as error:
        yield from _tell_final(context, Final(error=error.to_message()))
        if isinstance(error, CommitUnconfirmed):
            raise
        context.enter("failed")
        raise _Decided(error) from None
    yield from _tell_final(context, final)
    context.enter("committed")
    return final


def _tell_final(context: Context, final: Final) -> Steps:
    """Tell the others how it ended. If the message store is lost, they look into storage."""
    for _ in range(2):  # a Ctrl-C may be thrown in here, once
        try:
            yield Put(context.final_key, to_message(final))
            return
        except RosterLost:
            return
        except HoldfastError:
            continue  # this rank was interrupted; the others must be told all the same


class _Decided(Exception):
    """Carries an error past `_abandon`: the outcome is decided and the other ranks have been told."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(error.message)
        self.error = error


def _abandon(context: Context, error: HoldfastError) -> Steps:
    """Claim `abandoned` with this error. The first error that is claimed is the error of all ranks.

    Returns the error to raise, or None if all ranks had agreed before.
    """
    # In these phases the committer checks reports of others, so the fault need not be its own.
    judging = context.is_committer and context.phase in ("assigning", "committing", "read")
    if error.rank is None and not error.missing and not judging:
        error.rank = context.rank
    if error.rank == context.rank and not error.missing and not error.phase:
        error.message = f"{context.title} failed on {context.who} in phase {context.phase!r}: {error.message}"
    error.step = context.step if error.step is None else error.step
    error.phase = error.phase or context.phase
    context.on_wait(None)
    try:
        # All fields are set before the claim, because all ranks raise the error that is claimed.
        message = yield Claim(context.outcome_key, abandoned_by(context.rank, error))
    except RosterLost:
        if context.phase == "written" and not context.is_committer:  # the others may commit its files
            context.enter("unconfirmed")
            return _unconfirmed(context, error)
        context.enter("failed")
        return error
    standing = from_roster(message, Outcome)
    context.known_outcome = standing
    if standing.state == "agreed":
        return None
    context.enter("failed")
    return error if standing.rank == context.rank else from_message(standing.error)


def _without_roster(context: Context, job: SaveActions, error: RosterLost) -> Steps:
    """End a save whose message store is lost. Only storage can tell whether it was committed."""
    error.step, error.phase = context.step, error.phase or context.phase
    if context.phase in ("written", "committing"):
        if context.is_committer:  # the committer alone creates the index, and it has not
            context.enter("failed")
            raise error
        try:
            yield from _look(context, job, 5.0, error)
        except CommitUnconfirmed:
            context.enter("unconfirmed")
            raise
        return Final()
    context.enter("failed")
    raise error


def _raise_if_abandoned(context: Context) -> Steps:
    """Return the outcome if the ranks have agreed, None if there is none yet. Raises if it is `abandoned`."""
    message = (yield Get([context.outcome_key]))[0]
    if message is None:
        return None
    outcome = from_roster(message, Outcome)
    if outcome.state == "abandoned":
        context.known_outcome = outcome
        raise from_message(outcome.error)
    return outcome
