"""Watch the neighbour ranks of this one, and publish the end of a neighbour's process.

The ranks of a circle watch the one before and the one after each of them: so every rank is watched twice,
however many there are, and where several end at once, those at the edges are seen. Of a process of this
machine /proc tells and a pidfd wakes the heart; to a process of another machine a connection is held open
(`links`), from its first call on. What these show is judged in `lost`.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from holdfast._core.base.deadline import Limits
from holdfast._core.process.heart import heart
from holdfast._core.roster.base import Roster
from holdfast._core.roster.links import Link, Listener
from holdfast._core.roster.lost import Gone, Seen, Signs, end_told, see
from holdfast._core.roster.presence import Vitals, gone_key
from holdfast._core.roster.process import Identity
from holdfast.errors import RosterLost

PASSED = 8
"""Ended ranks on each side of this one that are still polled, because they may send a message again."""
RESTING = 8
"""Maximum connections kept to neighbours of earlier circles."""
KEPT = 4
"""Maximum circles of finished calls whose neighbours on other hosts are still watched."""
HASTY = 20
"""Maximum number of quick polls until a new neighbour on another host is connected."""


class Neighbour:
    """A watched rank."""

    def __init__(self, rank: int, vitals: Vitals, store_address: str, hurry: Callable[[], None]) -> None:
        self.rank, self.vitals = rank, vitals
        self._fd = -1
        self.link: Link | None = None
        who = vitals.who
        if who.is_of_this_machine():
            with suppress(OSError, AttributeError):
                self._fd = os.pidfd_open(who.pid)
                heart.on_readable(self._fd, partial(self._ended, hurry))
        elif who.port:
            # A process on the store's host reaches it, and is reached, by another address from there.
            local = who.address.startswith("127.") or who.address == "::1"
            self.link = Link(store_address if local else who.address, who.port, who.token, hurry)
        self.signs = Signs(who, time.monotonic())

    def _ended(self, hurry: Callable[[], None]) -> None:
        self._forget_fd()
        hurry()

    def is_of(self, vitals: Vitals) -> bool:
        """Return whether this is a message of the same process, at the same port."""
        return (vitals.who.token, vitals.who.port) == (self.vitals.who.token, self.vitals.who.port)

    def look(self, vitals: Vitals | None, lost_after: float, pace: float = 1.0) -> str:
        """Return how its process has ended, or "". vitals: its present message, if the store has answered.
        pace: seconds between two of its messages."""
        path = self.link.look() if self.link is not None else None
        return self.signs.look(path, vitals, lost_after, pace, time.monotonic())

    def close(self) -> None:
        self._forget_fd()
        if self.link is not None:
            self.link.close()

    def _forget_fd(self) -> None:
        if self._fd >= 0:
            heart.forget(self._fd)
            os.close(self._fd)
            self._fd = -1


class Circle(NamedTuple):
    """A ring of ranks in which each watches its neighbours, and the callback for an end."""

    ranks: Sequence[int]
    on_gone: Callable[[int, Gone], None]
    """Called on the heart's thread with a rank that has said its end, or whose process has ended."""


