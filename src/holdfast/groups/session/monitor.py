"""The monitor of a session: it sends heartbeats and watches two neighbours, beside training, without
collectives.

Each rank sends heartbeats on a lane of the roster, and watches the rank before and the rank after it. So two
ranks watch every rank, however many there are. A rank that raises, or that sees a neighbour dead or silent,
claims one key with the error; the first claim is the error of all ranks.

The message store may stop answering, and a call of its client then never returns. So the caller's thread asks
only through `Questions`, and a second thread, which asks nothing, notices when the asking thread is stuck.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from holdfast.deadline import REAL_CLOCK, StallTimer
from holdfast.errors import DeadlineExceeded, HoldfastError, RankFailed, RankInfo, RosterLost, from_message
from holdfast.groups.session.questions import Questions
from holdfast.protocol.whereabouts import PATIENCE as WHERE
from holdfast.protocol.whereabouts import Inquiry
from holdfast.roster.base import Roster
from holdfast.roster.presence import Presence, at_key, describe
from holdfast.threads import start_thread
from holdfast.values import Message

T = TypeVar("T")

AT_ONCE = 256
"""Ranks whose keys are read in one question."""
PATIENCE = 5.0
"""Seconds that the message store has for one answer, when a rank is about to end."""


class Monitor:
    """The heartbeat of one rank, and its watch on two neighbours.

    on_failure: called once, on a thread of the monitor, with the error that ends the session on all ranks.
    """

    def __init__(
        self,
        roster: Roster,
        key: str,
        host: Message,
        stall_timeout: float,
        on_failure: Callable[[HoldfastError], None],
    ) -> None:
        self.roster, self.key = roster, key
        self.failure: HoldfastError | None = None
        self.presence = Presence(roster, "session", 1.0)
        self.presence.phase = "in its body"
        self.presence.more = lambda: {"resident": True}
        self._stall, self._on_failure = stall_timeout, on_failure
        # A store answers about ten thousand questions a second, so large worlds ask less often.
        self._interval = min(max(0.5, roster.world_size / 2000), stall_timeout / 4)
        rank, world = roster.rank, roster.world_size
        self._neighbours = sorted({(rank + 1) % world, (rank - 1) % world} - {rank})
        self._timers: dict[int, StallTimer] = {}
        # The last presence message of each rank. Rank 0's is known from the start, as it can't be read once
        # the message store is gone.
        self._seen = {0: host}
        self._questions = Questions()
        self._lost = False
        """Whether the message store has stopped answering."""
        self._beats = threading.Event()
        self._beats.set()
        self._stop = threading.Event()
        self._turned = time.monotonic()
        self._lock = threading.Lock()

    def start(self) -> None:
        # The asking thread first: with it, a rank that can start no more threads can still tell the others.
        self._questions.start("holdfast-session-ask", self.roster.rank)
        self.presence.begin(self.key, None)
        for work, name in ((self._run, "holdfast-session"), (self._guard, "holdfast-session-guard")):
            start_thread(work, name, self.roster.rank)

    def hand_over(self) -> None:
        """Stop the heartbeats: from now on an operation of the session sends them."""
        self._beats.clear()
        self.presence.leave()

    def stop(self) -> None:
        """Stop the threads. Ranks that wait for this one now wait for what it says (`say`)."""
        self._stop.set()

    def ask_no_more(self) -> None:
        """Stop using the message store."""
        self._lost = True
        self._questions.stop()

    # -- on any thread, in bounded time ---------------------------------------------------------

    def fail(self, error: HoldfastError) -> bool:
        """End the session on all ranks with this error. Return False if another error was first.

        `failure` is the first error then.
        """
        # Two ranks may fail with the same text, so a token tells whose claim won.
        mine = {**error.to_message(), "claim": f"{self.roster.rank}-{secrets.token_hex(4)}"}
        # If the store does not answer, this rank knows only its own failure, so that counts as the first.
        standing = self._ask(lambda: self.roster.claim(f"{self.key}/failed", mine), mine)
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = from_message(standing)
        return bool(standing["claim"] == mine["claim"])

    def look(self) -> None:
        """Check now whether a rank has failed or a neighbour is gone."""
        self._ask(self._look, None)

    def say(self, what: str) -> None:
        """Tell the other ranks that this one has `heard` of a failure, or has `left`."""
        self._ask(lambda: self.roster.put(f"{self.key}/{what}/{self.roster.rank}", {"at": time.time()}), None)

    def wait_for(self, what: str, ranks: list[int], ends: float) -> None:
        """Wait until each of these ranks has said `what` or is gone, or until the (monotonic) time `ends`."""
        waiting = list(ranks)
        while waiting and not self._lost and time.monotonic() < ends:
            some = waiting[:AT_ONCE]
            nobody: set[int] = set()
            done = self._ask(lambda: self._have_said(what, some), nobody)  # noqa: B023
            waiting = [rank for rank in waiting if rank not in done]
            if not done:
                time.sleep(0.05)

    def known(self, rank: int) -> Message | None:
        """Return the last presence message of a rank."""
        return self._ask(lambda: self.roster.get([at_key(rank)])[0], self._seen.get(rank))

    def ask_where(self, ranks: list[int], here: str) -> tuple[RankInfo, ...]:
        """Ask ranks where they are; return those that answer and are not in the call `here`."""
        return self._ask(
            lambda: self._elsewhere([rank for rank in ranks if rank != self.roster.rank], here), ()
        )

    def is_alive(self, message: Message) -> bool:
        """Return whether this host can see that the process behind a message is alive."""
        return self.presence.identity.alive(message) is True

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        """Return the answer of the message store, or `otherwise` if it does not come in time.

        The store is not asked again after that.
        """
        if self._lost:
            return otherwise
        try:
            return self._questions.ask(question, min(PATIENCE, self._stall))
        except (RosterLost, DeadlineExceeded):
            self._lost = True
            return otherwise

    # -- on the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                if self._beats.is_set():
                    self.presence.beacon.send()
                self._look()
                self._turned = time.monotonic()
                if self.failure is not None:
                    return
        except RosterLost as error:
            if not self._stop.is_set():
                self._without_store(str(error.message))

    def _guard(self) -> None:
        """Report the failure. Asks nothing, so that nothing can block it."""
        while not self._stop.wait(0.1):
            if self.failure is None and time.monotonic() > self._turned + self._stall + self._interval:
                self._without_store(f"The message store has not answered for {self._stall:g} s.")
            if self.failure is not None:
                self._on_failure(self.failure)
                return

    def _without_store(self, what: str) -> None:
        """Make the loss of the message store the session's failure."""
        self._lost = True
        where = "rank 0 mostly hosts it"
        if self.roster.rank:
            host = self._seen[0]
            alive = self.presence.identity.alive(host)
            state = {True: "is there", False: "has ended", None: "can't be seen from here"}[alive]
            where += f" (host {host.get('host')}, pid {host.get('pid')}), whose process {state}"
        error = RosterLost(f"The session ended because ranks can't reach each other: {what} {where}.")
        with self._lock:
            self.failure = self.failure or error

    def _have_said(self, what: str, ranks: list[int]) -> set[int]:
        """Return the ranks that have said `what`, or whose process has ended."""
        messages = self.roster.get([f"{self.key}/{what}/{rank}" for rank in ranks])
        silent = [rank for rank, message in zip(ranks, messages, strict=True) if message is None]
        presences = self.roster.get([at_key(rank) for rank in silent])
        gone = {
            rank
            for rank, message in zip(silent, presences, strict=True)
            if message is not None and self.presence.identity.alive(message) is False
        }
        # A rank whose process has ended says nothing more, so nobody should wait for it.
        return (set(ranks) - set(silent)) | gone

    def _elsewhere(self, ranks: list[int], here: str) -> tuple[RankInfo, ...]:
        inquiry = Inquiry(self.roster)
        inquiry.ask(ranks, self.key)
        answers = inquiry.answers(ranks, WHERE)
        away = [rank for rank in answers if not here or here not in answers[rank]]
        messages = self.roster.get([at_key(rank) for rank in away])
        infos = [
            describe(rank, message, time.time(), key=self.key)
            for rank, message in zip(away, messages, strict=True)
        ]
        return tuple(msgspec.structs.replace(info, at=answers[info.rank]) for info in infos)

    def _look(self) -> None:
        failure, *messages = self.roster.get([f"{self.key}/failed", *map(at_key, self._neighbours)])
        presences = zip(self._neighbours, messages, strict=True)
        self._seen.update({rank: message for rank, message in presences if message is not None})
        if failure is not None:
            with self._lock:
                self.failure = self.failure or from_message(failure)
            return
        lost: list[tuple[int, Message, str]] = []
        for rank in self._neighbours:
            message = self._seen.get(rank)
            if message is None:
                continue  # every rank was there when the session began, so a message will come
            timer = self._timers.setdefault(rank, StallTimer(self._stall, REAL_CLOCK))
            # The beat, not progress: the monitor knows nothing about training's progress.
            timer.see(message.get("beat"))
            ended = self.presence.identity.alive(message) is False
            if not ended and not timer.stalled():
                continue
            # A rank that has left in order is silent, but not lost.
            if self.roster.get([f"{self.key}/left/{rank}"])[0] is None:
                why = "its process has ended" if ended else f"silent for {timer.quiet_for():.0f} s"
                lost.append((rank, message, why))
        if lost:
            infos = tuple(describe(rank, message, time.time(), why) for rank, message, why in lost)
            error = RankFailed(
                f"The session ended because of {'; '.join(map(str, infos))}.",
                rank=infos[0].rank,
                missing=infos,
                hint="Look at that rank's log.",
            )
            standing = self.roster.claim(f"{self.key}/failed", {**error.to_message(), "claim": ""})
            with self._lock:
                self.failure = self.failure or from_message(standing)
