"""The agreement protocol of a call, without any I/O.

A call consists of rounds. In a round every rank sends a report, the committer decides, and all ranks act on
its answer; the decision of the last round is the outcome of the call. `_call` drives every call on one rank,
and ends it. The rounds of a save, a load, a choice and a task follow it; after its rounds, a save has a
commit.

A protocol is a generator. It yields effects (`Put`, `Get`, `Claim`, `Pause`, `Do`, `Look`) and is sent their
results, so the same code runs over a TCPStore with real files (`protocol/runner.py`) and, thousands of times
per second, in a simulation that kills ranks and delays and reorders messages (`tests.support.simulate`).

Every operation has one key, `outcome`, and one atomic operation on it, `Claim`. The first rank that claims it
decides: the committer claims `agreed` after it has checked that everything is there; any rank claims
`abandoned`, with the error, when it fails, when its deadline passes, or when it sees that another rank has
died or stalled. So "agreed" and "abandoned" can't both be true, and every rank raises the same error. A save
has a second key, `final`, which the committer alone writes, after the index is durable. Only between `agreed`
and `final` may a rank be unable to know the result: it looks into storage, and raises CommitUnconfirmed if
the index is not there. Ranks other than the committer do not trust a message that says `committed`: each
checks for the index of this attempt itself. (If its own files are gone as well, it accepts the message: a
rank that has returned from the save may have moved the checkpoint.)

Who waits for whom: the committer (lowest participant) waits for all ranks; every other rank waits for the
outcome and monitors the committer. `liveness` defines what ends a wait: a rank whose process is alive is
waited for until the deadline, even if it is silent.

Rejected: a barrier with a counter (it can't name who is missing), leader election (if the committer is dead
the save is abandoned; the lowest participant of the next save is its committer), heartbeats from all to all
(n^2), majority decisions (a checkpoint needs every rank's bytes).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from holdfast._core.base.values import Json
from holdfast._core.protocol.effects import (
    Context,
    Do,
    Get,
    LoadActions,
    Put,
    SaveActions,
    Steps,
    TaskActions,
    abandon,
)
from holdfast._core.protocol.messages import (
    Chosen,
    Final,
    Outcome,
    Said,
    abandoned_by,
    from_roster,
    to_message,
)
from holdfast._core.protocol.rounds import act, agree, agree_on_replicas, collect, learn, own_answer, wait_for
from holdfast._core.roster.base import is_foreign
from holdfast._core.roster.lost import Seen, describe, ended_since
from holdfast._core.store.base import VISIBLE_WITHIN
from holdfast.errors import CommitUnconfirmed, HoldfastError, RankFailed, RosterLost, from_message

UNDISTURBED = 0.25
"""Seconds before ranks begin to poll the state of a collective task; it has usually finished by then."""


def save_steps(context: Context, job: SaveActions) -> Steps:
    """Run the save of one rank."""

    def rounds() -> Steps:
        yield Do("enter", job.enter)
        assigned = yield from agree_on_replicas(context, job)  # declared replicas need no answer
        context.enter("writing")
        written = yield Do("write", partial(job.write, assigned))
        # From here on, the committer may commit this rank's files even if this rank fails.
        context.enter("written")
        yield from agree(context, "written", written, job.prepare)

    return _call(context, rounds(), "committed", job)


def load_steps(context: Context, job: LoadActions) -> Steps:
    """Run the load of one rank. All ranks load the same version, and it succeeds on all ranks or on none."""

    def rounds() -> Steps:
        # No rank sends a report for the choice of a version, so the committer does not wait.
        if context.is_committer:
            chosen = yield Do("choose", job.choose)
            yield Put(context.answer_key, to_message(chosen))
        else:
            chosen = yield from wait_for(context, context.answer_key, "name the checkpoint", Chosen)
        context.enter("reading")
        read = yield Do("read", partial(job.read, chosen))
        context.enter("read")
        return (yield from agree(context, "read", read, job.check))

    return _call(context, rounds(), "loaded")


def choice_steps(context: Context, choose: Callable[[dict[int, Json]], Json], mine: Json = None) -> Steps:
    """Every rank sends a value; return the committer's choice on every rank."""

    def decide(heard: dict[int, Said]) -> Json:
        return choose({rank: said.value for rank, said in heard.items()})

    return _call(context, agree(context, "asked", Said(mine), decide), "chosen")


