"""The rounds of a call: every rank sends a report, the committer decides, all act on its answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from msgspec import Struct

from holdfast._core.base.values import Message
from holdfast._core.protocol.effects import (
    Claim,
    Context,
    Do,
    Get,
    Pause,
    Put,
    SaveActions,
    Steps,
    TaskActions,
)
from holdfast._core.protocol.idle import do_without
from holdfast._core.protocol.liveness import QUOTED, PeerMonitor
from holdfast._core.protocol.messages import (
    Assigned,
    Before,
    Outcome,
    RowDigest,
    RowList,
    from_roster,
    to_message,
)
from holdfast.errors import DeadlineExceeded, from_message

Report = Message | Struct
MessageType = type[Struct]
OF_ALL_CALLS = Before.__struct_fields__
"""Fields of the protocol in a message of a task."""
R = TypeVar("R", bound=Report)
Decide = Callable[[dict[int, R]], object]
"""The committer's decision function: reports by rank -> decision."""
FEWEST, MOST = 8, 64
"""Batch size of the committer's reads of reports: after a wait, and at most while all are present."""
LOOKED_AT = 256
"""Maximum number of ranks that it polls at a time."""
SELDOM = 10.0
"""Maximum seconds between two polls for the outcome while a rank acts."""
_DUTIES = {
    "row_digest": ("enter the save", "say who writes replicated tensors"),
    "rows": ("list its replicated tensors", "say who writes replicated tensors"),
    "written": ("write its part", "commit"),
    "read": ("read its part", "say that every rank has read"),
    "asked": ("enter", "answer"),
    "acted": ("do its part", "say that every rank has done its part"),
}
"""For errors, by topic of a round: the awaited action of a rank, and the awaited action of the committer."""


def own_answer(
    context: Context,
    topic: str,
    mine: R,
    decide: Decide[R],
    ranks: Sequence[int],
    kind: MessageType | None = None,
) -> Steps:
    """Run a round in which each of these ranks gets an individual answer. Return this rank's answer; None if
    it is not one of them."""
    if not context.is_committer:
        yield context.report(topic, mine)
        key = context.key_of("answer", context.rank)
        context.own.add(key)
        return (yield from wait_for(context, key, _DUTIES[topic][1], kind, context.answered_key))
    heard = yield from collect(context, topic, mine, ranks)
    answers = yield Do("decide", partial(decide, {rank: heard[rank] for rank in ranks}))
    for rank, answer in answers.items():
        if rank != context.rank:
            yield context.answer(rank, answer)
    yield Put(context.answered_key, {})
    return answers.get(context.rank)


def agree(
    context: Context, topic: str, mine: R, decide: Decide[R], heard: dict[int, R] | None = None
) -> Steps:
    """Run the last round of a call, whose decision is the outcome. Return its value on every rank.

    heard: committer: the reports of the others, if it has already received them.
    """
    if not context.is_committer:
        context.is_decidable = True
        yield context.report(topic, mine)
        outcome = yield from wait_for(context, context.outcome_key, _DUTIES[topic][1], Outcome)
        return outcome.value
    if heard is None:
        heard = yield from collect(context, topic, mine, context.participants)
    if "committing" in context.transitions:
        context.enter("committing")
    value = yield Do("prepare", partial(decide, {**heard, context.rank: mine}))
    # The point of no return: nothing can abandon the call after this claim.
    context.is_decidable = True
    yield from _claim_agreed(context, value)
    return value


def agree_on_replicas(context: Context, job: SaveActions) -> Steps:
    """Return this rank's replica index of each row whose replica index is undeclared.

    Usually every rank holds the same names, which one round of digests confirms. Only if they differ does
    every rank send its list. Ranks without such rows report that and continue.
    """
    mine = yield Do("row_digest", job.row_digest)
    digest = RowDigest(mine, job.copies())
    holders = list(context.participants)
    if context.is_committer:
        # A rank without such rows reports that, because the committer can't know who has none.
        if mine is not None:
            context.enter("assigning")
        heard = yield from collect(
            context, "row_digest", digest, context.participants, instead=partial(do_without, context)
        )
        holders = [rank for rank in context.participants if heard[rank].digest is not None]
        if not holders:
            return None
        # The usual case: one digest per rank, however many tensors it has. Lists are longer, so they come
        # second.
        differ = len({heard[rank].digest for rank in holders}) > 1
        assigned = Assigned(lists_wanted=True) if differ else Assigned(holders)
        if len(context.participants) > 1:
            yield Put(context.answer_key, to_message(assigned))
    else:
        yield context.report("row_digest", digest)
        if mine is None:
            return None
        context.enter("assigning")
        assigned = yield from wait_for(context, context.answer_key, _DUTIES["row_digest"][1], Assigned)
    if not assigned.lists_wanted:
        return assigned if mine is not None else None
    own = RowList([], []) if mine is None else (yield Do("list_rows", job.list_rows))
    return (yield from own_answer(context, "rows", own, job.assign, holders, Assigned))


