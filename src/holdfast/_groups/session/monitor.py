"""The monitor of a session: detects the first failure on any rank, beside training, without collectives.

The beacon of the rank publishes it, and reports ended neighbour processes to it (`neighbours`). A rank that
raises, or sees a neighbour's process end, claims one key with the error; the first claim is the error of all
ranks. The session is not ended by a silent process that is alive, by a message store that does not answer, or
by a rank that ends successfully.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import Message
from holdfast._core.roster.base import Roster, get_ours
from holdfast._core.roster.beacon import Presence
from holdfast._core.roster.lost import Gone, Seen, Stalls, describe, host_of_store, see, store_silence
from holdfast._core.roster.presence import Vitals
from holdfast._core.roster.whereabouts import PATIENCE, Inquiry
from holdfast.errors import HoldfastError, RankFailed, RankInfo, RosterLost, from_message

log = logging.getLogger("holdfast")


class Monitor:
    """The part of one rank in a session.

    host: the vitals of the rank that hosts the message store; None if no rank does. stall_timeout: seconds of
        silence after which even a live neighbour counts as failed; None: never. on_failure: called
        once, on a thread of its own, with the error that ends the session on all ranks.
    """

    def __init__(
        self,
        roster: Roster,
        key: str,
        host: Vitals | None,
        stall_timeout: float | None,
        on_failure: Callable[[HoldfastError], None],
    ) -> None:
        self.roster, self.key, self.host = roster, key, host
        self.failure: HoldfastError | None = None
        self.presence = Presence(roster, "session", range(roster.world_size))
        self.presence.phase = "in its body"
        self.presence.look, self.presence.on_gone = self._look, self._on_gone
        self.presence.on_lost = self._on_lost
        self._bounded = roster.bounded()
        self._on_failure, self._looked = on_failure, time.monotonic()
        self._stalls = None if stall_timeout is None else Stalls(stall_timeout)
        self._silent_since: float | None = None
        """Since when the message store does not answer."""
        self._said_silent = self._over = False
        self._lock = threading.Lock()

    @property
    def server(self) -> int | None:
        """The rank that hosts the message store; None if no rank does."""
        return self.host.who.rank if self.host is not None else None

    def start(self) -> None:
        """Show this rank in the session, from now to `stop`."""
        self.presence.begin(self.key, beats=True)

    def stop(self) -> None:
        """Stop monitoring for failures. Ranks that wait for this one now wait for its announcements
        (`say`)."""
        self._over = True

    def leave(self) -> None:
        """Remove the session from this rank's presence message."""
        self.presence.stop()

    # -- on any thread, in bounded time ---------------------------------------------------------

    def fail(self, error: HoldfastError) -> bool:
        """End the session on all ranks with this error. Return False if another error was first.

        `failure` is the first error then.
        """
        # Two ranks may fail with the same text, so a token tells whose claim won.
        mine = {**error.to_message(), "claim": f"{self.roster.rank}-{secrets.token_hex(4)}"}
        standing = mine
        with suppress(RosterLost):  # this rank knows only its own failure, so that counts as the first
            standing = self._bounded.claim(f"{self.key}/failed", mine)
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = from_message(standing)
        return bool(standing["claim"] == mine["claim"])

    def look(self) -> None:
        """Check now whether a rank has failed."""
        with suppress(RosterLost):
            self._look(self._bounded)

    def say(self, what: str) -> None:
        """Announce that this rank has `raised` an error, has `heard` of a failure, or has `left`."""
        with suppress(RosterLost):
            self._bounded.put(f"{self.key}/{what}/{self.roster.rank}", {"at": time.time()})

    def wait_for(self, what: str, ranks: Sequence[int], ends: float) -> list[int]:
        """Wait until each of these ranks has announced `what` or `left`, or its process has ended; at most
        until the monotonic time `ends`. Return the remaining ranks."""
        waiting = list(ranks)
        try:
            while waiting:
                some = waiting[:256]
                said = get_ours(
                    self._bounded, [f"{self.key}/{word}/{rank}" for word in (what, "left") for rank in some]
                )
                heard = {rank for rank, message in zip(some * 2, said, strict=True) if message is not None}
                silent = [rank for rank in some if rank not in heard]
                # An ended process announces nothing more, so don't wait for it.
                heard |= {rank for rank, one in see(self._bounded, silent).items() if one.there is False}
                waiting = [rank for rank in waiting if rank not in heard]
                if not heard:
                    if time.monotonic() >= ends:
                        break
                    time.sleep(min(0.05, max(0.0, ends - time.monotonic())))
        except RosterLost:
            return []
        return waiting

    def decide(self, what: str, mine: str) -> str:
        """Return the value that all ranks agree on: that of the first rank to call. If the message store is
        lost, this rank's own (`mine`)."""
        try:
            return str(self._bounded.claim(f"{self.key}/{what}", {"word": mine})["word"])
        except RosterLost:
            return mine

    def known(self, rank: int) -> Vitals | None:
        """Return the presence message of a rank."""
        try:
            return see(self._bounded, [rank])[rank].vitals
        except RosterLost:
            return self.host if self.host is not None and self.host.who.rank == rank else None

    def ask_where(self, ranks: Sequence[int], here: str) -> tuple[RankInfo, ...]:
        """Ask ranks for their stacks; return those that answer and are not in the call `here`.

        Ranks that have `raised` an error are left out: they may have been in that call until then.
        """
        others = [rank for rank in ranks if rank != self.roster.rank]
        try:
            seen = see(self._bounded, others)
            inquiry = Inquiry(self._bounded)
            inquiry.ask([rank for rank in others if not seen[rank].ended], seen)
            where = inquiry.answers(others, seen, PATIENCE)
            # Read last: a rank may raise while it is asked.
            raised = get_ours(self._bounded, [f"{self.key}/raised/{rank}" for rank in others])
        except RosterLost:
            return ()
        where |= {rank: one.ended for rank, one in seen.items() if one.ended}
        for rank, message in zip(others, raised, strict=True):
            if message is not None:
                where.pop(rank, None)
        away = [rank for rank, place in where.items() if place and (not here or here not in place)]
        return tuple(
            msgspec.structs.replace(describe(rank, seen[rank], time.time(), key=self.key), at=where[rank])
            for rank in sorted(away)
        )

    def set_failure(self, error: HoldfastError) -> None:
        """Record the failure that ends the session, if it is the first, and begin to end the session."""
        with self._lock:
            if self.failure is not None or self._over:
                return
            self.failure = error
        try:
            start_thread(lambda: self._on_failure(error), "holdfast-session", self.roster.rank)
        except HoldfastError:  # no more threads: the heart ends the session, and nothing else after that
            self._on_failure(error)

    # -- on the heart's thread ------------------------------------------------------------------

    def _look(self, roster: Roster) -> None:
        failed = get_ours(self._bounded, [f"{self.key}/failed"])[0]
        if self._said_silent:
            log.warning(
                "The message store answers again, after %.0f s.", time.monotonic() - (self._silent_since or 0)
            )
        self._silent_since, self._said_silent = None, False
        if failed is not None:
            self.set_failure(from_message(failed))
        elif self._stalls is not None:
            self._give_up_silent(self._stalls)

    def _give_up_silent(self, stalls: Stalls) -> None:
        """Treat neighbours as failed that have not renewed their message within `stall_timeout`."""
        before, self._looked = self._looked, time.monotonic()
        stalls.forgive(self._looked - before - self.presence.beacon.interval)
        for rank, seen in see(self._bounded, self.presence.beacon.watch.near()).items():
            quiet = stalls.note(rank, seen.vitals.beat if seen.vitals is not None else None)
            if quiet is not None and not seen.ended:
                self._claim(rank, seen, f"silent for {quiet:.0f} s (stall_timeout)")

    def _on_gone(self, rank: int, gone: Gone) -> None:
        if gone.clean or self._over:
            return
        seen = Seen()
        with suppress(RosterLost):
            seen = see(self._bounded, [rank])[rank]
        self._claim(rank, seen, gone.how)

    def _claim(self, rank: int, seen: Seen, why: str) -> None:
        info = describe(rank, seen, time.time(), why)
        error = RankFailed(
            f"The session ended because of {info}.",
            rank=rank,
            missing=(info,),
            hint="Look at that rank's log.",
        )
        standing: Message = {**error.to_message(), "claim": ""}
        with suppress(RosterLost):
            standing = self._bounded.claim(f"{self.key}/failed", standing)
        self.set_failure(from_message(standing))

    def _on_lost(self, error: RosterLost) -> None:
        """Record that the message store does not answer. Only the end of its host process ends the
        session."""
        self._silent_since = self._silent_since or time.monotonic()
        silent = time.monotonic() - self._silent_since
        watch, rank, seen = self.presence.beacon.watch, self.server, Seen()
        if self.host is not None:
            seen = host_of_store(self.host, error, silent, watch.lost_after, rank in watch.hears())
        if rank is not None and rank != self.roster.rank and not self._over and seen.ended:
            info = describe(rank, seen, time.time(), f"{seen.ended}, and the message store with it")
            self.set_failure(RankFailed(f"The session ended because of {info}.", rank=rank, missing=(info,)))
            return
        if silent >= self.presence.beacon.report_after and not self._said_silent:
            self._said_silent = True
            said = store_silence(self.host, error, silent)
            log.warning(
                "%s Until it answers, ranks can't see each other; training goes on.",
                said[:1].upper() + said[1:],
            )
