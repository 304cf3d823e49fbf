"""`save_every`: which steps are due to be saved, by number of steps or by time, equal on all ranks."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from weakref import WeakKeyDictionary

from holdfast._core.base.threads import start_thread
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.consensus import StepConsensus
from holdfast._core.protocol.messages import TimeIsUp, from_roster, to_message
from holdfast._core.protocol.rendezvous import life_of
from holdfast._core.roster.base import Roster, is_foreign
from holdfast._core.store.retention import check_interval
from holdfast.errors import RosterLost

log = logging.getLogger("holdfast")
POLL = 0.5
"""Poll interval in seconds: checks whether the run was closed, while waiting for the committer's signal."""
LOST = 30.0
"""Seconds without the message store after which the next call of `due` raises the error."""
GRACE = 5.0
"""Timeout in seconds of `close` waiting for ranks that are choosing a step."""
_rounds: WeakKeyDictionary[Roster, Counter[str]] = WeakKeyDictionary()
"""Number of waits per run and roster, equal on all ranks; part of the message key, because the message that
ends a wait stays in the roster."""


class SaveTimes:
    """Implements `due(step)`, which all ranks call in the same order, once for each step of their loop.

    With a timedelta, only the clock of the committer (the lowest participant) counts. A thread on each rank
    receives its signal, and the ranks agree on the step by messages that no training step waits for.
    """

    def __init__(self, every: int | timedelta | None, place: str, begin: Callable[[], Call]) -> None:
        """place: identifies the run in messages between ranks. begin: creates a call of all participants."""
        check_interval("save_every", every)
        self._every, self._place, self._begin = every, place, begin
        self._asked: tuple[int, bool] | None = None
        self._questions = 0
        """Number of steps queried since the last save was due."""
        self._ended: TimeIsUp | None = None
        """The message of a rank that has closed its run before the others."""
        self._consensus: StepConsensus | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def due(self, step: int) -> bool:
        """Return whether this step is to be saved. The last step may be queried again."""
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._every is None:
            return True
        if self._asked is None or self._asked[0] != step:
            if self._consensus is None:
                self._watch()
            assert self._consensus is not None
            self._questions += 1
            self._tell()
            reached = True
            try:
                reached = self._consensus.reached()
            finally:
                if reached:  # or it has failed, on all ranks
                    self._watch()  # the time until the next save begins with this one
            self._asked = step, reached
        return self._asked[1]

    def _tell(self) -> None:
        """Warn, once, if another rank has closed the run and this one goes on: saves need all ranks."""
        # A rank that is merely slower never queries more steps than the other rank has queried.
        if self._ended is not None and self._questions > self._ended.asked:
            rank, steps = self._ended.rank, self._ended.asked
            self._ended = None
            log.warning(
                "%s: rank %d has closed its Checkpoints, %d steps after the last save, so that save_every "
                "finds no step due any more. Close it on all ranks after the same step.",
                self._place,
                rank,
                steps,
            )

    def close(self) -> None:
        """Stop the clock; the next call of `due` restarts it. Waits until no rank waits for this one."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(GRACE)
        self._closed, self._asked, self._consensus, self._thread = threading.Event(), None, None, None
        self._questions, self._ended = 0, None

    def _watch(self) -> None:
        assert isinstance(self._every, timedelta)
        call, closed, seconds = self._begin(), self._closed, self._every.total_seconds()
        rounds = _rounds.setdefault(call.roster, Counter())
        rounds[self._place] += 1
        place, number = f"{self._place}|due|{rounds[self._place]}", rounds[self._place]
        self._questions, self._ended = 0, None
        consensus = StepConsensus(f"choice of the step to save in {self._place}", place, self._begin)

        def wait() -> None:
            closed.wait(seconds)
            try:
                self._learn(call, number, closed, consensus)
            except Exception as error:
                # Otherwise the error would be lost, and no step would be due any more.
                consensus.fail(error)

        # Start the thread first, so that the new consensus is not set without a thread that drives it.
        self._consensus, self._thread = None, start_thread(wait, "holdfast-save-every", call.rank)
        self._consensus = consensus

    def _learn(self, call: Call, number: int, closed: threading.Event, consensus: StepConsensus) -> None:
        """Wait for the committer's signal that time is up (or send it), and propose the step to save.

        Raises RosterLost if the message store is gone for `LOST` seconds, or has foreign messages.
        """
        roster, lost_since = call.roster, None
        while True:
            try:
                key = f"due/{life_of(roster, call.participants)}/{self._place}/{number}"
                while call.rank != call.participants[0] and not closed.is_set():
                    if roster.wait(key, POLL):
                        break
                # The first message counts: after a rank has closed, no step becomes due; if time was up
                # before, that rank still has to take part.
                mine = TimeIsUp(not closed.is_set(), call.rank, self._questions)
                word = from_roster(roster.claim(key, to_message(mine)), TimeIsUp)
                break
            except RosterLost as error:
                lost_since = lost_since or time.monotonic()
                is_over = is_foreign(error) or error.details.get("destroyed")
                if closed.is_set():  # then `due` is no longer called
                    return
                if is_over or time.monotonic() - lost_since >= LOST:
                    raise
                closed.wait(POLL)  # the job may be ending, and the host of the store may have ended first
        if word.due:
            consensus.propose()
        elif not closed.is_set():
            self._ended = word
