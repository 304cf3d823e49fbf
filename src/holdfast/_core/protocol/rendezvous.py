"""Rendezvous: the key under which the ranks of a call meet, and the deletion of a call's keys.

All ranks of a job make the same calls in the same order; but a rank may be late for a call that the others
have abandoned, or skip one that the others made. So every rank counts its calls of each kind, place and
arguments, and the n-th call of one rank meets the n-th call of the others, never another: a rank that comes
late gets the error of its own call, and its next call meets the next call of the others. So an abandoned call
is never joined with a newer one, and a checkpoint holds the states of one call.

The first rank of a call draws the name of the attempt, and the keys of all other messages contain it: a seal
covers its key, so no message of one call is a message of another, also if both have the same number.

A rank that skipped a call counts one less from then on. The counters are made equal by the next call, of any
kind on that lane, that all ranks complete: with its first message a rank sends which of its calls were
abandoned since the last such call, the outcome contains the highest count of each, and all ranks continue
from there. Until then its next call of the same kind gets the error of the call that it skipped.

If a rank does not know the outcome of a call (it gave up while stuck), it determines it before its next call,
by the same atomic claim.

Each rank deletes its own keys when it leaves a call, and the last rank to leave deletes the shared ones. A
call that some rank never entered leaves a few keys, which are deleted after a later call that all ranks
complete.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

from holdfast._core.base.values import Message
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.protocol.effects import ANSWERS, Claim, Context, Count, Delete, Steps, abandon
from holdfast._core.protocol.messages import Generation, Opened, Outcome, from_roster, to_message
from holdfast._core.roster.base import Roster
from holdfast.errors import HoldfastError

_REMEMBERED = 1024
"""Maximum number of call signatures with a counter. A dropped counter restarts at 0; by then its keys are
deleted."""
_ATTEMPT = re.compile("[0-9a-f]{12}")
SWEEP_AFTER = 60.0
"""Seconds after which a later completed call deletes the keys of an abandoned one: a rank that uses this lane
on a second thread may still look for its outcome, every quarter of a second."""
SHARED = ("outcome", "final", *ANSWERS, "left")
"""Keys of a call that all its ranks read, in addition to `open`."""


def _shared(key: str) -> list[str]:
    """Return the keys that all ranks of a call read. key: that of the call, with its attempt."""
    return [f"{key.rpartition('/')[0]}/open", *(f"{key}/{name}" for name in SHARED)]


class CallSignature:
    """Identifies a call by kind, place, arguments and participants. Ranks with equal signatures meet."""

    def __init__(
        self, kind: str, place: str, arguments: Mapping[str, object], participants: tuple[int, ...]
    ) -> None:
        local = "://" not in place and not place.startswith("memory:")
        # Ranks may give the same path as a relative and as an absolute one. Other places are compared as they
        # are.
        place = os.path.abspath(place) if local else place
        arguments_text = ", ".join(f"{name}={_plain(value)!r}" for name, value in arguments.items())
        self.key = f"{kind}/{_hash(f'{kind}|{place}|{arguments_text}|{participants}')}"
        self.about: Message = {"site": _hash(f"{kind}|{place}|{participants}"), "arguments": arguments_text}
        """For presence messages: calls of the same site with different arguments never meet."""


def _plain(value: object) -> object:
    """Turn lists and sets into tuples: a list and a tuple with the same elements are the same argument, and
    the order of a set differs between processes."""
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(repr, value)))
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _hash(text: str) -> str:
    return hex_digest(digest(text.encode(errors="surrogatepass")))


class _Open(NamedTuple):
    """A call that has not ended on this rank."""

    signature: str
    number: str
    """Its key, without the attempt."""
    was_given_up: bool = False


class History:
    """Counters of this rank's calls with one set of participants, one counter per signature.

    The counter is a part of the call's key: the n-th call of one rank meets the n-th of the others.
    """

    def __init__(self) -> None:
        self.generation: int | None = None
        """How many times these ranks have started on this lane of this message store, which may outlive a
        process group."""
        self.token = secrets.token_hex(6)
        self._lock = threading.Lock()
        self._next: OrderedDict[str, int] = OrderedDict()
        self._abandoned: OrderedDict[str, int] = OrderedDict()
        """Calls that were abandoned since the last completed one: by signature, the number of the next."""
        self._open: dict[str, _Open] = {}
        """Calls that have not ended on this rank, by key. The key lacks the attempt until that is known."""
        self._left_over: list[tuple[float, str]] = []
        """The time and key of each abandoned call."""

    def begin(self, site: str) -> tuple[str, dict[str, int]]:
        """Return the key of this call, still without its attempt, and the calls that were abandoned since the
        last completed one."""
        with self._lock:
            number = self._next.pop(site, 0)  # inserted again at the end, so that the oldest is dropped first
            self._next[site] = number + 1
            if len(self._next) > _REMEMBERED:
                self._next.popitem(last=False)
            key = f"{site}/{self.generation}.{number}"
            self._open[key] = _Open(site, key)
            return key, dict(self._abandoned)

    def name(self, key: str, attempt: str) -> str:
        """Record the name of a call's attempt; return the complete key."""
        with self._lock:
            named = f"{key}/{attempt}"
            if key in self._open:
                self._open[named] = self._open.pop(key)
            return named

    def without_attempt(self, key: str) -> bool:
        """Return whether this rank abandoned a call before it knew the attempt."""
        with self._lock:
            return key in self._open and self._open[key].number == key

    def give_up(self, key: str) -> None:
        """Record that this rank continues although the call has not ended here, because its thread is
        stuck."""
        with self._lock:
            if key in self._open:
                self._open[key] = self._open[key]._replace(was_given_up=True)

    def given_up(self) -> list[str]:
        with self._lock:
            return [key for key, call in self._open.items() if call.was_given_up]

    def end(self, key: str, outcome: Outcome, now: float) -> list[str] | None:
        """Record the outcome of a call. Returns keys of abandoned calls that can be deleted; None if the
        outcome was already recorded."""
        with self._lock:
            call = self._open.pop(key, None)
            if call is None:
                return None
            site = call.signature
            if outcome.state == "abandoned":
                self._abandoned[site] = self._next.get(site, 0)
                self._left_over.append((now, key))
                if len(self._abandoned) > _REMEMBERED:
                    self._abandoned.popitem(last=False)
                return []
            # All ranks take the committer's numbers, so one that skipped a call is level with them again.
            for other, number in outcome.abandoned.items():
                self._next[other] = max(self._next.get(other, 0), number)
                # Another thread may have seen a later call abandoned meanwhile. That one is still to be sent.
                if self._abandoned.get(other, 0) <= number:
                    self._abandoned.pop(other, None)
            old = [left for since, left in self._left_over if now - since >= SWEEP_AFTER]
            self._left_over = [entry for entry in self._left_over if now - entry[0] < SWEEP_AFTER]
            return [name for left in old for name in _shared(left)]