def task_steps(context: Context, job: TaskActions) -> Steps:
    """Run a collective task on one rank. It succeeds on all ranks or on none.

    The work of a rank may block for ever, so it runs on another thread, and a rank that waits monitors the
    others.
    """

    def rounds() -> Steps:
        mine = yield Do("contribute", job.contribute)
        answer = yield from own_answer(context, "asked", mine, job.decide, context.participants)
        context.enter("acting")
        yield Do("begin", partial(job.begin, answer))
        # Messages take CPU time from the working threads, so poll only if the task takes longer than usual.
        yield Do("rest", partial(job.wait, min(UNDISTURBED, context.deadline.left())))
        heard = None
        if context.is_committer:
            # This rank's own part runs meanwhile on its thread; `poll` raises the error if it fails.
            heard = yield from collect(context, "acted", {}, context.participants, job.poll)
        report = yield from act(context, job)
        context.enter("acted")
        return (yield from agree(context, "acted", report, job.finish, heard))

    return _call(context, rounds(), "done")


def _call(context: Context, rounds: Steps, done: str, commit: SaveActions | None = None) -> Steps:
    """Run a call on one rank: its rounds, then its commit if it is a save.

    Returns the outcome's value in phase `done`, or raises the error that all ranks raise.
    """
    try:
        learn(context, *(yield Get([context.outcome_key])))
        if context.known_outcome is not None:
            raise _not_ours(context)
        if context.collect_error is not None:
            raise context.collect_error  # not earlier: here it reaches the other ranks
        value = yield from rounds
        if commit is not None:
            yield from (_publish if context.is_committer else _await_final)(context, commit)
    except HoldfastError as error:
        if context.phase in ("failed", "unconfirmed"):
            raise  # final: the others have already received the error
        value = yield from _fail(context, commit, error)
    context.enter(done)
    if commit is not None and context.is_committer:
        with suppress(HoldfastError):  # the save has succeeded: an interruption changes nothing
            yield Do("tidy", commit.tidy)
    return value


def _fail(context: Context, commit: SaveActions | None, error: HoldfastError) -> Steps:
    """Abandon the call with an error, and raise it, or the error that another rank claimed first. Returns the
    outcome's value if all had already agreed: then the error came too late."""
    if isinstance(error, CommitUnconfirmed):
        context.enter("unconfirmed")
        raise error
    standing = context.heard()
    if standing is not None and standing.state == "abandoned":
        # The others have abandoned the call. Send nothing: the store may be gone by now.
        context.known_outcome = standing
        context.enter("failed")
        raise from_message(standing.error) from error.__cause__
    # After a message with a foreign seal the store still works: tell the others, unless storage decides.
    can_tell = is_foreign(error) and (context.is_committer or not context.is_decidable)
    if isinstance(error, RosterLost) and not can_tell:
        error.step, error.phase = context.step, error.phase or context.phase
        # Only storage can tell whether a save was committed. The committer alone commits, and it has not.
        if commit is None or context.is_committer or not context.is_decidable:
            context.enter("failed")
            raise error
        yield from _look(context, commit, 5.0, error)
        return None
    if context.explain is not None:
        error = yield Do("explain", partial(context.explain, error))
    abandoned = yield from _abandon(context, error)
    if abandoned is None and not context.is_decidable:
        abandoned = _not_ours(context)
    # On another rank: the committer may have committed. On the committer: its claim was interrupted after it
    # took effect, and nothing was published.
    elif abandoned is None and commit is not None:
        abandoned = yield from _unconfirmed(context, error)
    if abandoned is not None:
        raise abandoned from error.__cause__
    assert context.known_outcome is not None
    return context.known_outcome.value


# -- the commit of a save -------------------------------------------------------------------


def _publish(context: Context, job: SaveActions) -> Steps:
    """Publish the index after `agreed`, and send the result to the others."""
    try:
        final = yield Do("publish", job.publish)
    except RosterLost:
        raise
    except HoldfastError as error:
        yield from _tell_final(context, Final(error=error.to_message()))
        context.enter("unconfirmed" if isinstance(error, CommitUnconfirmed) else "failed")
        raise
    with suppress(HoldfastError):  # the save has succeeded: an interruption changes nothing
        yield Do("mark", job.mark)
    yield from _tell_final(context, final)


def _tell_final(context: Context, final: Final) -> Steps:
    """Send the result of the commit to the others. If the message store is lost, they check storage."""
    for _ in range(2):  # a Ctrl-C may be thrown in here, once
        try:
            yield Put(context.final_key, to_message(final))
            return
        except RosterLost:
            return
        except HoldfastError:
            continue  # this rank was interrupted; the others must be told all the same


