"""Run a protocol: execute its effects on a roster and a clock, under a deadline.

Storage and the message store may block for ever, so they are called on a worker thread. The caller waits for
the worker until the deadline plus a short grace. If the worker is stuck, the caller raises the error of the
other ranks, if the heart has seen one. A stuck worker is told to stop (`Cancel`) and can no longer report
`written`, so an operation that was given up can't become visible later. Ctrl-C in the caller is raised inside
the protocol, which tells the other ranks, and then in the caller again.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast._core.base.deadline import REAL_CLOCK
from holdfast._core.base.threads import start_thread
from holdfast._core.protocol.effects import (
    Claim,
    Context,
    Count,
    Delete,
    Do,
    Effect,
    Get,
    Look,
    Pause,
    Put,
    Steps,
    abandon,
)
from holdfast._core.protocol.messages import Outcome, from_roster
from holdfast._core.roster.base import Roster
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.lost import see
from holdfast.errors import CommitUnconfirmed, DeadlineExceeded, HoldfastError, RankInfo, from_message

GRACE = 0.75
"""Seconds past the deadline, or after the others gave up, within which a worker may still return."""
CHECK = 0.25
"""Seconds between two checks of a waiting worker for cancellation; they send no messages."""
LAST_CALL = 0.5
"""Seconds within which a cancelled worker should notice that."""
TIDY = 30.0
"""Seconds that a successful call waits for the removal of files that are no longer needed."""
SUCCESS = ("committed", "loaded", "chosen", "done")
UNSURE = ("written", "committing", "unconfirmed")


class Cancelled(HoldfastError):
    """The operation was given up while this thread was working."""


class Cancel:
    """Tells a worker thread to stop. With a reason, the thread first tells the other ranks why."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self.reason: HoldfastError | None = None

    def set(self, reason: HoldfastError | None = None) -> None:
        self.reason = reason
        self._set.set()

    def check(self) -> None:
        if self._set.is_set():
            raise Cancelled("The operation was given up.")


def perform(steps: Steps, roster: Roster, presence: Presence, cancel: Cancel) -> object:
    """Run a protocol to completion on this thread; return its result."""
    result: object = None
    error: BaseException | None = None
    while True:
        try:
            effect = steps.throw(error) if error is not None else steps.send(result)
        except StopIteration as end:
            return end.value
        result, error = None, None
        try:
            cancel.check()
            result = _do(effect, roster, presence, cancel)
            if not isinstance(effect, Do | Pause):
                presence.answered = REAL_CLOCK.now()
        except Cancelled:
            if cancel.reason is None:
                # Without a reason the caller has gone on, and this thread just ends.
                steps.close()
                raise
            # The reason is thrown in once: telling the others must not be cancelled.
            error, cancel = cancel.reason, Cancel()
        except HoldfastError as raised:
            error = raised
        except Exception as raised:  # a bug, or user code: the other ranks must be told all the same
            wrapped = HoldfastError(f"{type(raised).__name__}: {raised}", rank=roster.rank)
            wrapped.__cause__ = raised
            error = wrapped


def _do(effect: Effect, roster: Roster, presence: Presence, cancel: Cancel) -> object:
    """Execute one effect of a protocol; return its result."""
    match effect:
        case Put(key, message):
            roster.put(key, message)
            return None
        case Get(keys):
            return roster.get(keys)
        case Claim(key, message):
            return roster.claim(key, message)
        case Count(key):
            return roster.count(key)
        case Delete(keys):
            roster.delete(keys)
            return None
        case Pause(key, seconds):
            ends = REAL_CLOCK.now() + seconds
            while not (came := roster.wait(key, max(0.0, min(CHECK, ends - REAL_CLOCK.now())))):
                cancel.check()
                if REAL_CLOCK.now() >= ends:
                    break
            return came
        case Look(ranks):
            return see(roster, ranks)
        case Do(_, action):
            # So that an error about a stuck thread can tell storage and user code from the message store.
            with presence.working():
                return action()


class CallSteps(NamedTuple):
    """The protocols of one call, in the order in which they run."""

    meet: Steps
    """Derives the key of the call, and publishes this rank's presence in it."""
    body: Steps
    leave: Steps
    """Deletes messages; its errors are ignored."""


@dataclass
class _Ended:
    """The result of a call on this rank: a value or an error, once `known` is set."""

    known: threading.Event = field(default_factory=threading.Event)
    value: object = None
    error: BaseException | None = None