class Watch:
    """This rank's watch over its neighbours. A part of its beacon, which does it at every beat.

    on_port: called with the address and port at which this process listens from now on. hurry: makes the next
        beat come soon. pace: seconds between two messages of a rank.
    """

    def __init__(
        self, who: Identity, on_port: Callable[[str, int], None], hurry: Callable[[], None], pace: float = 1.0
    ) -> None:
        self.lost_after = Limits().lost_after
        self.is_far = False
        """Whether a neighbour has been on another host: such neighbours are also watched between calls."""
        self._who, self._rank, self._on_port, self._hurry, self._pace = who, who.rank, on_port, hurry, pace
        self._circles: dict[object, Circle] = {}
        self._kept: dict[tuple[int, ...], None] = {}
        """Circles of calls that are over, the latest last."""
        self._met: set[int] = set()
        """Ranks whose host (this one or another) is known."""
        self._neighbours: dict[int, Neighbour] = {}
        self._resting: dict[int, Neighbour] = {}
        """Neighbours that are no longer watched, but still connected; latest last."""
        self._over: dict[int, Gone] = {}
        """Ranks that have ended."""
        self._untold: set[int] = set()
        """Ended ranks that are not published in the message store yet."""
        self._hasty = 0
        self._listener: Listener | None = None

    def begin(self, user: object, ranks: Sequence[int], on_gone: Callable[[int, Gone], None]) -> None:
        """Watch the neighbours in a circle of ranks, until `end` of the same user."""
        self._circles[user] = Circle(ranks, on_gone)

    def end(self, user: object) -> None:
        circle = self._circles.pop(user, None)
        if circle is not None and self.is_far:
            ranks = tuple(circle.ranks)
            self._kept.pop(ranks, None)
            self._kept[ranks] = None
            for oldest in list(self._kept)[:-KEPT]:
                self._kept.pop(oldest, None)

    def meet(self, ranks: Sequence[int], roster: Roster) -> None:
        """Find out which neighbours in a circle are on other hosts. On any thread."""
        near, _ = self._around(self._rank, ranks)
        if not self.is_far and not near <= self._met:
            shown = {rank: one.vitals for rank, one in see(roster, sorted(near)).items()}
            self._met |= {rank for rank, vitals in shown.items() if vitals is not None}
            self.is_far = any(vitals and not vitals.who.is_of_this_machine() for vitals in shown.values())

    def beat(self, roster: Roster) -> None:
        """Look at the neighbours."""
        near, passed = self._near()
        seen: dict[int, Seen] = {}
        with suppress(RosterLost):
            seen = see(roster, [*near, *passed])
        for rank in passed:
            if rank in seen and seen[rank].vitals is not None and not seen[rank].ended:
                self._over.pop(rank)  # it has spoken again
                self._untold.discard(rank)
        self._let_rest(near)
        for rank in near:
            self._look_at(rank, seen.get(rank), roster)
        self._listen_if_needed(roster)
        with suppress(RosterLost):
            for rank in list(self._untold):
                roster.base().put(gone_key(rank), msgspec.to_builtins(self._over[rank]))
                self._untold.discard(rank)
        if self._hasty and any(self._is_unlinked(one) for one in self._neighbours.values()):
            self._hasty -= 1
            self._hurry()

    def close(self) -> None:
        """Stop watching; on the heart's thread."""
        for neighbour in (*self._neighbours.values(), *self._resting.values()):
            neighbour.close()
        self._neighbours.clear()
        self._resting.clear()
        self._kept.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._on_port("", 0)

    def near(self) -> list[int]:
        """Return the neighbours that have sent a presence message."""
        return list(self._neighbours)

    def held_here(self) -> list[int]:
        """Return the neighbours on this machine whose heart thread may be blocked."""
        near = self._neighbours.items()
        return [rank for rank, one in near if one.signs.is_quiet and one.vitals.who.is_of_this_machine()]

    def cut_off(self) -> dict[int, float]:
        """Return the currently unreachable neighbours, with the seconds since when."""
        near = list(self._neighbours.items())
        return {rank: one.signs.silent for rank, one in near if one.signs.silent}

    def hears(self) -> list[int]:
        """Return the neighbours whose processes are observably alive, for the presence message."""
        near = list(self._neighbours.items()) if self.is_far else []
        return [rank for rank, one in near if one.signs.is_there]

    def _around(self, rank: int, ranks: Sequence[int]) -> tuple[set[int], set[int]]:
        """Return the nearest ranks before and after one in a circle that have not ended, and those passed."""
        near: set[int] = set()
        passed: set[int] = set()
        ranks = sorted(ranks)
        here = bisect_left(ranks, rank)
        for way in (1, -1):
            others = (ranks[(here + way * steps) % len(ranks)] for steps in range(1, len(ranks)))
            for other in others:
                if other not in self._over:
                    near.add(other)
                    break
                if len(passed) < 2 * PASSED:
                    passed.add(other)
        return near - {rank}, passed

    def _all_circles(self) -> list[Sequence[int]]:
        return [circle.ranks for circle in list(self._circles.values())] + list(self._kept)

    def _near(self) -> tuple[list[int], list[int]]:
        """Return the neighbours of this rank in every circle, and those between that have ended."""
        found = [self._around(self._rank, ranks) for ranks in self._all_circles()]
        near = {rank for some, _ in found for rank in some}
        return sorted(near), sorted({rank for _, some in found for rank in some} - near)

    def _let_rest(self, near: Sequence[int]) -> None:
        """Keep the connections of former neighbours, because they may become neighbours again."""
        for rank in set(self._neighbours) - set(near):
            one = self._neighbours.pop(rank)
            if one.link is None:
                one.close()
            else:
                self._resting[rank] = one
        for rank in list(self._resting)[:-RESTING]:
            self._resting.pop(rank).close()
        for rank in set(self._resting) & set(near):
            self._neighbours[rank] = self._resting.pop(rank)
            self._neighbours[rank].signs.rest(time.monotonic())

    def _look_at(self, rank: int, seen: Seen | None, roster: Roster) -> None:
        vitals = seen.vitals if seen is not None else None
        known = self._neighbours.get(rank)
        if vitals is not None and (known is None or not known.is_of(vitals)):
            if known is not None:
                known.close()
            known = self._neighbours[rank] = Neighbour(rank, vitals, roster.way()[1], self._hurry)
            if not vitals.who.is_of_this_machine():
                self.is_far, self._hasty = True, HASTY
        if seen is not None and (told := end_told(seen)) is not None:
            self._hear(rank, told)
        elif known is not None and (how := known.look(vitals, self.lost_after, self._pace)):
            self._find_gone(rank, known, how, roster)

    def _find_gone(self, rank: int, known: Neighbour, how: str, roster: Roster) -> None:
        # Its neighbour on the other side may have a connection to it.
        others = {
            other for ranks in self._all_circles() if rank in ranks for other in self._around(rank, ranks)[0]
        }
        seen: dict[int, Seen] = {}
        with suppress(RosterLost):  # its last word may have come after it was looked at
            seen = see(roster, [rank, *sorted(others - {rank, self._rank})])
        latest = seen.pop(rank, Seen())
        if (told := end_told(latest)) is not None:
            self._hear(rank, told)
        elif (gone := known.signs.confirm(how, latest.vitals, seen, self._pace)) is not None:
            self._untold.add(rank)
            self._hear(rank, gone)

    def _hear(self, rank: int, gone: Gone) -> None:
        self._over[rank] = gone
        for circle in list(self._circles.values()):
            if rank in circle.ranks:
                circle.on_gone(rank, gone)

    @staticmethod
    def _is_unlinked(one: Neighbour) -> bool:
        return not one.vitals.who.is_of_this_machine() and not (one.link is not None and one.link.is_up())

    def _listen_if_needed(self, roster: Roster) -> None:
        """Open the port, once a neighbour of another machine needs it; the next beat publishes it."""
        if self._listener is not None:
            self._listener.accept()
            return
        others = any(not one.vitals.who.is_of_this_machine() for one in self._neighbours.values())
        address = roster.way()[0] if others else ""
        if address:
            with suppress(OSError):  # then the kernel tells nothing of this process to other hosts
                self._listener = Listener(address, self._who.token, self._hurry)
                self._on_port(address, self._listener.port)
                self._hurry()