def _await_final(context: Context, job: SaveActions) -> Steps:
    try:
        final = yield from wait_for(context, context.final_key, "put the index in place", Final)
    except RosterLost:
        raise
    except HoldfastError as error:
        # The committer is gone, or the deadline has passed. After `agreed` only storage can tell.
        yield from _look(context, job, 0.0, error)
        return
    if final.error is not None:
        raised = from_message(final.error)
        if isinstance(raised, RankFailed):  # another rank says that the committer has ended
            yield from _look(context, job, 0.0, raised)
            return
        context.enter("unconfirmed" if isinstance(raised, CommitUnconfirmed) else "failed")
        raise raised
    yield from _look(context, job, VISIBLE_WITHIN, f"rank {context.committer} says that it is committed")


def _look(context: Context, job: SaveActions, seconds: float, cause: HoldfastError | str) -> Steps:
    """Wait until the index of this attempt is in storage. Raises CommitUnconfirmed if it is not seen within
    `seconds` or by the deadline."""
    ends = context.clock.now() + min(context.deadline.left(), seconds)
    pause = 0.01
    while not (yield Do("look", job.is_committed)):
        # A rank that has returned may move or remove the checkpoint. A message alone proves no commit, but
        # together with the loss of this rank's own files it does: a call that fails removes them last.
        if isinstance(cause, str) and (yield Do("look", job.is_moved)):
            return
        if context.clock.now() >= ends:
            if isinstance(cause, str):
                cause = HoldfastError(
                    f"{cause}, but its index is not to be seen from here", rank=context.committer
                )
            raise (yield from _unconfirmed(context, cause)) from None
        # A network file system may show another host's file late; looking more often does not help.
        yield Do("rest", partial(context.clock.sleep, pause))
        pause = min(2 * pause, 1.0)


def _unconfirmed(context: Context, cause: HoldfastError) -> Steps:
    """Enter phase `unconfirmed` and return the error. It names the committer as the cause only if its process
    is known to have ended."""
    phase, known = context.phase, context.heard()
    context.enter("unconfirmed")
    seen = context.committer_seen or Seen()
    ended = yield Do("look", partial(ended_since, seen))
    who = describe(context.committer, seen, context.clock.wall(), ended)
    decides = (
        f"Rank {who.rank}" + (f" (host {who.host}, pid {who.pid})" if who.host else "") + " decides that"
    )
    whose = (
        "all ranks had written" if known is not None and known.state == "agreed" else "this rank had written"
    )
    return CommitUnconfirmed(
        f"{context.title}: {whose}, but it could not learn whether the index was put in place "
        f"({cause.message})",
        step=context.step,
        phase=phase,
        rank=who.rank if ended and cause.rank is None else cause.rank,
        missing=cause.missing or ((who,) if ended else ()),
        hint=f"{'; '.join(filter(None, (decides, ended)))}. Once storage is reachable, `holdfast latest` "
        "tells; the checkpoint is whole or not there.",
    )


# -- the end of a call that fails -------------------------------------------------------------


def _abandon(context: Context, error: HoldfastError) -> Steps:
    """Claim `abandoned` with this error. The first claimed error is raised on all ranks.

    Returns the error to raise, or None if all ranks had agreed before.
    """
    # In these phases the committer checks other ranks' reports, so the error may be another rank's.
    judging = context.is_committer and context.phase in ("assigning", "committing", "read")
    if error.rank is None and not error.missing and not judging:
        error.rank = context.rank
    if not error.missing and not error.phase:
        # Of a save also what is said of other ranks: an asynchronous one's is raised by a later call.
        is_mine, of_save = error.rank == context.rank, context.phase in ("assigning", "committing")
        if is_mine or (of_save and context.title not in error.message):
            there = context.there if is_mine else ""
            error.message = f"{context.title} failed{there} in phase {context.phase!r}: {error.message}"
    error.step = context.step if error.step is None else error.step
    error.phase = error.phase or context.phase
    context.on_wait(None)
    try:
        # All fields are set before the claim, because all ranks raise the error that is claimed.
        mine = abandoned_by(context.rank, error)
        message = yield from abandon(context.key, context.rank, error)
    except RosterLost:
        if context.phase == "written" and not context.is_committer:  # the others may commit its files
            return (yield from _unconfirmed(context, error))
        context.enter("failed")
        return error
    standing = context.known_outcome = from_roster(message, Outcome)
    if standing.state == "agreed":
        return None
    context.enter("failed")
    # Compare whole messages, not ranks: this rank's heart may have claimed first, when a rank died.
    return error if message == mine else from_message(standing.error)


def _not_ours(context: Context) -> HoldfastError:
    """Enter phase `failed` and return the error for an untrustworthy store: it has `agreed`, but this rank
    has not sent its report."""
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
