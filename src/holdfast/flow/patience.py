"""How long a rank waits for others, and what it says of them when it has waited long enough."""

from __future__ import annotations

from holdfast.deadline import StallTimer
from holdfast.errors import DeadlineExceeded, RankFailed, RankInfo
from holdfast.flow.effects import Alive, Context, Get, Steps
from holdfast.roster.base import Message
from holdfast.roster.presence import at_key, describe

ASK = 64
"""Keys asked for at once."""
QUOTED = 8
"""Ranks that an error or a presence message lists."""
COURTESY = 0.5
"""Seconds past the deadline that other ranks leave the committer, which knows best who is missing."""


class Watch:
    """An eye on ranks that are waited for: gone, stalled, or out of time."""

    LOOK_EVERY = 0.25

    def __init__(self, at: Context) -> None:
        self.at = at
        self.timers: dict[int, StallTimer] = {}
        self.next_look = at.clock.now() + self.LOOK_EVERY / 2
        self.rounds = 0
        self.turn = 0

    def patience(self) -> float:
        """How long to pause before looking again: short at first, longer in a long wait."""
        self.rounds += 1
        limit = min(self.LOOK_EVERY, self.at.stall_timeout / 4)
        return max(0.001, min(0.01 * 1.3**self.rounds, limit, self.at.deadline.left() + 0.05))

    def look(self, ranks: list[int], what: str) -> Steps:
        at = self.at
        now = at.clock.now()
        if now < self.next_look and not at.deadline.passed():
            return
        self.next_look = now + min(self.LOOK_EVERY, at.stall_timeout / 4)
        if len(ranks) > 4 * ASK:  # large worlds are looked at in turns
            self.turn = (self.turn + 4 * ASK) % len(ranks)
            ranks = (ranks[self.turn :] + ranks[: self.turn])[: 4 * ASK]
        messages = yield Get([at_key(rank) for rank in ranks])
        here = dict(zip(ranks, messages, strict=True))
        lost: list[RankInfo] = []
        for rank, message in here.items():
            timer = self.timers.setdefault(rank, StallTimer(at.stall_timeout, at.clock))
            if message is not None:
                if (yield Alive(message)) is False:
                    lost.append(describe(rank, message, at.clock.wall(), "its process has ended"))
                    continue
                inside = message.get("operation") == at.key
                lives = (inside and message.get("waiting_for") is not None) or message.get("resident")
                beating = message.get("beat") if lives else None
                timer.see((message.get("operation"), message.get("phase"), message.get("progress"), beating))
            if timer.stalled():
                quiet = f"no progress for {timer.quiet_for():.1f} s"
                lost.append(describe(rank, message, at.clock.wall(), self._where(message) or quiet))
        if lost:
            raise self._failed(lost, what, RankFailed)
        if at.deadline.passed() and (at.leads or now >= at.deadline.at + COURTESY):
            waits_for = self._waits_for(here.get(at.committer)) if not at.leads else []
            if waits_for:  # the committer itself only waits: name those that it waits for
                messages = yield Get([at_key(rank) for rank in waits_for])
                here, what = dict(zip(waits_for, messages, strict=True)), f"let rank {at.committer} go on"
            out = [
                describe(rank, message, at.clock.wall(), self._where(message))
                for rank, message in here.items()
            ]
            raise self._failed(out, what, DeadlineExceeded)

    def _waits_for(self, message: Message | None) -> list[int]:
        """Whom a rank in this very operation waits for, as it says itself."""
        if message is None or message.get("operation") != self.at.key:
            return []
        return [
            rank
            for rank in message.get("waiting_for") or ()
            if rank in self.at.participants and rank != self.at.rank
        ]

    def _where(self, message: Message | None) -> str:
        if message is None:
            return f"it never entered {self.at.title}"
        if message.get("operation") != self.at.key:
            return f"it has not entered {self.at.title}"
        return ""

    def _failed(self, infos: list[RankInfo], what: str, kind: type[RankFailed]) -> RankFailed:
        at = self.at
        shown = "; ".join(str(info) for info in infos[:QUOTED]) + (
            f"; and {len(infos) - QUOTED} more" if len(infos) > QUOTED else ""
        )
        why = "the deadline passed" if kind is DeadlineExceeded else "a rank was given up"
        waited = at.deadline.elapsed()
        return kind(
            f"{at.title} failed after {waited:.1f} s, {why} while rank {at.rank} waited for "
            f"{'rank ' + str(infos[0].rank) if len(infos) == 1 else str(len(infos)) + ' ranks'} to {what}: {shown}.",
            step=at.step,
            phase=at.phase,
            rank=infos[0].rank,
            missing=tuple(infos),
            hint=at.hint,
        )
