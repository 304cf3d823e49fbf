"""Preemption: after SIGTERM, or a request, on any rank, all ranks stop at the same step, in time to save."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Self
from weakref import WeakKeyDictionary

from holdfast._core.base.deadline import REAL_CLOCK, Deadline, check_seconds
from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import given, told
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.protocol.call import begin_call, find_participants, find_roster
from holdfast._core.protocol.consensus import StepConsensus
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.messages import StopAsked, from_roster, to_message
from holdfast._core.protocol.rendezvous import life_of
from holdfast._core.roster.base import Roster, is_foreign
from holdfast.errors import BadInput, RosterLost

log = logging.getLogger("holdfast")
LANE = "preemption"
ASKED = "asked"
POLL = 0.5
"""Seconds between two checks whether another rank wants to stop."""


LOST = 30.0
"""Seconds after which a message store that does not answer is logged."""
_made: WeakKeyDictionary[Roster, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""Number of `Preemption`s made per roster and participants; equal on all ranks."""


class Preemption:
    """Call `should_stop()` once a step, on all ranks; it is True on all of them at the same step.

        with holdfast.Preemption(budget=60) as preemption:
            for step in range(start, steps):
                train(step)
                if preemption.should_stop():
                    checkpoints.save(step, state).committed(preemption.left())
                    break

    budget: seconds from the signal until the process should have ended; `left()` returns the rest.
    signals: signals that request a stop on this rank; `close` restores their handlers. Outside the main
        thread, pass `signals=()` and call `request()`.
    """

    def __init__(
        self,
        *,
        budget: float = 60.0,
        signals: Iterable[int] = (signal.SIGTERM,),
        job: Job | None = None,
    ) -> None:
        job, budget = job_of(job), check_seconds("budget", budget)
        if not isinstance(signals, Iterable) or isinstance(signals, str | bytes):
            raise BadInput(f"signals must be a list such as (signal.SIGTERM,), not {given(signals)}.")
        self._roster = find_roster(job).lane(LANE)
        who = find_participants(self._roster, job.ranks())
        self._budget = budget
        self._deadline: Deadline | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        made = _made.setdefault(self._roster, Counter())
        made[who] += 1  # a stop that was asked for before is not this one's
        some = digest("-".join(map(str, who)).encode())  # a list of thousands is too long for a key
        here = hex_digest(some) if len(who) < self._roster.world_size else "all"
        self._who, self._asked = who, f"{here}/{made[who]}"
        self.reason: str | None = None
        """The rank that requested the stop, and why; None without a request."""
        begin = partial(begin_call, replace(job, roster=self._roster, participants=who, timeout=budget))
        self._consensus = StepConsensus(
            "choice of the step to stop at", f"preemption://{ASKED}/{self._asked}", begin
        )
        self._signalled: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        try:
            for number in signals:
                self._before[number] = self._handle(number)
            self._thread = start_thread(self._watch, "holdfast-preemption", self._roster.rank)
        except BaseException:
            self._restore_handlers()
            raise

    def _handle(self, number: int) -> Callable[[int, FrameType | None], object] | int | None:
        """Take over a signal, and return its handler before."""
        try:
            return signal.signal(number, self._on_signal)
        except (OSError, TypeError, ValueError) as error:
            raise BadInput(
                f"signals: {given(number)} can't be handled: {told(error)}",
                hint="Give numbers, such as signal.SIGTERM, on the main thread; elsewhere give signals=() "
                "and call request().",
            ) from None

    def should_stop(self) -> bool:
        """Return whether all ranks stop at this step. Call it once a step, on every participant."""
        return self._consensus.reached()

    def request(self, why: str = "request()") -> None:
        """Request a stop of all ranks."""
        self._asked_at(why)
        self._wanted.set()

    def left(self) -> float:
        """Return the remaining seconds of the budget; the whole budget before any request."""
        return self._budget if self._deadline is None else max(self._deadline.left(), 0.0)

    def close(self) -> None:
        """Restore signal handlers, and stop watching."""
        self._restore_handlers()
        self._closed.set()
        self._wanted.set()
        self._thread.join(timeout=1.0)

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python, and can't be from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Take no lock here: the main thread, or a handler that this one has interrupted, may hold it. So set
        # no event: the thread polls `_signalled`.
        if self._signalled is None:
            self._asked_at(signal.Signals(number).name)
            self._signalled = number

    def _asked_at(self, why: str) -> None:
        """Record a request to stop; the first one starts the budget."""
        if self._deadline is None:
            self._deadline = Deadline(self._budget, REAL_CLOCK)
            self.reason = f"{why} on rank {self._roster.rank}"

    def _watch(self) -> None:
        try:
            self._heed()
        except Exception as error:
            # Without this, the error would be lost, and this rank would ignore all requests to stop.
            self._consensus.fail(error)

    def _heed(self) -> None:
        """Wait for a request to stop, here or on another rank; then propose the step to stop at."""
        lost_since: float | None = None
        told = False
        while not self._closed.is_set():
            wanted = self._wanted.wait(POLL) or self._signalled is not None
            if self._closed.is_set():
                return
            try:
                # First, because `propose` waits for ranks that learn of the stop by this key.
                key = f"{ASKED}/{life_of(self._roster, self._who)}/{self._asked}"
                mine = to_message(StopAsked(str(self.reason), os.getpid()))
                message = self._roster.claim(key, mine) if wanted else self._roster.get([key])[0]
                lost_since = None
            except RosterLost as error:
                # A rank that wants to stop must raise; others can go on training until the store responds.
                if wanted or is_foreign(error) or error.details.get("destroyed"):
                    raise
                lost_since = lost_since or time.monotonic()
                if not told and time.monotonic() - lost_since >= LOST:
                    told = True
                    log.warning(
                        "The message store has not answered for %.0f s: until it does, this rank does not "
                        "hear whether another one is to stop.",
                        LOST,
                    )
                continue
            if message is not None:
                asked = from_roster(message, StopAsked)
                if not wanted:
                    # The budget counts from now, up to POLL after the signal: hosts' clocks are not compared.
                    self._deadline = Deadline(self._budget, REAL_CLOCK)
                    self.reason = asked.reason
                self._consensus.propose()
                return
