"""The beacon: publishes and renews the presence message of this rank for all its operations and sessions.

At every beat the heart sends the message, polls for the outcomes of operations, checks the neighbours, and
answers requests for this rank's stack.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary, ref

import msgspec

from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.base.values import Message
from holdfast._core.process.heart import heart
from holdfast._core.roster.base import Roster, is_foreign
from holdfast._core.roster.lost import Gone, see
from holdfast._core.roster.neighbours import Watch
from holdfast._core.roster.presence import Vitals, at_key, pace, spread
from holdfast._core.roster.process import stack_dump, this_process
from holdfast._core.roster.whereabouts import StackAnswering
from holdfast.errors import RosterLost

BEAT = 1.0
"""Seconds between two beats; more in a large world, to limit the load of the message store (about 100,000
requests per second). There, a beat only polls for outcomes; the rest happens at `pace`."""


SEE_OFF = 30.0
"""Maximum seconds that a process which hosts the message store waits for ranks to leave."""


class Presence:
    """One operation in this rank's presence message."""

    def __init__(self, roster: Roster, title: str, participants: Sequence[int] = ()) -> None:
        self.beacon = beacon_of(roster)
        self.operation, self.title, self.participants = "", title, participants
        self.about: Message = {}
        """Identifies the call, beside `key` (`protocol.rendezvous.CallSignature`)."""
        self.phase, self.progress = "entered", 0
        self.others = 0
        """Counts progress of awaited ranks, passed on to ranks that wait for this one."""
        self.waiting_for: list[int] | None = None
        self.deadline: Deadline | None = None
        """When the operation fails if awaited ranks do not arrive."""
        self.is_working = False
        self.answered = 0.0
        """When the message store last answered the thread of this operation, by the monotonic clock."""
        self.outcome: Message | None = None
        """The outcome of the operation, once the heart has read it."""
        self.looks = 0
        """Number of times that the heart has polled for the outcome."""
        self.more: Callable[[], Message] = dict
        """Returns more fields of the message: `doing`, which errors quote, and machine-readable values."""
        self.look: Callable[[Roster], None] = lambda roster: None
        """Called at every beat to poll for the outcome, because the operation's own thread may be stuck."""
        self.on_gone: Callable[[int, Gone], None] = lambda rank, gone: None
        """Called on the heart's thread if a neighbour among the participants has ended."""
        self.on_lost: Callable[[RosterLost], None] = lambda error: None
        """Called on the heart's thread at every beat at which the message store does not answer."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark a section as this rank's own work or a callback. Code outside of it calls the message
        store."""
        self.is_working = True
        try:
            yield
        finally:
            self.is_working = False

    def wait_for(self, ranks: Sequence[int] | None) -> None:
        """Set the ranks that this rank waits for; None if it is working."""
        self.waiting_for = None if ranks is None else list(ranks)

    def pass_on_progress(self) -> None:
        """Publish that an awaited rank has made progress."""
        self.others += 1

    def record(self) -> Message:
        """Return this operation's part of the rank's message."""
        return {
            **self.about,
            "title": self.title,
            "phase": self.phase,
            "waiting_for": self.waiting_for,
            "progress": self.progress,
            "others": self.others,
            "decided": self.outcome is not None,
            "looks": self.looks,
            **self.more(),
        }

    def begin(self, operation: str, beats: bool) -> None:
        """Add an operation to the message and send it. beats: keep renewing it from now on."""
        self.operation = operation
        self.beacon.add(self, beats)
        self.beacon.send()

    def leave(self) -> None:
        """Publish that the operation is over on this rank, so that errors of other ranks can quote its
        result."""
        if self.operation:
            self.beacon.meet(self)
            self.beacon.remove(self)
            with suppress(RosterLost):
                self.beacon.send()

    def stop(self) -> None:
        """Stop the beat, unless another operation needs it."""
        self.beacon.remove(self)


