"""How long a rank waits for others, and the error that it raises about them at the end."""

from __future__ import annotations

import msgspec

from holdfast.deadline import StallTimer
from holdfast.errors import DeadlineExceeded, RankFailed, RankInfo
from holdfast.protocol.effects import Alive, Context, Get, Steps
from holdfast.protocol.whereabouts import ASK_BEFORE, PATIENCE
from holdfast.roster.presence import at_key, describe
from holdfast.values import Message

ASK = 64
"""Keys read at once."""
QUOTED = 8
"""Ranks that an error or a presence message lists."""
COURTESY = 0.5
"""Seconds past the deadline that the other ranks wait for the committer, which knows best who is missing."""


class PeerMonitor:
    """Monitors ranks that are waited for: processes that have ended, stalls, and the deadline."""

    LOOK_EVERY = 0.25

    def __init__(self, context: Context) -> None:
        self.context = context
        self.timers: dict[int, StallTimer] = {}
        # Mostly the message comes before the first look, and then monitoring costs nothing.
        self.next_look = context.clock.now() + self.LOOK_EVERY / 2
        self.rounds = 0
        self.turn = 0
        self.gives_up_at = context.deadline.at + (0.0 if context.is_committer else COURTESY)

    def patience(self) -> float:
        """Return how long to pause before the next look: short at first, longer in a long wait."""
        self.rounds += 1
        # A quarter of the stall timeout, so that short timeouts are kept. The last pause ends 0.05 s past the
        # deadline: the look after it must find that the deadline has passed.
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
            # The stall time of a rank begins when this rank first waits for it.
            timer = self.timers.setdefault(rank, StallTimer(context.stall_timeout, context.clock))
            if message is not None:
                # None: it is on another host, where only the stall timer decides.
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
            if waits_for:  # the committer itself only waits, so name the ranks that it waits for
                messages = yield Get([at_key(rank) for rank in waits_for])
                here, what = (
                    dict(zip(waits_for, messages, strict=True)),
                    f"let rank {context.committer} go on",
                )
            out = [self._describe(rank, message, self._where(message)) for rank, message in here.items()]
            raise self._failed(out, what, DeadlineExceeded, len(out) if waits_for else everyone)

    def _ask(self, there: list[int], committer: Message | None, now: float) -> None:
        """Ask ranks that are about to be given up, and have not ended, where their code is."""
        context = self.context
        # Asked in advance, so that the answer is there when the rank is given up.
        soon = context.stall_timeout - min(ASK_BEFORE, context.stall_timeout / 2)
        missed = [rank for rank in there if self.timers[rank].quiet_for() >= soon]
        # At the deadline `look` names the ranks that the committer waits for. Ask the same ones.
        if now >= self.gives_up_at - ASK_BEFORE:
            missed += (not context.is_committer and self._waits_for(committer)) or there
        if context.inquiry is not None:
            context.inquiry.ask(missed[:QUOTED], context.key)

    def _mark(self, message: Message) -> object:
        """Return the progress mark of a rank, from its presence message: its stall timer is reset when this
        changes.

        Inside this operation: phase, bytes moved and, while it waits for others, its beat, because a waiting
        rank has no other progress. Outside of it: the same of all its operations; the beat counts only for a
        resident one, which has no progress of its own.
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
        """Return the ranks that a rank waits for in this operation, by its own message."""
        inside = ((message or {}).get("operations") or {}).get(self.context.key) or {}
        return [
            rank
            for rank in inside.get("waiting_for") or ()
            if rank in self.context.participants and rank != self.context.rank
        ]

    def _where(self, message: Message | None) -> str:
        """Return why a rank is not in this call, as far as its message tells; empty if it is."""
        context = self.context
        if message is None:
            return f"it never entered {context.title}"
        operations: dict[str, Message] = message.get("operations") or {}
        if context.key in operations:
            return ""
        last: Message = message.get("last") or {}
        for key, part in [*operations.items(), (str(last.get("key")), last)]:
            reason = self._other_call(key, part, key in operations)
            if reason:
                return reason
        return f"it has not entered {context.title}"

    def _other_call(self, key: str, part: Message, now: bool) -> str:
        """Describe how another call of a rank relates to this one; empty if kind or place differ."""
        context = self.context
        # A key is `<signature>/<generation>.<number>` (`rendezvous.History.begin`).
        site, _, number = context.key.rpartition(".")
        other, _, its = key.rpartition(".")
        if other == site and its.isdecimal() and its != number:
            behind = int(its) < int(number)
            return (
                f"it is {'behind' if behind else 'ahead'}: its last call of this kind is its number "
                f"{int(its) + 1} of {context.title}, this one is number {int(number) + 1}"
                + (", and the others had given that one up" if behind else "")
            )
        if part.get("site") is not None and part["site"] == context.about.get("site") and other != site:
            return (
                f"{'it is in another call' if now else 'its last call was another one'} of {context.title}, "
                f"with arguments {part.get('arguments')} where rank {context.rank} has "
                f"{context.about.get('arguments')}"
            )
        return ""

    def _failed(self, infos: list[RankInfo], what: str, kind: type[RankFailed], count: int) -> RankFailed:
        """Return the error about these ranks. `count` is the number of missing ranks: a large world is looked
        at in turns."""
        context = self.context
        # Past the deadline wait 1/8 s more for answers, no longer: the call must return.
        left = max(0.0, self.gives_up_at - context.clock.now()) + PATIENCE / 4
        quoted = [info.rank for info in infos[:QUOTED]]
        answers = context.inquiry.answers(quoted, left) if context.inquiry is not None else {}
        infos = [msgspec.structs.replace(info, at=answers.get(info.rank, "")) for info in infos]
        shown = "; ".join(str(info) for info in infos[:QUOTED]) + (
            f"; and {count - QUOTED} more" if count > QUOTED else ""
        )
        why = "the deadline passed" if kind is DeadlineExceeded else "a rank was given up"
        waited = context.deadline.elapsed()
        return kind(
            f"{context.title} failed after {waited:.1f} s, {why} while rank {context.rank} waited for "
            f"{'rank ' + str(infos[0].rank) if count == 1 else str(count) + ' ranks'} to {what}: {shown}.",
            step=context.step,
            phase=context.phase,
            rank=infos[0].rank,
            missing=tuple(infos),
            hint=context.hint,
        )
