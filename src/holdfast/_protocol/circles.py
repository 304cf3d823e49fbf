"""Ranks that wait for each other in a circle, by their own presence messages. Only an error ends it."""

from __future__ import annotations

from holdfast._protocol.effects import Context, Look, Steps
from holdfast._roster.presence import Seen, describe
from holdfast._values import Message

LONGEST = 8
"""Ranks of the longest circle that is looked for."""


class Circles:
    """Looks for a circle that this rank's wait is a part of."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._seen: dict[tuple[int, str], int] = {}
        """The ranks of a circle that was seen, the operations in which they wait, and how often each had
        looked by then whether that is decided."""
        self.broken: set[str] = set()
        """The operations of others in the circle that ends this one."""

    def find(self, seen: dict[int, Seen]) -> Steps:
        """Return a rank that waits, in a wait that it has declared, for one who waits for it.

        An operation is declared by the only thread of its rank that makes any: that thread comes to no other
        operation before this one is over.
        """
        context = self.context
        if not context.blocks and "line" not in context.about:
            return []
        known, me = dict(seen), context.rank
        # A rank, the operations on the way to it (it is waited for in the last one), and the ranks.
        open_: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = [
            (rank, (context.key,), (rank,)) for rank, one in seen.items() if not one.is_in(context.key)
        ]
        for _ in range(2 * LONGEST):
            if not open_:
                break
            rank, keys, way = open_.pop(0)
            if rank not in known:
                known |= yield Look([rank])
            wait, waited_for = self._declared_wait(known[rank], keys[-1])
            for other in waited_for:
                # What this rank does there on another thread goes on.
                if other == me and (wait == context.key or wait not in context.mine()):
                    # Of two saves in line the later one goes on: all can meet in it.
                    in_line = self._are_in_line(known[rank], wait)
                    self.broken = set() if in_line else {wait, *keys} - {context.key}
                    title = _operation(known[rank], wait).get("title", "a later one")
                    note = f"it has left this save out, and is in the {title}" if in_line else ""
                    return (yield from self._sure_of(way, (*keys[1:], wait), known, note))
                if other not in (me, *way) and len(way) < LONGEST:
                    open_.append((other, (*keys, wait), (*way, other)))
        self._seen = {}
        return []

    def _declared_wait(self, seen: Seen, key: str) -> tuple[str, list[int]]:
        """Return the operation on which a rank depends for the one of this key, and the ranks that it waits
        for there; none if it goes on."""
        operations = seen.vitals.operations if seen.vitals is not None else {}
        # In that operation itself or, if it has not come to it, in the one that its only thread is in, or in
        # a later one in line.
        inside = {key: operations[key]} if key in operations else operations
        about = self.context.about
        for name, part in inside.items():
            depends = self.context.blocks and part.get("blocks")
            if part.get("line") is not None and part.get("line") == about.get("line"):
                # Of two steps the earlier one alone is over; one with other arguments is over on both sides.
                depends = self._are_in_line(seen, name) or (depends and part.get("step") == about.get("step"))
            if (name == key or depends) and part.get("waiting_for") and not part.get("decided"):
                return name, list(part["waiting_for"])
        return "", []

    def _are_in_line(self, seen: Seen, wait: str) -> bool:
        """Return whether that operation of a rank comes after this one in a line of saves, and the rank has
        left this one out."""
        about, other = self.context.about, _operation(seen, wait)
        mine, its = about.get("step"), other.get("step")
        return (
            other.get("line") is not None
            and other.get("line") == about.get("line")
            and (isinstance(mine, int) and isinstance(its, int) and mine < its)
            and mine not in other.get("pending", ())
        )

    def _sure_of(
        self, way: tuple[int, ...], waits: tuple[str, ...], known: dict[int, Seen], note: str
    ) -> Steps:
        """Return the first rank of a circle, once each of its ranks has looked twice more whether the
        operation in which it waits is decided. If one of them has left such an operation, it is: who still
        waits in it reads that late, on a busy machine or of a busy message store."""
        looks = _looks(way, waits, known)
        if self._seen.keys() != looks.keys():
            # What was read of the first is older than what was read of the last, so all are read again.
            self._seen = _looks(way, waits, (yield Look(way)))
        elif all(looks[part] >= self._seen[part] + 2 for part in looks):
            return [
                describe(
                    way[0],
                    known[way[0]],
                    self.context.clock.wall(),
                    note or self._text(way, known),
                    self.context.key,
                )
            ]
        return []

    def _text(self, way: tuple[int, ...], known: dict[int, Seen]) -> str:
        parts = []
        for rank, after in zip(way, [*way[1:], self.context.rank], strict=True):
            vitals = known[rank].vitals
            titles = [
                part.get("title", "")
                for part in (vitals.operations.values() if vitals is not None else ())
                if after in (part.get("waiting_for") or ())
            ]
            parts.append(f"rank {rank} waits for rank {after} in {titles[0] if titles else 'another call'}")
        return f"a circle, which nothing can end: {', and '.join(parts)}"


def _operation(seen: Seen, key: str) -> Message:
    return seen.vitals.operations.get(key, {}) if seen.vitals is not None else {}


def _looks(
    way: tuple[int, ...], waits: tuple[str, ...], known: dict[int, Seen]
) -> dict[tuple[int, str], int]:
    """Return how often each rank has looked whether the operation in which it waits is decided; nothing of a
    rank that is in it no more."""
    return {
        (rank, wait): vitals.operations[wait].get("looks", 0)
        for rank, wait in zip(way, waits, strict=True)
        if (vitals := known[rank].vitals) is not None and wait in vitals.operations
    }