# A lane is a roster of its own, so calls on different lanes are counted apart.
_histories: WeakKeyDictionary[Roster, dict[tuple[int, ...], History]] = WeakKeyDictionary()
_lock = threading.Lock()


def history_of(roster: Roster, participants: tuple[int, ...]) -> History:
    with _lock:
        known = _histories.setdefault(roster, {})
        if participants not in known:
            known[participants] = History()
        return known[participants]


def meet(context: Context, signature: CallSignature, history: History) -> Steps:
    """Derive the key of this call and open it. Returns the name of the attempt, which all its ranks share."""
    # First, because these outcomes may change the number of this call.
    for key in history.given_up():
        yield from _learn_outcome(context, history, key)
    yield from _begin_life(history, context.participants, context.rank)
    key, context.abandoned = history.begin(signature.key)
    context.set_key(key)
    attempt = yield from _open(context, key)
    context.set_key(history.name(key, attempt))
    return attempt


def _begin_life(history: History, participants: tuple[int, ...], rank: int) -> Steps:
    """Claim the first free generation number. All ranks get the same one, because they start together."""
    # Two threads may both see None; they claim with the same token, so both get the same number.
    if history.generation is None:
        lives, number = f"life/{_hash(str(participants))}/{rank}", 0
        mine = Generation(history.token)
        # These keys are never deleted: later generations on this store skip the numbers that are taken.
        while from_roster((yield Claim(f"{lives}/{number}", to_message(mine))), Generation) != mine:
            number += 1
        history.generation = number


def life_of(roster: Roster, participants: tuple[int, ...]) -> int:
    """Return how many times these ranks have started on this lane before. Keys outside of calls contain it,
    because a message store, with old messages, may outlive its process group."""
    history = history_of(roster, participants)
    steps, standing = _begin_life(history, participants, roster.rank), None
    with suppress(StopIteration):
        while True:
            claim = steps.send(standing)
            assert isinstance(claim, Claim)
            standing = roster.claim(claim.key, claim.message)
    assert history.generation is not None
    return history.generation


def _open(context: Context, key: str) -> Steps:
    """Open a call, or find it open; return the name of its attempt. key: the key without the attempt."""
    opened = to_message(Opened(context.rank, secrets.token_hex(6)))
    attempt = from_roster((yield Claim(f"{key}/open", opened)), Opened).attempt
    # The name becomes part of keys and file names.
    if not _ATTEMPT.fullmatch(attempt):
        raise HoldfastError(
            f"The message {key}/open names the attempt {attempt[:40]!r}, which no rank of Holdfast does.",
            hint="See docs/security.md for who can write messages.",
        )
    return attempt


def leave(context: Context, history: History) -> Steps:
    """Close this call on this rank: record its outcome, and delete messages that no rank needs any more."""
    if context.known_outcome is None:
        history.give_up(context.key)
        return  # the outcome is open: others may still wait for this rank's messages
    old = history.end(context.key, context.known_outcome, context.clock.now())
    if old is None:
        return
    # After an abandoned call nobody reads answers any more; after a completed one each reader has deleted its
    # own.
    mine = context.own | context.answers if context.known_outcome.state == "abandoned" else context.own
    if mine:
        yield Delete(sorted(mine))
    yield from _one_less(context, context.key)
    if old and context.is_committer:
        yield Delete(old)


def _one_less(context: Context, key: str) -> Steps:
    # The counter is atomic, so exactly one rank is the last. If a rank never comes none is, and a later
    # completed call deletes these keys (SWEEP_AFTER).
    if (yield Count(f"{key}/left")) >= len(context.participants):
        yield Delete(_shared(key))


def _learn_outcome(context: Context, history: History, key: str) -> Steps:
    """Determine the outcome of a call that this rank abandoned while stuck: claim `abandoned`, or read the
    earlier claim."""
    if history.without_attempt(key):
        key = history.name(key, (yield from _open(context, key)))
    gave_up = HoldfastError(f"{context.who} gave it up, and went on.", rank=context.rank)
    outcome = from_roster((yield from abandon(key, context.rank, gave_up)), Outcome)
    if history.end(key, outcome, context.clock.now()) is not None:
        yield from _one_less(context, key)
