"""Failure detection during a wait for other ranks (`roster.lost` judges them), and reports about long waits.

docs/failure-model.md has a table of what ends a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from holdfast._core.base.values import Message
from holdfast._core.protocol.circles import CIRCLE, Circles
from holdfast._core.protocol.effects import Claim, Context, Late, Look, Steps, abandon
from holdfast._core.roster.lost import Seen, Stalls, describe
from holdfast._core.roster.presence import pace, spread
from holdfast._core.roster.whereabouts import ASK_BEFORE
from holdfast.errors import DeadlineExceeded, RankFailed, RankInfo

QUOTED = 8
"""Maximum number of ranks listed in an error or a presence message."""
NO_PART = "If they take no part on purpose, leave them out: job=holdfast.Job(participants=...)."
READS = "and reads its state for it"
COUNTS = "its last call of this kind is its number"
UNEQUAL = (
    "A rank that leaves out a call, or makes one more, misses the others in all later calls of that kind, "
    "until one of another kind or step succeeds on all ranks. Number saves: holdfast.save(step=...)."
)
SAME_CALLS = "All ranks make the same calls in one order, with the same path and step: compare these calls."
UNKNOWN_BEFORE = (
    "A rank that ends before its first call of Holdfast is noticed only after holdfast.install()."
)
LEFT_OUT = "left out"
"""Key in the details of an error: the named ranks are alive, but have not entered the call."""
STALLED = "stalled"
"""Key in the details of an error: the named ranks have made no progress for `stall_timeout`."""
COURTESY = 0.5
"""Seconds past the deadline that other ranks wait for the committer, whose error lists the missing ranks."""


class PeerMonitor:
    """One wait of this rank for others."""

    LOOK_EVERY = 0.25
    """Initial seconds between two polls, except in a large world."""

    def __init__(self, context: Context, what: str) -> None:
        """what: the awaited action of the others, for errors."""
        self.context, self.what = context, what
        self.began = self.looked = context.clock.now()
        # Every other rank polls the committer; only the committer polls all ranks.
        lookers = 1 if context.is_committer else len(context.participants)
        self.seldom = pace(lookers, context.limits.stall_timeout)
        self.interval = min(self.LOOK_EVERY, self.seldom) if self.seldom <= 1.0 else self.seldom
        # The message usually arrives before the first poll, so monitoring costs nothing.
        self.next_look = self.began + self.interval * (1 + spread(context.rank)) / 2
        self.next_report = self.began + context.limits.report_after
        self.instead: Callable[[], Steps] | None = None
        """Protocol steps to run before a report; they may end the wait."""
        self.reports = 0
        self.told: list[RankInfo] = []
        """The ranks named in this rank's last report that have not arrived yet."""
        self.marks: dict[int, object] = {}
        self.moves = 0
        """Number of times that progress of any rank was seen."""
        self.stalls = Stalls(context.limits.stall_timeout, context.clock)
        self.suspects: set[int] = set()
        """Ranks that the last poll found lost; the next poll confirms it."""
        self.circles = Circles(context)

    @property
    def gives_up_at(self) -> float:
        return self.context.deadline.at + (0.0 if self.context.is_committer else COURTESY)

    @property
    def is_due(self) -> bool:
        return self.context.clock.now() >= min(self.next_look, self.gives_up_at)

    def patience(self) -> float:
        """Return the seconds until the next poll."""
        # At most until 0.05 s past the deadline, so that the next poll finds it passed.
        return max(0.001, min(self.next_look, self.gives_up_at + 0.05) - self.context.clock.now())

    def look(self, ranks: Sequence[int], everyone: int = 0) -> Steps:
        """Poll awaited ranks, if a poll is due. Raises RankFailed if one of them can't arrive any more, and
        DeadlineExceeded.

        everyone: the number of awaited ranks, if `ranks` are only some of them.
        """
        if not self.is_due:
            return
        context = self.context
        now = context.clock.now()
        self.stalls.forgive(now - self.looked - self.interval)
        self.interval = min(1.5 * self.interval, self.seldom)
        self.looked, self.next_look = now, now + self.interval
        everyone = everyone or len(ranks)
        seen: dict[int, Seen] = yield Look(ranks)
        context.committer_seen = seen.get(context.committer, context.committer_seen)
        goes_on = [self._goes_on(rank, one) for rank, one in seen.items()]
        self.moves += sum(goes_on)
        if any(goes_on) or context.limits.while_alive:
            context.note_progress()
        gone = {rank: one.ended for rank, one in seen.items() if one.is_lost(context.limits.past_end)}
        lost = [self._describe(rank, seen[rank], how) for rank, how in gone.items()]
        self.circles.broken = set()
        lost += [] if lost else (yield from self.circles.find(seen))
        stalled = [] if lost else self._stalled(seen)
        lost += stalled
        if lost:
            # Its message may have arrived after the caller last checked, so a second poll must confirm the
            # loss.
            names = {info.rank for info in lost}
            if not names <= self.suspects:
                self.suspects, self.next_look = names, now
                return
            error = self._failed(lost, seen, RankFailed, len(lost))
            error.details |= {STALLED: True} if stalled else {}
            for key in self.circles.broken:
                # Abandon all operations of the cycle: without this one, the others would not detect a cycle.
                yield from abandon(key, context.rank, error)
            raise error
        self.suspects = set()
        yield from self._ask_in_time(seen, now)
        if now >= self.gives_up_at:
            yield from self._give_up(seen, everyone)
        yield from self._report(seen, now, everyone)

    def over(self, came: Callable[[int], bool] = lambda rank: True) -> None:
        """Report that ranks named in the last report have arrived. came: a predicate for ranks."""
        here = tuple(info for info in self.told if came(info.rank))
        if here:
            self.told = [info for info in self.told if info not in here]
            self.context.on_late(self._late(here, came=True))

    # -- what is known ------------------------------------------------------------------------------

    def _goes_on(self, rank: int, seen: Seen) -> bool:
        """Record a rank's progress in this operation: its phase, and its counts of bytes or messages. Return
        whether it has changed since the last poll."""
        inside = seen.vitals.operations.get(self.context.key) if seen.vitals is not None else None
        mark = None
        if inside is not None:
            # The committer must not count progress that it passed on itself: two waiting ranks would see
            # progress forever.
            others = 0 if self.context.is_committer else inside.get("others")
            mark = (inside.get("phase"), inside.get("progress"), others)
        before = self.marks.setdefault(rank, mark)
        self.marks[rank] = mark
        return before != mark

    def _stalled(self, seen: dict[int, Seen]) -> list[RankInfo]:
        """Return ranks without progress for `stall_timeout`, if the caller has set one."""
        stalled = []
        for rank, one in seen.items():
            inside = one.vitals.operations.get(self.context.key) if one.vitals is not None else None
            # A rank that itself waits makes no progress: its heartbeat is enough. One that acts (it waits for
            # none in particular) may need any of the others: it has stalled if no rank goes on.
            waits = inside.get("waiting_for") if inside is not None else None
            beat = one.vitals.beat if waits and one.vitals is not None else None
            quiet = self.stalls.note(rank, (self.marks.get(rank), beat, self.moves if waits == [] else 0))
            if quiet is not None:
                why = self._where(one) or f"no progress for {quiet:.1f} s (stall_timeout)"
                stalled.append(self._describe(rank, one, why))
        return stalled

    # -- what is told ---------------------------------------------------------------------------------

    def _ask_in_time(self, seen: dict[int, Seen], now: float) -> Steps:
        """Ask ranks that are close to a timeout for their stacks, so that the error can contain the
        answers."""
        missed = [rank for rank in seen if self.stalls.is_near(rank, ASK_BEFORE)]
        if now >= self.gives_up_at - min(ASK_BEFORE, self.context.deadline.seconds / 2):
            # The error at the deadline names the ranks that the committer waits for.
            waits_for = [] if self.context.is_committer else self._waits_for(seen.get(self.context.committer))
            unseen = [rank for rank in waits_for if rank not in seen][:QUOTED]
            seen = seen | ((yield Look(unseen)) if unseen else {})
            missed += waits_for or list(seen)
        if missed and self.context.inquiry is not None:
            self.context.inquiry.ask(missed[:QUOTED], seen)

    def _report(self, seen: dict[int, Seen], now: float, everyone: int) -> Steps:
        """Log on one rank which ranks are late, with their stacks; request the stacks in time."""
        context = self.context
        if now < self.next_report - ASK_BEFORE or self._committer_reports(seen):
            return
        late = sorted(seen, key=lambda rank: context.suspicion(seen[rank]))[:QUOTED]
        if context.inquiry is not None:
            context.inquiry.ask(late, seen)
        if now < self.next_report:
            return
        if self.instead is not None:
            yield from self.instead()
        self.reports += 1
        self.next_report = now + context.limits.report_after * 2**self.reports
        key = f"{context.key}/told/{self.reports}"
        context.own.add(key)
        if (yield Claim(key, {"rank": context.rank})).get("rank") == context.rank:
            infos = [self._describe(rank, seen[rank], self._state(seen[rank])) for rank in late]
            self.told = self._with_places(infos, seen, 0.0)
            entered = any(one.is_in(context.key) for one in seen.values())
            hint = self._why_not(self.told, entered) if self.reports == 1 else ""
            context.on_late(self._late(tuple(self.told), everyone, hint=hint))
        if context.inquiry is not None:
            context.inquiry.again()

    def _committer_reports(self, seen: dict[int, Seen]) -> bool:
        """Return whether the committer waits for others in this operation, and so makes the report."""
        return not self.context.is_committer and bool(self._waits_for(seen.get(self.context.committer)))

    def _late(
        self, infos: tuple[RankInfo, ...], everyone: int = 0, came: bool = False, hint: str = ""
    ) -> Late:
        waited, left = self.context.clock.now() - self.began, self.context.deadline.left()
        return Late(infos, max(everyone, len(infos)), self.what, waited, left, came, hint)

    def _state(self, seen: Seen) -> str:
        """Describe what a late rank is doing, as far as known."""
        return "; ".join(filter(None, (self._where(seen), seen.held())))

    # -- the end --------------------------------------------------------------------------------------

    def _give_up(self, seen: dict[int, Seen], everyone: int) -> Steps:
        context, what = self.context, self.what
        waits_for = self._waits_for(seen.get(context.committer)) if not context.is_committer else []
        if waits_for:  # the committer itself only waits, so name the ranks that it waits for
            seen = yield Look(waits_for)
            what = f"let rank {context.committer} go on"
        out = [self._describe(rank, one, self._state(one)) for rank, one in seen.items()]
        raise self._failed(out, seen, DeadlineExceeded, len(out) if waits_for else everyone, what)

    def _describe(self, rank: int, seen: Seen, note: str) -> RankInfo:
        return describe(rank, seen, self.context.clock.wall(), note, self.context.key)

    def _waits_for(self, seen: Seen | None) -> list[int]:
        """Return the ranks that a rank waits for in this operation, from its presence message."""
        vitals = seen.vitals if seen is not None else None
        inside = (vitals.operations.get(self.context.key) if vitals is not None else None) or {}
        return [
            rank
            for rank in inside.get("waiting_for") or ()
            if rank in self.context.participants and rank != self.context.rank
        ]

    def _where(self, seen: Seen) -> str:
        """Return why a rank is not in this call, as far as its presence message tells; "" if it is."""
        context, vitals = self.context, seen.vitals
        if vitals is None:
            return f"it never entered {context.title}"
        if context.key in vitals.operations:
            return ""
        if context.about.get("site") in vitals.reads_for:
            return f"it has called {context.title}, {READS}"
        for key, part in [*vitals.operations.items(), (str(vitals.last.get("key")), vitals.last)]:
            reason = self._other_call(key, part, key in vitals.operations)
            if reason:
                return reason
        return f"it has not entered {context.title}"

    def _other_call(self, key: str, part: Message, now: bool) -> str:
        """Describe how another call of a rank relates to this one; "" if kind or place differ."""
        context = self.context
        # A key is `<signature>/<generation>.<number>/<attempt>` (`rendezvous.meet`).
        site, _, number = context.key.rpartition("/")[0].rpartition(".")
        other, _, its = key.rpartition("/")[0].rpartition(".")
        if other == site and its.isdecimal() and its != number:
            return (
                f"it is {'behind' if int(its) < int(number) else 'ahead'}: {COUNTS} "
                f"{int(its) + 1} of {context.title}, this one is number {int(number) + 1}"
            )
        if part.get("site") is not None and part["site"] == context.about.get("site") and other != site:
            return (
                f"{'it is in another call' if now else 'its last call was another one'} of {context.title}, "
                f"with arguments {part.get('arguments')} where rank {context.rank} has "
                f"{context.about.get('arguments')}"
            )
        return ""

    def _with_places(self, infos: list[RankInfo], seen: dict[int, Seen], patience: float) -> list[RankInfo]:
        """Add the stacks of ranks to their infos."""
        inquiry = self.context.inquiry
        quoted = [info.rank for info in infos[:QUOTED] if not seen[info.rank].ended]
        where = inquiry.answers(quoted, seen, patience) if inquiry is not None and quoted else {}
        return [msgspec.structs.replace(info, at=where.get(info.rank, "")) for info in infos]

    def _why_not(self, infos: Sequence[RankInfo], entered: bool) -> str:
        """Return what to do about ranks that are not in this call."""
        if any(info.note.startswith(CIRCLE) for info in infos):
            return SAME_CALLS
        if any(COUNTS in info.note for info in infos):
            return UNEQUAL
        return "" if entered or any(READS in info.note for info in infos) else NO_PART

    def _failed(
        self, infos: list[RankInfo], seen: dict[int, Seen], kind: type[RankFailed], count: int, what: str = ""
    ) -> RankFailed:
        """Return the error about these ranks. count: the number of missing ranks, which may be larger: in a
        large world only some are polled at a time."""
        context = self.context
        # Past the deadline wait 1/8 s more for answers, no longer: the call must return.
        infos = self._with_places(infos, seen, max(0.0, self.gives_up_at - context.clock.now()) + 0.125)
        shown = "; ".join(str(info) for info in infos[:QUOTED]) + (
            f"; and {count - QUOTED} more" if count > QUOTED else ""
        )
        entered = any(seen[info.rank].is_in(context.key) or seen[info.rank].ended for info in infos)
        why = "the deadline passed" if kind is DeadlineExceeded else "a rank was given up"
        whom = f"rank {infos[0].rank}" if count == 1 else f"{count} ranks"
        unknown = any(seen[info.rank].vitals is None for info in infos)
        hints = [context.hint, self._why_not(infos, entered), UNKNOWN_BEFORE if unknown else ""]
        return kind(
            f"{context.title} failed after {context.deadline.elapsed():.1f} s, because {why} while rank "
            f"{context.rank} waited for {whom} to {what or self.what}: {shown}.",
            step=context.step,
            phase=context.phase,
            rank=infos[0].rank,
            missing=tuple(infos),
            hint=" ".join(filter(None, hints)),
            details={} if entered else {LEFT_OUT: True},
        )
