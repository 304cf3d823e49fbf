"""How long a rank waits for others, and what it says of them when it has waited long enough."""

from __future__ import annotations

import msgspec

from holdfast.deadline import StallTimer
from holdfast.errors import DeadlineExceeded, RankFailed, RankInfo
from holdfast.protocol.effects import Alive, Context, Get, Steps
from holdfast.protocol.whereabouts import ASK_BEFORE, PATIENCE
from holdfast.roster.presence import at_key, describe
from holdfast.values import Message

ASK = 64
"""Keys asked for at once."""
QUOTED = 8
"""Ranks that an error or a presence message lists."""
COURTESY = 0.5
"""Seconds past the deadline that other ranks leave the committer, which knows best who is missing."""


class PeerMonitor:
    """An eye on ranks that are waited for: gone, stalled, or out of time."""

    LOOK_EVERY = 0.25

    def __init__(self, context: Context) -> None:
        self.context = context
        self.timers: dict[int, StallTimer] = {}
        # Mostly the message that is waited for comes before the first look, which then costs nothing.
        self.next_look = context.clock.now() + self.LOOK_EVERY / 2
        self.rounds = 0
        self.turn = 0
        self.gives_up_at = context.deadline.at + (0.0 if context.is_committer else COURTESY)

    def patience(self) -> float:
        """How long to pause before looking again: short at first, longer in a long wait."""
        self.rounds += 1
        # A quarter of the stall timeout: a short one is to be kept to. And 0.05 s past the deadline rather
        # than just short of it, because the look after this pause is the one that must find it passed.
        limit = min(self.LOOK_EVERY, self.context.stall_timeout / 4)
        return max(0.001, min(0.01 * 1.3**self.rounds, limit, self.context.deadline.left() + 0.05))

    def look(self, ranks: list[int], what: str) -> Steps:
        context = self.context
        now = context.clock.now()
        if now < self.next_look and not context.deadline.passed():
            return
        self.next_look = now + min(self.LOOK_EVERY, context.stall_timeout / 4)
        everyone = len(ranks)
        # 256 messages per look, four looks per second: each of 10,000 ranks is seen every 10 s.
        if len(ranks) > 4 * ASK:  # large worlds are looked at in turns
            self.turn = (self.turn + 4 * ASK) % len(ranks)
            ranks = (ranks[self.turn :] + ranks[: self.turn])[: 4 * ASK]
        messages = yield Get([at_key(rank) for rank in ranks])
        here = dict(zip(ranks, messages, strict=True))
        lost: list[RankInfo] = []
        there = []
        for rank, message in here.items():
            # Its time begins when it is first waited for: what it did before is none of this rank's business.
            timer = self.timers.setdefault(rank, StallTimer(context.stall_timeout, context.clock))
            if message is not None:
                # None (another host) says nothing; there the timer decides.
                if (yield Alive(message)) is False:
                    lost.append(self._describe(rank, message, "its process has ended"))
                    continue
                timer.see(self._mark(message))
            there.append(rank)
            if timer.stalled():
                quiet = f"no progress for {timer.quiet_for():.1f} s"
                lost.append(self._describe(rank, message, self._where(message) or quiet))
        self._ask(there, here.get(context.committer), now)
        if lost:
            raise self._failed(lost, what, RankFailed, len(lost))
        if now >= self.gives_up_at:
            waits_for = self._waits_for(here.get(context.committer)) if not context.is_committer else []
            if waits_for:  # the committer itself only waits: name those that it waits for
                messages = yield Get([at_key(rank) for rank in waits_for])
                here, what = (
                    dict(zip(waits_for, messages, strict=True)),
                    f"let rank {context.committer} go on",
                )
            out = [self._describe(rank, message, self._where(message)) for rank, message in here.items()]
            raise self._failed(out, what, DeadlineExceeded, len(out) if waits_for else everyone)

    def _ask(self, there: list[int], committer: Message | None, now: float) -> None:
        """Ask those where they are that are about to be given up, and have not ended."""
        context = self.context
        # Asked ahead of time, so that the answer is there when the rank is given up.
        soon = context.stall_timeout - min(ASK_BEFORE, context.stall_timeout / 2)
        missed = [rank for rank in there if self.timers[rank].quiet_for() >= soon]
        # At the deadline `look` names the ranks that the committer waits for. Ask the same ones.
        if now >= self.gives_up_at - ASK_BEFORE:
            missed += (not context.is_committer and self._waits_for(committer)) or there
        context.inquiry.ask(missed[:QUOTED], context.key)

    def _mark(self, message: Message) -> object:
        """The progress mark of a rank, from its presence message: its stall timer is reset when this changes.

        Inside this operation: phase, bytes moved and, while it waits for others, its beat, because a rank
        that waits has nothing else to show. Outside of it: the same of all operations that it is in; the beat
        counts only for a resident one, which has no progress of its own.
        """
        operations: dict[str, Message] = message.get("operations") or {}
        inside = operations.get(self.context.key)
        if inside is None:
            parts = [(key, part.get("phase"), part.get("progress")) for key, part in operations.items()]
            resident = any(part.get("resident") for part in operations.values())
            return parts, message.get("beat") if resident else None
        beats = inside.get("waiting_for") is not None
        return inside.get("phase"), inside.get("progress"), message.get("beat") if beats else None

    def _describe(self, rank: int, message: Message | None, note: str) -> RankInfo:
        return describe(rank, message, self.context.clock.wall(), note, self.context.key)

    def _waits_for(self, message: Message | None) -> list[int]:
        """Whom a rank in this very operation waits for, as it says itself."""
        inside = ((message or {}).get("operations") or {}).get(self.context.key) or {}
        return [
            rank
            for rank in inside.get("waiting_for") or ()
            if rank in self.context.participants and rank != self.context.rank
        ]

    def _where(self, message: Message | None) -> str:
        """Why a rank is not in this call, as far as its message tells; empty if it is."""
        context = self.context
        if message is None:
            return f"it never entered {context.title}"
        operations: dict[str, Message] = message.get("operations") or {}
        if context.key in operations:
            return ""
        last: Message = message.get("last") or {}
        for key, part in [*operations.items(), (str(last.get("key")), last)]:
            said = self._other_call(key, part, key in operations)
            if said:
                return said
        return f"it has not entered {context.title}"

    def _other_call(self, key: str, part: Message, now: bool) -> str:
        """What a rank's call has to do with this one, if it is of the same kind and place."""
        context = self.context
        # A key is `<signature>/<generation>.<number>` (`rendezvous.History.begin`).
        site, _, number = context.key.rpartition(".")
        other, _, its = key.rpartition(".")
        if other == site and its.isdecimal() and its != number:
            behind = int(its) < int(number)
            return (
                f"it is {'behind' if behind else 'ahead'}: its last call of this kind is its number "
                f"{int(its) + 1} of {context.title}, this one is "
                f"number {int(number) + 1}" + (", and the others had given that one up" if behind else "")
            )
        if part.get("site") is not None and part["site"] == context.about.get("site") and other != site:
            return (
                f"{'it is in another call' if now else 'its last call was another one'} of "
                f"{context.title}, with "
                f"arguments {part.get('arguments')} "
                f"where rank {context.rank} has {context.about.get('arguments')}"
            )
        return ""

    def _failed(self, infos: list[RankInfo], what: str, kind: type[RankFailed], count: int) -> RankFailed:
        """The error about these ranks, of `count` that are missing: a large world is looked at in turns."""
        context = self.context
        # At the deadline an answer gets 1/8 s more, no longer: the call must return.
        left = max(0.0, self.gives_up_at - context.clock.now()) + PATIENCE / 4
        said = context.inquiry.answers([info.rank for info in infos[:QUOTED]], left)
        infos = [msgspec.structs.replace(info, at=said.get(info.rank, "")) for info in infos]
        shown = "; ".join(str(info) for info in infos[:QUOTED]) + (
            f"; and {count - QUOTED} more" if count > QUOTED else ""
        )
        why = "the deadline passed" if kind is DeadlineExceeded else "a rank was given up"
        waited = context.deadline.elapsed()
        return kind(
            f"{context.title} failed after {waited:.1f} s, {why} while rank {context.rank} waited for "
            f"{'rank ' + str(infos[0].rank) if count == 1 else str(count) + ' ranks'} to {what}: "
            f"{shown}.",
            step=context.step,
            phase=context.phase,
            rank=infos[0].rank,
            missing=tuple(infos),
            hint=context.hint,
        )
