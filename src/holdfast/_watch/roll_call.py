"""The roll call: when a collective has taken half of its group's timeout, every rank reports its position.

A rank detects with the flight recorder that it waits too long, and claims the next call, `roll/<n>`. All
ranks poll that key at their pace; each answers in `roll/<n>/<rank>` with its stacks and its pending
collectives, again some seconds later, and writes the same to a file. If a rank can't answer, because it is
stopped or holds the GIL, another rank of its host answers for it, with the process state and the stacks by
faulthandler's signal. The rank that started the call collects the answers, makes a diagnosis (`diagnose`),
and logs the result once, before any watchdog acts.

If the message store does not answer, there is no roll call: each rank that waits too long says so, and what
the kernel shows of the process that hosts the store.

A roll call ends no process. Between calls it costs a check of two numbers of each group, and one read of the
message store. Ranks answer on a separate thread, as storage may block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from weakref import ref

import msgspec

from holdfast import events
from holdfast._core.base.options import roll_call_folder
from holdfast._core.base.threads import start_thread
from holdfast._core.process.heart import heart
from holdfast._core.roster.base import Roster, get_ours, is_foreign
from holdfast._core.roster.beacon import Beacon, beacon_of
from holdfast._core.roster.lost import see, store_silence
from holdfast._core.roster.presence import Vitals, at_key, pace, read
from holdfast._core.torch_private import flight_records, shortest_timeout
from holdfast._watch.answering import Answering, Asked
from holdfast._watch.shared_call import waiting_call
from holdfast.errors import RosterLost

log = logging.getLogger("holdfast")
SHARE = 0.5
"""Share of its group's timeout after which a collective has taken too long."""
AGAIN = 10.0
"""Maximum seconds between the two samples: time for late ranks to move on."""
NOTICED = 2.0
"""Minimum age of a collective, in seconds, before its timeout is looked up."""
BRIEFLY = 2.0
"""Seconds between the two samples of a call that was requested through the folder."""
LOOK_IN_FOLDER = 2.0
"""Polling interval in seconds for such a request."""
LOOK_AT_OTHERS = 5.0
"""Minimum interval in seconds at which a later rank checks whether it is one of the first live ranks now."""
OLD = 60.0
"""Age in seconds from which on a rank ignores a call."""


