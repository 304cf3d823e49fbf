"""A session's watch: this rank is here, is another gone? It runs beside training and issues no collective.

Each rank beats on a lane of the roster. The lowest rank looks at all others, in turns, and they look at it. Who sees that a rank
has died or fallen silent, and who raises, puts that under one key; the first is everyone's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from holdfast.deadline import REAL_CLOCK, StallTimer
from holdfast.errors import HoldfastError, RankFailed, RosterLost, from_message
from holdfast.roster.base import Message, Roster
from holdfast.roster.presence import Presence, at_key, describe

AT_ONCE = 256
"""Ranks that the lowest looks at in one turn."""


class Monitor:
    """`on_failure` is called once, on this thread, with the error that ends the session on all ranks."""

    def __init__(
        self,
        roster: Roster,
        key: str,
        stall_timeout: float,
        on_failure: Callable[[HoldfastError], None],
    ) -> None:
        self.roster, self.key = roster, key
        self.failure: HoldfastError | None = None
        self.presence = Presence(roster, "session", 1.0)
        self.presence.operation, self.presence.phase = key, "in its body"
        self.presence.more = lambda: {"resident": True}
        self._stall, self._on_failure = stall_timeout, on_failure
        self._interval = min(0.5, stall_timeout / 4)
        self._others = [rank for rank in range(roster.world_size) if rank != roster.rank]
        if roster.rank:
            self._others = [0]
        self._timers: dict[int, StallTimer] = {}
        self._turn = 0
        self._beats = threading.Event()
        self._beats.set()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="holdfast-session", daemon=True)

    def start(self) -> None:
        self.presence.send()
        self._thread.start()

    def hand_over(self) -> None:
        """An operation of the session tells from now on where this rank is."""
        self._beats.clear()

    def stop(self) -> None:
        """No more beats. Whoever waits for this rank from now on waits for what it says."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def fail(self, error: HoldfastError) -> bool:
        """Have this error end the session on all ranks; False if another was first, which is `failure` then."""
        with self._lock:
            if self.failure is not None:
                return False
            try:
                standing = self.roster.claim(f"{self.key}/failed", error.to_message())
            except RosterLost as lost:
                standing = error.to_message() if error.rank == self.roster.rank else lost.to_message()
            self.failure = from_message(standing)
            return standing == error.to_message()

    def look(self) -> None:
        """See whether somebody has failed, now."""
        try:
            told = self.roster.get([f"{self.key}/failed"])[0]
            if told is not None:
                with self._lock:
                    self.failure = self.failure or from_message(told)
                return
            self._look_at_others()
        except RosterLost as error:
            with self._lock:
                self.failure = self.failure or error

    def say(self, what: str) -> None:
        """Leave word of this rank for the others: `heard` of a failure, `left`."""
        self.roster.put(f"{self.key}/{what}/{self.roster.rank}", {"at": time.time()})

    def wait_for(self, what: str, ranks: list[int], seconds: float) -> bool:
        """Until these ranks have said it, or are gone; False if the time is over before."""
        ends = time.monotonic() + seconds
        waiting = list(ranks)
        while waiting:
            some = waiting[:AT_ONCE]
            said = self.roster.get([f"{self.key}/{what}/{rank}" for rank in some])
            here = self.roster.get([at_key(rank) for rank in some])
            done = {
                rank
                for rank, word, message in zip(some, said, here, strict=True)
                if word is not None
                or (message is not None and self.presence.identity.alive(message) is False)
            }
            waiting = [rank for rank in waiting if rank not in done]
            if not done:
                if time.monotonic() >= ends:
                    return False
                time.sleep(0.02)
        return True

    def known(self, rank: int) -> Message | None:
        """What a rank has last said of itself."""
        with suppress(RosterLost):
            return self.roster.get([at_key(rank)])[0]
        return None

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            with suppress(RosterLost):  # `look` meets the same
                if self._beats.is_set():
                    self.presence.send()
            self.look()
            if self.failure is not None and not self._stop.is_set():
                self._on_failure(self.failure)
                return

    def _look_at_others(self) -> None:
        self._turn = self._turn % max(len(self._others), 1)
        some = self._others[self._turn : self._turn + AT_ONCE]
        self._turn += AT_ONCE
        messages = self.roster.get([at_key(rank) for rank in some])
        left = self.roster.get([f"{self.key}/left/{rank}" for rank in some])
        lost: list[tuple[int, Message, str]] = []
        for rank, message, gone in zip(some, messages, left, strict=True):
            if message is None or gone is not None:
                continue
            timer = self._timers.setdefault(rank, StallTimer(self._stall, REAL_CLOCK))
            timer.see((message.get("operation"), message.get("phase"), message.get("beat")))
            if self.presence.identity.alive(message) is False:
                lost.append((rank, message, "its process has ended"))
            elif timer.stalled():
                lost.append((rank, message, f"silent for {timer.quiet_for():.0f} s"))
        if lost:
            infos = tuple(describe(rank, message, time.time(), why) for rank, message, why in lost)
            error = RankFailed(
                f"The session ended because of {'; '.join(map(str, infos[:8]))}.",
                rank=infos[0].rank,
                missing=infos,
                hint="Look at that rank's log.",
            )
            self.fail(error)
