"""Where the ranks of one call meet, and how their keys in the message store go again.

Theory. All ranks of a job make the same calls in the same order; but one may be late for a call that the
others have given up, or skip one that the others made. So every rank counts its own calls of each kind, place
and arguments, and the n-th call of one meets the n-th of the others, never another: a rank that comes late
finds the error of its own call, and its next call meets the next of the others. What was abandoned is
therefore never joined with something newer, and a checkpoint holds the states of one call.

A rank that skipped a call counts one less from then on. It is brought level at the next call, of any kind on
that lane, that all ranks bring to an end: with its first message a rank says which of its calls were
abandoned since the last such end, the outcome says the highest count of each, and all ranks count on from
there. Until then its next call of that very kind finds the error of the one that it skipped.

What a rank does not know of the outcome of a call (it gave up while stuck) it settles before its next call,
by the same atomic claim.

Keys go with those who use them: each rank deletes its own when it leaves a call, and the last to leave
deletes what is left. A call that some rank never came to keeps a handful of keys, which go after a later call
that all ranks brought to an end.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from holdfast.errors import HoldfastError
from holdfast.format.digest import digest, hex_digest
from holdfast.protocol.effects import Claim, Context, Count, Delete, Steps
from holdfast.protocol.messages import Generation, Opened, Outcome, abandoned_by, from_roster, to_message
from holdfast.roster.base import Roster
from holdfast.values import Message

_REMEMBERED = 1024
"""Different calls whose counts are kept. A call that is forgotten begins to count anew; its keys are long
gone by then."""
SWEEP_AFTER = 60.0
"""Seconds after which the keys of an abandoned call are deleted by a later good end: a rank that uses this
lane on a second thread may still look for its outcome, every quarter of a second."""
SHARED = ("open", "outcome", "final", "chosen", "assigned", "left")
"""Keys of a call that all its ranks may read."""


class CallSignature:
    """What identifies a call: kind, place, arguments and participants. Ranks with equal ones meet in it."""

    def __init__(
        self, kind: str, place: str, arguments: Mapping[str, object], participants: tuple[int, ...]
    ) -> None:
        local = "://" not in place and not place.startswith("memory:")
        # One rank may give a relative path and another an absolute one. Other places are names, taken as
        # given.
        place = os.path.abspath(place) if local else place
        said = ", ".join(f"{name}={_plain(value)!r}" for name, value in arguments.items())
        self.key = f"{kind}/{_hash(f'{kind}|{place}|{said}|{participants}')}"
        self.about: Message = {"site": _hash(f"{kind}|{place}|{participants}"), "arguments": said}
        """For presence messages: calls of one site with other arguments never meet."""


def _plain(value: object) -> object:
    """A list and a tuple of the same are the same argument."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def _hash(text: str) -> str:
    return hex_digest(digest(text.encode(errors="surrogatepass")))