def act(context: Context, job: TaskActions) -> Steps:
    """Wait until this rank has done its part; return its report."""
    watch = PeerMonitor(context, "do its part")
    context.on_wait([])  # its work may wait for any of the others
    pause = watch.LOOK_EVERY / 2
    while True:
        report = yield Do("poll", job.poll)
        if report is not None:
            context.on_wait(None)
            return report
        learn(context, *(yield Get([context.outcome_key])))
        # The committer comes here after all others have acted (`collect`), so it waits only for itself.
        if not context.is_committer:
            yield from watch.look([context.committer])
        elif context.deadline.passed():
            raise DeadlineExceeded(
                f"{context.who} did not do its part in {context.deadline}.", rank=context.rank
            )
        # Only the end of its own work wakes this rank, so it polls for the outcome at growing intervals.
        pause = min(1.3 * pause, SELDOM)
        yield Do("rest", partial(job.wait, min(pause, watch.patience())))


def collect(
    context: Context,
    topic: str,
    mine: R,
    ranks: Sequence[int],
    poll: Callable[[], object] = lambda: None,
    instead: Callable[[dict[int, R], Sequence[int]], Steps] | None = None,
) -> Steps:
    """Committer: return the report of every rank on a topic, of the type of this rank's own. Raises an error
    that names the missing ranks.

    poll: raises errors of this rank's own work meanwhile.
    instead: steps to run before a long wait is reported, given the reports so far and all ranks; they may end
        the wait.
    """
    reports: dict[int, Any] = {context.rank: mine}
    missing = deque(sorted(rank for rank in ranks if rank != context.rank))
    watch = PeerMonitor(context, _DUTIES[topic][0])
    watch.instead = None if instead is None else partial(instead, reports, ranks)
    ask = MOST
    while missing:
        context.on_wait(list(islice(missing, QUOTED)))
        yield Do("poll", poll)
        # Batches of bounded size. Reports are read once more before their ranks are polled.
        looks = watch.is_due
        some = [missing.popleft() for _ in range(min(LOOKED_AT if looks else ask, len(missing)))]
        keys = [context.key_of(topic, rank) for rank in some]
        outcome, *messages = yield Get([context.outcome_key, *keys])
        learn(context, outcome)
        heard = {rank: message for rank, message in zip(some, messages, strict=True) if message is not None}
        for rank, message in heard.items():
            context.note_abandoned(from_roster(message, Before, rank).abandoned)
            if isinstance(mine, Struct):
                reports[rank] = from_roster(message, type(mine), rank)
            else:
                reports[rank] = {name: value for name, value in message.items() if name not in OF_ALL_CALLS}
        if heard:
            context.note_progress()
            watch.over(heard.__contains__)
        late = [rank for rank in some if rank not in heard]
        if late and looks:
            yield from watch.look(late, len(late) + len(missing))
        if looks and not watch.suspects:
            missing.extend(late)  # so that the next poll covers others
        else:
            missing.extendleft(reversed(late))
        # After a missing report the next ones may be missing too, so wait for the first of them.
        ask = FEWEST if late else min(2 * ask, MOST)
        if late:
            yield Pause(context.key_of(topic, missing[0]), watch.patience())
    context.on_wait(None)
    return reports


def wait_for(context: Context, key: str, what: str, kind: MessageType | None = None, bell: str = "") -> Steps:
    """Return the message that the committer puts under a key; raise the error if the call is abandoned.

    bell: another key that is set after the message. It, or `key`, is also set when the call is abandoned.
    """
    watch = PeerMonitor(context, what)
    context.on_wait([context.committer])
    bell = bell or key
    while True:
        message, outcome = yield Get([key, context.outcome_key])
        # Checked first, because a rank that abandons the call writes an empty answer afterwards.
        learn(context, outcome)
        if message is not None:
            context.on_wait(None)
            watch.over()
            return message if kind is None else from_roster(message, kind, context.committer)
        yield from watch.look([context.committer])
        if (yield Pause(bell, watch.patience())):
            bell = key  # the message may still be in transit on another connection


def _claim_agreed(context: Context, value: object = None) -> Steps:
    agreed = Outcome("agreed", context.rank, abandoned=context.abandoned, value=value)
    # Raises if another rank has abandoned the call first: then nothing may be published.
    learn(context, (yield Claim(context.outcome_key, to_message(agreed))))


def learn(context: Context, outcome: Message | None) -> None:
    """Record the outcome of this call, if it exists. Raises the error of an `abandoned` outcome."""
    if outcome is not None:
        context.known_outcome = from_roster(outcome, Outcome)
        if context.known_outcome.state == "abandoned":
            raise from_message(context.known_outcome.error)
