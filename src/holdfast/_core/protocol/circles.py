"""Deadlock detection: cycles of ranks that wait for each other, found from their presence messages."""

from __future__ import annotations

from holdfast._core.base.values import Message
from holdfast._core.protocol.effects import Context, Look, Steps
from holdfast._core.roster.lost import Seen, describe

CIRCLE = "a circle, which nothing can end"
"""How the description of a rank in a confirmed cycle begins."""
LONGEST = 8
"""Maximum number of ranks in a cycle."""


class Circles:
    """Searches for a wait cycle that includes this rank's current wait."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._seen: dict[tuple[int, str], int] = {}
        """The cycle found last: (rank, key of the operation in which it waits) -> how many times the rank had
        polled for its outcome by then."""
        self.broken: set[str] = set()
        """Keys of the other operations in a confirmed cycle, to be abandoned with this one."""

    def find(self, seen: dict[int, Seen]) -> Steps:
        """Return a description of the first rank of a confirmed cycle, as a list of one; else an empty list.

        Only operations of ranks that make all calls from one thread count (`blocks`), and saves in a line:
        such a thread starts no other operation before its current one is over.
        """
        context = self.context
        if not context.blocks and "line" not in context.about:
            return []
        known, me = dict(seen), context.rank
        # Breadth-first search: a rank; the operations on the path to it (the last one waits for it); the
        # path.
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
                # This rank may also be in that operation on another thread, which makes progress.
                if other == me and (wait == context.key or wait not in context.mine()):
                    # Of two saves in a line only the earlier one is abandoned: all ranks can still meet in
                    # the later.
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
        """Return the operation that blocks a rank from the one of this key, and the ranks that it waits for
        there; ("", []) if nothing blocks it."""
        operations = seen.vitals.operations if seen.vitals is not None else {}
        # The operation itself; or, if the rank has not entered it, the one that its only thread is in, or a
        # later save of the line.
        inside = {key: operations[key]} if key in operations else operations
        about = self.context.about
        for name, part in inside.items():
            depends = self.context.blocks and part.get("blocks")
            if part.get("line") is not None and part.get("line") == about.get("line"):
                # Different steps: only the save of the earlier step fails. Same step, other arguments: both
                # fail.
                depends = self._are_in_line(seen, name) or (depends and part.get("step") == about.get("step"))
            if (name == key or depends) and part.get("waiting_for") and not part.get("decided"):
                return name, list(part["waiting_for"])
        return "", []

    def _are_in_line(self, seen: Seen, wait: str) -> bool:
        """Return whether the rank's operation `wait` is a later save of the same line, and the rank skipped
        this one."""
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
        """Return the first rank of a cycle once it is confirmed: each of its ranks has polled twice more for
        the outcome of the operation in which it waits. Otherwise an operation may already be decided, with a
        rank that has not read the outcome yet (a busy machine, a busy message store)."""
        looks = _looks(way, waits, known)
        if self._seen.keys() != looks.keys():
            # The presence messages were read at different times, so read all of them again.
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
        return f"{CIRCLE}: {', and '.join(parts)}"


def _operation(seen: Seen, key: str) -> Message:
    return seen.vitals.operations.get(key, {}) if seen.vitals is not None else {}


def _looks(
    way: tuple[int, ...], waits: tuple[str, ...], known: dict[int, Seen]
) -> dict[tuple[int, str], int]:
    """For each rank of the cycle: how many times it has polled for the outcome of the operation it waits in.
    Ranks that have left that operation are omitted."""
    return {
        (rank, wait): vitals.operations[wait].get("looks", 0)
        for rank, wait in zip(way, waits, strict=True)
        if (vitals := known[rank].vitals) is not None and wait in vitals.operations
    }