class History:
    """Counters of this rank's calls with one set of participants, one counter a signature.

    The counter's value is a part of the call's key: the n-th call of one rank meets the n-th of the others.
    """

    def __init__(self) -> None:
        self.generation: int | None = None
        """Generation: how often these ranks began on this lane of this message store, which may outlive a
        process group."""
        self.token = secrets.token_hex(6)
        self._lock = threading.Lock()
        self._next: OrderedDict[str, int] = OrderedDict()
        self._abandoned: OrderedDict[str, int] = OrderedDict()
        """Calls that were abandoned since the last good end, and the number of the next of each."""
        self._open: dict[str, tuple[str, bool]] = {}
        """By key, the site of each call that has not come to its end here, and whether this rank gave it
        up."""
        self._left_over: list[tuple[float, str]] = []
        """When and where a call was abandoned."""

    def begin(self, site: str) -> tuple[str, dict[str, int]]:
        """The key of this call, and the calls that were abandoned since the last good end."""
        with self._lock:
            number = self._next.pop(site, 0)  # and put in again at the end: the oldest one is dropped first
            self._next[site] = number + 1
            if len(self._next) > _REMEMBERED:
                self._next.popitem(last=False)
            key = f"{site}/{self.generation}.{number}"
            self._open[key] = site, False
            return key, dict(self._abandoned)

    def give_up(self, key: str) -> None:
        """This rank went on although the call has not come to its end here: a thread of it is stuck."""
        with self._lock:
            if key in self._open:
                self._open[key] = self._open[key][0], True

    def given_up(self) -> list[str]:
        with self._lock:
            return [key for key, (_, gone) in self._open.items() if gone]

    def end(self, key: str, outcome: Outcome, now: float) -> list[str] | None:
        """Note how a call ended. Returns keys of abandoned calls that nobody needs any more; None if the end
        was noted before."""
        with self._lock:
            site, _ = self._open.pop(key, ("", False))
            if not site:
                return None
            if outcome.state == "abandoned":
                self._abandoned[site] = self._next.get(site, 0)
                self._left_over.append((now, key))
                if len(self._abandoned) > _REMEMBERED:
                    self._abandoned.popitem(last=False)
                return []
            # All ranks take the committer's numbers, so one that skipped a call is level with them again.
            for other, number in outcome.abandoned.items():
                self._next[other] = max(self._next.get(other, 0), number)
                # Another thread may have seen a later call abandoned meanwhile. That one is still to be told.
                if self._abandoned.get(other, 0) <= number:
                    self._abandoned.pop(other, None)
            old = [left for since, left in self._left_over if now - since >= SWEEP_AFTER]
            self._left_over = [entry for entry in self._left_over if now - entry[0] < SWEEP_AFTER]
            return [f"{left}/{name}" for left in old for name in SHARED]


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
    """Derive the key of this call and open it; returns the name of the attempt, which all its ranks share."""
    # First, because an outcome that is learned here may move the number that this call gets.
    for key in history.given_up():
        yield from _learn_outcome(context, history, key)
    # Two threads may both see None. They claim with the same token, so both get the same number.
    if history.generation is None:
        history.generation = yield from _claim_generation(context, history.token)
    key, context.abandoned = history.begin(signature.key)
    context.set_key(key)
    mine = to_message(Opened(context.rank, secrets.token_hex(6)))
    return from_roster((yield Claim(f"{context.key}/open", mine)), Opened).attempt


def leave(context: Context, history: History) -> Steps:
    """Close this call on this rank: note its outcome, and delete the messages that nobody reads any more."""
    if context.known_outcome is None:
        history.give_up(context.key)
        return  # its outcome is open: others may still wait for what this rank has said
    old = history.end(context.key, context.known_outcome, context.clock.now())
    if old is None:
        return
    # After an abandoned call nobody reads answers any more; after a good one each reader has deleted its own.
    mine = context.own | context.answers if context.known_outcome.state == "abandoned" else context.own
    if mine:
        yield Delete(sorted(mine))
    yield from _one_less(context, context.key)
    if old and context.is_committer:
        yield Delete(old)


def _one_less(context: Context, key: str) -> Steps:
    # The counter is atomic, so exactly one rank is the last; if a rank never comes nobody is, and a later
    # good call sweeps (SWEEP_AFTER).
    if (yield Count(f"{key}/left")) >= len(context.participants):
        yield Delete([f"{key}/{name}" for name in SHARED])


def _learn_outcome(context: Context, history: History, key: str) -> Steps:
    """A call that this rank gave up without hearing how it ended is over now, one way or the other."""
    gave_up = HoldfastError(f"{context.who} gave it up, and went on.", rank=context.rank)
    message = yield Claim(f"{key}/outcome", abandoned_by(context.rank, gave_up))
    outcome = from_roster(message, Outcome)
    if history.end(key, outcome, context.clock.now()) is not None:
        yield from _one_less(context, key)


def _claim_generation(context: Context, token: str) -> Steps:
    """Claim the first free generation number. All ranks get the same one, as they begin together."""
    who, number = _hash(str(context.participants)), 0
    mine = Generation(token)
    while True:
        # These keys are never deleted: the next beginning on this store skips the numbers that are taken.
        standing = yield Claim(f"life/{who}/{context.rank}/{number}", to_message(mine))
        if from_roster(standing, Generation) == mine:
            break
        number += 1
    return number