class PendingCollectives:
    """Tracks for how long each group has waited in one collective, by the flight recorder."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], tuple[int, float, float]] = {}
        """By group: the last completed number, and between which two looks the wait has begun."""
        self._limits: dict[tuple[int, str], float] = {}
        self._read_at: dict[tuple[int, str], int] = {}
        """By group: the last completed number at which all entries of the record were read."""
        self._told: set[tuple[int, str, int]] = set()
        self._found: tuple[tuple[int, str], int, float, float, float] | None = None
        """The wait that `too_long` has found: group, last completed number, start at the earliest and at the
        latest, timeout."""
        self._missed: tuple[tuple[int, str], int, float, float, float] | None = None
        """The wait for which this rank called."""
        self._looked = self._read = time.monotonic()

    def too_long(self) -> tuple[float, float] | None:
        """Return the seconds that a collective has taken, and its group's timeout, if that is too long and
        not reported yet."""
        self._found, before, now = None, self._read, time.monotonic()
        self._read = now
        for key, enqueued, done in _statuses():
            if enqueued <= done:
                self._since.pop(key, None)
                continue
            if self._since.get(key, (None,))[0] != done:
                self._since[key] = done, before, now
            _, earliest, since = self._since[key]
            waited = now - since
            if waited < NOTICED or (*key, done) in self._told:
                continue
            limit = self._limit(key, done)
            if limit is not None and waited >= SHARE * limit:
                self._found = key, done, earliest, since, limit
                return waited, limit
        return None

    def called(self) -> None:
        """Note that this rank, and not another one at the same time, has called for what `too_long` found."""
        self._missed = self._found or self._missed

    def over(self) -> tuple[float, str] | None:
        """Return, once, the duration of the collective for which this rank called, and how it ended, inferred
        from the time: the record does not show a failure."""
        now, last = time.monotonic(), self._looked
        self._looked = now
        if self._missed is None:
            return None
        missed, before, earliest, since, limit = self._missed
        if not any(key == missed and done > before for key, _, done in _statuses()):
            return None
        self._missed = None
        if last - since >= limit:
            return now - since, "has failed by its timeout"
        in_time = now - earliest < limit
        return now - since, "is over" if in_time else "has ended (whether by its timeout is not known)"

    def tell(self) -> None:
        """Mark all pending collectives as reported."""
        self._told |= {(*key, done) for key, enqueued, done in _statuses() if enqueued > done}

    def _limit(self, key: tuple[int, str], done: int) -> float | None:
        # Once for each collective: reading 2,000 entries takes half a second, and may find no timeout.
        if key not in self._limits and self._read_at.get(key) != done:
            self._read_at[key] = done
            for number, record in enumerate(flight_records(entries=True)):
                for entry in record.get("entries", ()):
                    if entry.get("timeout_ms"):
                        self._limits[number, str(entry.get("pg_id"))] = int(entry["timeout_ms"]) / 1000
        return self._limits.get(key) or shortest_timeout()


def _statuses() -> Iterable[tuple[tuple[int, str], int, int]]:
    """Yield the last enqueued and the last completed number of each group."""
    for number, record in enumerate(flight_records()):
        for group, status in record.get("pg_status", {}).items():
            enqueued, done = status["last_enqueued_collective"], status["last_completed_collective"]
            yield (number, group), int(enqueued), int(done)


class RollCall:
    """The roll calls of one rank: a duty of the heart, from `install` to `uninstall`."""

    def __init__(self, roster: Roster) -> None:
        self.interval = pace(roster.world_size)
        self._roster = ref(roster)  # it lives as long as its process group
        self._pending = PendingCollectives()
        self._number = 0
        """The number of the next call."""
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._told: set[str] = set()
        """Holdfast's own waits that were reported: in saves, loads and replacements of collectives."""
        self._waiting_call: tuple[str, str] | None = None
        """A call in the folder in which this job takes no part yet, and the reason for it."""
        self._joined: set[str] = set()
        """Calls in the folder in which this job takes part."""
        self._next_look = 0.0
        self._next_look_at_others = 0.0
        self._looks = threading.Event()
        self._host: Vitals | None = None
        """The message of the rank whose process hosts the message store."""
        self._silent_since = 0.0
        """Since when the message store has not answered, by the monotonic clock; 0: it has."""
        self._is_silence_told = False

    def beat(self) -> None:
        roster = self._roster()
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            if roster is not None:
                self._look(roster.bounded().base(), beacon_of(roster))
        except RosterLost as error:  # the program's own calls raise it, too
            if error.details.get("destroyed"):
                roster = None
            elif not is_foreign(error):
                self._tell_silence(error)
        except Exception as error:  # it would recur at every beat
            log.warning("Roll calls end here: %s: %s", type(error).__name__, error)
            roster = None
        if roster is None:
            heart.end(self)

    def _look(self, base: Roster, beacon: Beacon) -> None:
        """Start a call if this rank waits too long or one is requested, and answer calls."""
        self._look_in_folder(base)
        if (ended := self._pending.over()) is not None:
            log.warning("The collective of the last roll call %s, after %.0f s.", ended[1], ended[0])
            events.emit("roll_call.over", rank=base.rank, seconds=ended[0], how=ended[1])
        key = f"roll/{self._number}"
        # Rank 0 hosts the store, unless the launcher does, or the program has made one of its own.
        call, host = get_ours(base, [key, at_key(0)])
        self._silent_since, self._is_silence_told = 0.0, False
        vitals = read(host, Vitals)
        self._host = vitals if vitals is not None and vitals.serves else None
        asked = read(call, Asked)
        mine = self._call(base.rank, beacon) if asked is None else None
        if mine is not None:
            asked = read(base.claim(key, msgspec.to_builtins(mine)), Asked)
            if asked is not None and asked.by == base.rank:
                self._pending.called()
        if asked is not None:
            answering = Answering(base, beacon, self._number, asked, self._over)
            self._number += 1
            if time.time() - asked.at < OLD:
                self._joined.add(asked.folder)
                self._thread = start_thread(lambda: self._answer(answering, beacon), "holdfast-roll-call")

    def _tell_silence(self, error: RosterLost) -> None:
        """Say, once, that a collective takes too long, and that the message store does not answer."""
        if not self._silent_since:
            # This process may have been stopped while it waited for the answer: the next look decides.
            self._silent_since = time.monotonic()
            return
        waited = None if self._is_silence_told else self._pending.too_long()
        if waited is None:
            return
        self._is_silence_told = True
        silent = time.monotonic() - self._silent_since
        log.warning(
            "A collective has taken %.0f of %.0f s, and no roll can be called: %s",
            *(*waited, store_silence(self._host, error, silent)),
        )

    def _call(self, rank: int, beacon: Beacon) -> Asked | None:
        """Return the call that this rank should start now, if any."""
        if (waited := self._pending.too_long()) is not None:
            why = f"a collective has taken {waited[0]:.0f} of {waited[1]:.0f} s"
            return Asked(rank, why, min(AGAIN, waited[1] / 8), time.time())
        for one in beacon.operations:
            deadline = one.deadline
            if deadline is None or not one.waiting_for or one.operation in self._told:
                continue
            if deadline.left() <= (1 - SHARE) * deadline.seconds:
                why = f"{one.title} has taken {deadline.elapsed():.0f} s, with {deadline.left():.0f} s left"
                return Asked(rank, why, min(AGAIN, deadline.seconds / 8), time.time())
        if self._waiting_call is not None and self._waiting_call[0] not in self._joined:
            name, why = self._waiting_call
            return Asked(rank, why, BRIEFLY, time.time(), name)
        return None

    def _look_in_folder(self, base: Roster) -> None:
        """Poll the folder for requested calls, on two ranks, in case one hangs. Runs on a thread, as storage
        may block."""
        folder = roll_call_folder()
        if not folder or time.monotonic() < self._next_look or self._looks.is_set():
            return
        if base.rank > 1 and not self._is_of_the_first(base):
            return
        self._next_look = time.monotonic() + LOOK_IN_FOLDER
        self._looks.set()

        def look() -> None:
            try:
                self._waiting_call = waiting_call(folder, base.job())
            finally:
                self._looks.clear()

        start_thread(look, "holdfast-roll-call-folder")

    def _is_of_the_first(self, base: Roster) -> bool:
        """Return whether at least two of the three ranks before this one have ended (for rank 2: one of two).
        This is always true for the first two live ranks."""
        if time.monotonic() < self._next_look_at_others:
            return False
        before = see(base, range(base.rank - 3, base.rank)) if base.rank > 2 else see(base, (0, 1))
        is_first = sum(not seen.ended for seen in before.values()) < 2
        if not is_first:
            self._next_look_at_others = time.monotonic() + max(LOOK_AT_OTHERS, self.interval)
        return is_first

    def _answer(self, answering: Answering, beacon: Beacon) -> None:
        try:
            answering.run()
        except RosterLost:  # as in `beat`; also if the program has destroyed its process group
            pass
        except Exception as error:  # must not affect the job
            log.warning("A roll call could not be answered: %s: %s", type(error).__name__, error)
        self._pending.tell()
        self._told = {one.operation for one in beacon.operations if one.waiting_for}

    def close(self) -> None:
        self._over.set()