def run(steps: CallSteps, context: Context, roster: Roster, presence: Presence, cancel: Cancel) -> object:
    """Run a protocol under its deadline. Returns or raises by then, even if a thread is stuck."""
    done = threading.Event()
    ended = _Ended()

    def work() -> None:
        never = Cancel()  # a cancel is told to the other ranks, which works only after the rendezvous
        try:
            perform(steps.meet, roster, presence, never)
            ended.value = perform(steps.body, roster, presence, cancel)
        except BaseException as error:
            told = isinstance(error, HoldfastError)
            ended.error = error if told else _told(error, context, roster, presence)
        try:
            ended.known.set()  # before this rank leaves, which may take a while
            with suppress(HoldfastError):
                perform(steps.leave, roster, presence, never)
        finally:
            presence.leave()
            done.set()

    # Storage and the message store may block for ever, so they are called on a thread that can be left
    # behind.
    thread: threading.Thread | None = None
    try:
        thread = start_thread(work, "holdfast-operation", context.rank)
    except HoldfastError as error:
        cancel.set(error)  # the protocol tells the others, which needs no thread
        work()
    stuck: HoldfastError | None = None
    try:
        _wait(done, ended, context, presence)
    except HoldfastError as error:
        stuck = error  # what the thread did when it was given up, not what it does once it has noticed that
        cancel.set()
        if not ended.known.wait(LAST_CALL):
            raise
    except BaseException as interrupt:
        reason = HoldfastError(
            f"{context.title}: {context.who} was interrupted by {type(interrupt).__name__}.",
            rank=context.rank,
            phase=context.phase,
        )
        cancel.set(reason)
        done.wait(LAST_CALL + GRACE)  # time to tell the others; Ctrl-C must return soon all the same
        raise
    finally:
        presence.stop()
    if done.is_set() and thread is not None:
        thread.join(timeout=LAST_CALL)
    if not ended.known.is_set() and context.phase in SUCCESS:
        return None  # it goes on tidying up by itself
    if not ended.known.is_set() or isinstance(ended.error, Cancelled):
        raise stuck or _stuck(context, presence)
    if ended.error is not None:
        raise ended.error
    return ended.value


def _told(bug: BaseException, context: Context, roster: Roster, presence: Presence) -> HoldfastError:
    """Send an error in the protocol itself to the other ranks; return it as the error of this call."""
    error = HoldfastError(f"{context.title} failed{context.there}: {bug!r}", rank=context.rank)
    error.__cause__ = bug
    with suppress(Exception):  # a failure to send it must not hide it
        if context.key:
            perform(abandon(context.key, context.rank, error), roster, presence, Cancel())
    return error


def _wait(done: threading.Event, ended: _Ended, context: Context, presence: Presence) -> None:
    """Wait until the worker is done, or raise if it is stuck: past the deadline, or after the others gave
    up."""
    heard: float | None = None
    succeeded: float | None = None
    # Short waits once the others have given up: this rank must then return within GRACE.
    while not done.wait(0.05 if heard is not None else 0.25):
        now = REAL_CLOCK.now()
        if ended.known.is_set():
            done.wait(LAST_CALL)  # it is leaving the call; its messages may also be deleted later
            return
        if context.phase in SUCCESS:
            succeeded = now if succeeded is None else succeeded
            if now >= succeeded + TIDY or now >= context.deadline.at + GRACE:
                return
            continue  # a success stays one although the others have gone
        if heard is None and presence.outcome is not None and _others_error(presence) is not None:
            heard = now
        # On a busy machine the thread is on its way to the error that names the missing ranks.
        overdue = now >= max(context.deadline.at, presence.answered) + GRACE
        if overdue or (heard is not None and now >= heard + GRACE):
            raise _stuck(context, presence)


def _others_error(presence: Presence) -> HoldfastError | None:
    """Return the error with which the others abandoned the call, if the heart has read it."""
    outcome = from_roster(presence.outcome, Outcome) if presence.outcome is not None else None
    return from_message(outcome.error) if outcome is not None and outcome.state == "abandoned" else None


def _stuck(context: Context, presence: Presence) -> HoldfastError:
    """Return the error for a stuck worker of this rank."""
    error = _others_error(presence)
    if error is not None:
        return error
    kind = CommitUnconfirmed if context.phase in UNSURE else DeadlineExceeded
    if not presence.is_working:
        return kind(
            f"{context.title} did not come back by its deadline of {context.deadline}: "
            f"{context.who}, in phase {context.phase!r}, asks the message store, which does not answer. "
            "Which rank is missing can't be known without it.",
            step=context.step,
            phase=context.phase,
            hint="Its host, mostly rank 0's process or the launcher, is stopped or can't be reached.",
        )
    me = presence.beacon.who
    here = RankInfo(
        context.rank,
        me.host,
        me.pid,
        f"{context.title}: {context.phase}",
        0.0,
        str(presence.more().get("doing") or "its call into storage or a callback does not return"),
    )
    return kind(
        f"{context.title} did not come back by its deadline of {context.deadline}: {here}.",
        step=context.step,
        phase=context.phase,
        rank=context.rank,
        missing=(here,),
        hint="A stack of its thread `holdfast-operation` (py-spy, faulthandler) shows where it is.",
    )
