"""Which steps are saved: one in every so many, or the next one after so much time, the same on all ranks."""

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
"""Seconds between two looks whether the run was closed, while the committer's time is waited for."""
LOST = 30.0
"""Seconds for which the message store may be gone before the next question raises that."""
GRACE = 5.0
"""Seconds that `close` waits for ranks that are choosing a step."""
_rounds: WeakKeyDictionary[Roster, Counter[str]] = WeakKeyDictionary()
"""How many times of a run a roster has waited for already: the same on all ranks. What says that one is up
stays in the roster."""


class SaveTimes:
    """Answers `due(step)`, which all ranks ask in the same order, once for each step of their loop.

    With a timedelta, the clock of the committer (the lowest participant) alone says when time is up. On each
    rank a thread learns of it, and the ranks agree on the step by messages that no training step waits for.
    """

    def __init__(self, every: int | timedelta | None, place: str, begin: Callable[[], Call]) -> None:
        """place: names the run among all that the ranks agree on. begin: makes a call of all participants."""
        check_interval("save_every", every)
        self._every, self._place, self._begin = every, place, begin
        self._asked: tuple[int, bool] | None = None
        self._questions = 0
        """Steps that were asked for since the last save was due."""
        self._ended: TimeIsUp | None = None
        """The word of a rank that has closed its run before the others."""
        self._consensus: StepConsensus | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def due(self, step: int) -> bool:
        """Return whether this step is to be saved. The last step may be asked for again."""
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
        # A rank that is only a little slower asks for no step that the other one has not asked for.
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
        """Stop the clock; the next question starts it again. Waits until no rank waits for this one."""
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
                # Nobody else tells of it: no step would be due any more.
                consensus.fail(error)

        # The thread first: without it the next question must ask for one again.
        self._consensus, self._thread = None, start_thread(wait, "holdfast-save-every", call.rank)
        self._consensus = consensus

    def _learn(self, call: Call, number: int, closed: threading.Event, consensus: StepConsensus) -> None:
        """Wait for the committer's word that time is up, or give it, and propose the step to save.

        Raises RosterLost if the message store is gone for `LOST` seconds, or a stranger has written there.
        """
        roster, lost_since = call.roster, None
        while True:
            try:
                key = f"due/{life_of(roster, call.participants)}/{self._place}/{number}"
                while call.rank != call.participants[0] and not closed.is_set():
                    if roster.wait(key, POLL):
                        break
                # The first word counts: after a rank has closed, time is up for nobody; if it was up before,
                # that rank still has to answer.
                mine = TimeIsUp(not closed.is_set(), call.rank, self._questions)
                word = from_roster(roster.claim(key, to_message(mine)), TimeIsUp)
                break
            except RosterLost as error:
                lost_since = lost_since or time.monotonic()
                is_over = is_foreign(error) or error.details.get("destroyed")
                if closed.is_set():  # then nobody asks any more
                    return
                if is_over or time.monotonic() - lost_since >= LOST:
                    raise
                closed.wait(POLL)  # the end of the job may be near, and the rank with the store be first
        if word.due:
            consensus.propose()
        elif not closed.is_set():
            self._ended = word