class Beacon:
    """This rank's message: its identity, and all operations that it is in, on all lanes.

    Several threads begin and end operations; one message contains all of them, so that none hides another.
    """

    def __init__(self, roster: Roster) -> None:
        self.who = this_process(roster.rank)
        self.interval = max(BEAT, roster.world_size / 1000)
        self.pace = pace(roster.world_size)
        self._due = 0.0
        """When the message is due for renewal, by the monotonic clock."""
        self.watch = Watch(self.who, self._listens_at, self._hurry, self.pace)
        self.answering = StackAnswering(roster.rank)
        self.report_after = Limits().report_after
        self.ended = ""
        """How the program has ended, once it has."""
        self._roster = ref(roster)  # weak, because the roster keeps this object alive
        self._operations: dict[tuple[int, str], Presence] = {}
        self._reads_for: list[str] = []
        self._serves: bool | None = None
        self._beating: set[object] = set()
        self._last: Message = {}
        self._left_with: Sequence[int] = ()
        """The participants of the last operation."""
        self._beats = 0
        self._lock = threading.Lock()

    def set_limits(self, limits: Limits) -> None:
        """Set the timeouts for reports of long waits and for lost hosts."""
        self.report_after, self.watch.lost_after = limits.report_after, limits.lost_after
        self.keep_pace(limits.stall_timeout)

    def keep_pace(self, stall_timeout: float | None) -> None:
        """Renew the message often enough for a call with this `stall_timeout`."""
        if stall_timeout is not None:
            self.pace = min(self.pace, stall_timeout / 4)

    def end(self, how: str) -> None:
        """Announce that the program of this rank has ended, so that no rank waits for it any more."""
        self.ended = how
        with suppress(RosterLost):
            self.send(self._bounded())

    def see_off(self, seconds: float = SEE_OFF) -> None:
        """If this process hosts the message store: wait up to `seconds` until the other ranks have left the
        last operation, because they still read its outcome from the store."""
        roster, ends = self._bounded(), time.monotonic() + seconds
        with suppress(RosterLost):
            others = [rank for rank in self._left_with if rank != self.who.rank]
            while roster is not None and others and roster.serves() and time.monotonic() < ends:
                key, seen = self._last["key"], see(roster, others)
                others = [rank for rank, one in seen.items() if one.is_in(key) and not one.ended]
                if others:
                    time.sleep(0.01)

    def _bounded(self) -> Roster | None:
        roster = self._roster()
        return roster.bounded() if roster is not None else None

    @property
    def operations(self) -> list[Presence]:
        with self._lock:
            return list(self._operations.values())

    def message(self) -> Message:
        who = msgspec.structs.replace(self.who, dump_signal=stack_dump.signal, dump_file=stack_dump.file)
        with self._lock:
            operations, last, reads_for = dict(self._operations), self._last, list(self._reads_for)
            self._beats += 1
            beat = self._beats
        records = {key: presence.record() for (_, key), presence in operations.items()}
        serves = self._serves_store()
        return msgspec.to_builtins(  # type: ignore[no-any-return]
            Vitals(who, records, last, beat, time.time(), self.watch.hears(), reads_for, serves, self.ended)
        )

    def _serves_store(self) -> bool:
        """Return whether this process hosts the message store; looked up once, among its sockets."""
        roster = self._roster()
        if self._serves is None and roster is not None:
            with suppress(RosterLost):
                self._serves = roster.serves()
        return bool(self._serves)

    @contextmanager
    def reading_for(self, site: str) -> Iterator[None]:
        """Say in messages that are sent meanwhile that this rank reads its state for a call, in which others
        may already wait for it."""
        with self._lock:
            self._reads_for.append(site)
        try:
            yield
        finally:
            with self._lock:
                self._reads_for.remove(site)

    def send(self, roster: Roster | None = None) -> None:
        roster = roster or self._roster()
        if roster is not None:
            # Outside the lock: the store may not answer, and `remove` must not wait for it.
            roster.put(at_key(self.who.rank), self.message())

    def add(self, presence: Presence, beats: bool) -> None:
        with self._lock:
            self._operations[id(presence), presence.operation] = presence
        if beats:
            self.watch.begin(presence, presence.participants, presence.on_gone)
            self.keep(presence)

    def remove(self, presence: Presence) -> None:
        with self._lock:
            if self._operations.pop((id(presence), presence.operation), None) is not None:
                # Kept in the message, so that errors can quote the result of this rank's last call.
                self._last = {"key": presence.operation, **presence.record()}
                self._left_with = presence.participants
        self.watch.end(presence)
        self.let_go(presence)

    def meet(self, presence: Presence) -> None:
        """Keep beating after a call if a neighbour in it is on another host: a later failure is detected only
        for ranks that had renewed their messages and were reachable."""
        roster = self._bounded()
        if roster is not None and presence in self._beating and self.watch not in self._beating:
            with suppress(RosterLost):
                self.watch.meet(presence.participants, roster)
            if self.watch.is_far:
                self.keep(self.watch)
                self._hurry()  # to connect soon

    def keep(self, user: object) -> None:
        """Beat for as long as `user` needs it. Raises HoldfastError if no thread can be started."""
        self._roster()
        with self._lock:
            first = not self._beating
            self._beating.add(user)
            if first:
                # Entering an operation has just sent the message; `install` has not.
                self._due = time.monotonic() + self.pace - self.interval / 2 if self._operations else 0.0
        if first:
            heart.begin(self, self.interval * (1 + spread(self.who.rank)) / 2)

    def let_go(self, user: object) -> None:
        with self._lock:
            known = user in self._beating
            self._beating.discard(user)
            last = known and not self._beating
        if last:
            heart.end(self)

    def _hurry(self) -> None:
        self._due = 0.0
        heart.hurry(self)

    def beat(self) -> None:
        """Renew the message, poll for outcomes, and check the neighbours. Runs on the heart's thread."""
        bounded = self._bounded()
        if bounded is None:
            self._stop()
            return
        now = time.monotonic()
        is_due = now >= self._due
        if is_due:
            self._due = now + self.pace - self.interval / 2
        try:
            if is_due:
                self.send(bounded)
            for presence in self.operations:
                self._look(presence, bounded)
        except RosterLost as error:  # the operations get the same error and raise it
            if error.details.get("destroyed"):
                self._stop()
            for presence in self.operations:
                presence.on_lost(error)
        if is_due or not self.watch.near():
            self.watch.beat(bounded)
        if is_due:
            self.answering.beat(bounded, self.watch.held_here())

    def _look(self, presence: Presence, bounded: Roster) -> None:
        try:
            presence.look(bounded)
        except RosterLost as error:
            if not is_foreign(error):  # a foreign message: the store itself works
                raise

    def _stop(self) -> None:
        """Stop for good: the process group was destroyed, and its messages are gone."""
        with self._lock:
            self._beating.clear()
        heart.end(self)

    def close(self) -> None:
        """Stop listening; on the heart's thread."""
        self.watch.close()

    def _listens_at(self, address: str, port: int) -> None:
        self.who = msgspec.structs.replace(self.who, address=address, port=port)


_beacons: WeakKeyDictionary[Roster, Beacon] = WeakKeyDictionary()
_beacons_lock = threading.Lock()


def beacon_of(roster: Roster) -> Beacon:
    """Return this rank's beacon. A forked process gets its own."""
    base = roster.base()
    with _beacons_lock:
        known = _beacons.get(base)
        if known is None or known.who.pid != os.getpid():
            known = _beacons[base] = Beacon(base)
        return known
