"""Watch the ranks beside this one, and tell all others when the kernel says that one has ended.

The ranks of a circle watch the one before and the one after each of them: so every rank is watched twice,
however many there are, and where several end at once, those at the edges are seen. Of a process of this
machine /proc tells and a pidfd wakes the heart; to a process of another machine a connection is held open
(`links`).

A host that does not answer may be cut off for a moment, or be overloaded: its ranks count as gone only when
it has not answered for `lost_after` seconds in which the rank has not renewed its message either.
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

from holdfast._heart import heart
from holdfast._roster.base import Roster
from holdfast._roster.links import Link, Listener, Path
from holdfast._roster.presence import Gone, Seen, Vitals, gone_key, see
from holdfast._roster.process import Identity
from holdfast.errors import RosterLost

LOST_AFTER = 120.0
"""Seconds after which a host that does not answer counts as gone."""
LONGEST_TURN = 5.0
"""Seconds between two looks that count towards `lost_after` at most: more is this process's own absence. In
a large world, twice the pace of its looks."""


class Neighbour:
    """One rank that this one watches."""

    def __init__(self, rank: int, vitals: Vitals, store_address: str, hurry: Callable[[], None]) -> None:
        self.rank, self.vitals = rank, vitals
        self._fd = -1
        self._link: Link | None = None
        who = vitals.who
        if who.is_of_this_machine():
            with suppress(OSError, AttributeError):
                self._fd = os.pidfd_open(who.pid)
                heart.on_readable(self._fd, partial(self._ended, hurry))
        elif who.port:
            # A process on the store's host reaches it, and is reached, by another address from there.
            local = who.address.startswith("127.") or who.address == "::1"
            self._link = Link(store_address if local else who.address, who.port, who.token, hurry)
        self.silent = 0.0
        """Seconds for which its host has not answered, over a path that it has answered before."""
        self._beat, self._looked = -1, time.monotonic()
        self.is_quiet = False
        """Has it not renewed its message between the last two looks?"""

    def _ended(self, hurry: Callable[[], None]) -> None:
        self._forget_fd()
        hurry()

    def is_of(self, vitals: Vitals) -> bool:
        """Return whether this is a message of the same process, at the same port."""
        return (vitals.who.token, vitals.who.port) == (self.vitals.who.token, self.vitals.who.port)

    def look(self, vitals: Vitals | None, lost_after: float, longest_turn: float = LONGEST_TURN) -> str:
        """Return how its process has ended, or "". vitals: its present message, if the store has answered."""
        beat = self._beat if vitals is None else vitals.beat
        self.is_quiet, self._beat = beat == self._beat, beat
        if self._link is None:
            who = self.vitals.who
            return who.how_it_ended() if who.is_of_this_machine() and not who.state() else ""
        path = self._link.look()
        now = time.monotonic()
        if path is Path.UNREACHABLE and self.is_quiet:
            self.silent += min(now - self._looked, longest_turn)
        else:
            self.silent = 0.0
        self._looked = now
        if path is Path.ENDED:
            return "its process has ended"
        if self.silent >= lost_after:
            return f"its host has not answered for {self.silent:.0f} s"
        return ""

    def close(self) -> None:
        self._forget_fd()
        if self._link is not None:
            self._link.close()

    def _forget_fd(self) -> None:
        if self._fd >= 0:
            heart.forget(self._fd)
            os.close(self._fd)
            self._fd = -1


class Circle(NamedTuple):
    """Ranks that watch each other, and who hears of an end."""

    ranks: Sequence[int]
    on_gone: Callable[[int, Gone], None]
    """Called on the heart's thread with a rank that has said its end, or whose process has ended."""


class Watch:
    """This rank's watch over its neighbours. A part of its beacon, which does it at every beat.

    on_port: called with the address and port at which this process listens from now on. hurry: makes the next
        beat come soon.
    """

    def __init__(self, who: Identity, on_port: Callable[[str, int], None], hurry: Callable[[], None]) -> None:
        self.lost_after, self.longest_turn = LOST_AFTER, LONGEST_TURN
        self._who, self._rank, self._on_port, self._hurry = who, who.rank, on_port, hurry
        self._circles: dict[object, Circle] = {}
        self._neighbours: dict[int, Neighbour] = {}
        self._over: dict[int, Gone] = {}
        """Ranks that have ended."""
        self._untold: set[int] = set()
        """Of these, the ranks that the store has not heard of yet."""
        self._listener: Listener | None = None

    def begin(self, user: object, ranks: Sequence[int], on_gone: Callable[[int, Gone], None]) -> None:
        """Watch the neighbours in a circle of ranks, until `end` of the same user."""
        self._circles[user] = Circle(ranks, on_gone)

    def end(self, user: object) -> None:
        self._circles.pop(user, None)

    def beat(self, roster: Roster) -> None:
        """Look at the neighbours."""
        near = self._near()
        seen: dict[int, Seen] = {}
        with suppress(RosterLost):
            seen = see(roster, near)
        for rank in set(self._neighbours) - set(near):
            self._neighbours.pop(rank).close()
        for rank in near:
            self._look_at(rank, seen.get(rank), roster)
        self._listen_if_needed(roster)
        with suppress(RosterLost):
            for rank in list(self._untold):
                roster.base().put(gone_key(rank), msgspec.to_builtins(self._over[rank]))
                self._untold.discard(rank)

    def close(self) -> None:
        """Stop watching; on the heart's thread."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        self._neighbours.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._on_port("", 0)

    def near(self) -> list[int]:
        """Return the neighbours that have shown themselves."""
        return list(self._neighbours)

    def held_here(self) -> list[int]:
        """Return the neighbours on this machine whose heart may not run."""
        near = self._neighbours.items()
        return [rank for rank, one in near if one.is_quiet and one.vitals.who.is_of_this_machine()]

    def cut_off(self) -> dict[int, float]:
        """Return the neighbours whose host does not answer now, and for how many seconds."""
        return {rank: one.silent for rank, one in list(self._neighbours.items()) if one.silent}

    def _near(self) -> list[int]:
        """Return the nearest ranks before and after this one that have not ended, in every circle."""
        near: set[int] = set()
        for circle in list(self._circles.values()):
            ranks = sorted(circle.ranks)
            here = bisect_left(ranks, self._rank)
            for way in (1, -1):
                others = (ranks[(here + way * steps) % len(ranks)] for steps in range(1, len(ranks)))
                near |= {next((rank for rank in others if rank not in self._over), self._rank)}
        return sorted(near - {self._rank})

    def _look_at(self, rank: int, seen: Seen | None, roster: Roster) -> None:
        vitals = seen.vitals if seen is not None else None
        known = self._neighbours.get(rank)
        if vitals is not None and (known is None or not known.is_of(vitals)):
            if known is not None:
                known.close()
            known = self._neighbours[rank] = Neighbour(rank, vitals, roster.way()[1], self._hurry)
        if vitals is not None and vitals.ended:
            self._hear(rank, Gone(vitals.who.token, vitals.ended, clean=True))
        elif seen is not None and seen.gone is not None:  # another neighbour was first
            self._hear(rank, seen.gone)
        elif known is not None and (how := known.look(vitals, self.lost_after, self.longest_turn)):
            self._find_gone(rank, known, how, roster)

    def _find_gone(self, rank: int, known: Neighbour, how: str, roster: Roster) -> None:
        latest: Seen | None = None
        with suppress(RosterLost):  # its last word may have come after it was looked at
            latest = see(roster, [rank])[rank]
        if latest is not None and latest.vitals is not None and latest.vitals.ended:
            self._hear(rank, Gone(known.vitals.who.token, latest.vitals.ended, clean=True))
            return
        who = known.vitals.who
        self._untold.add(rank)
        self._hear(rank, Gone(who.token, how, who.is_of_this_machine() and who.exited_with_0()))

    def _hear(self, rank: int, gone: Gone) -> None:
        self._over[rank] = gone
        for circle in list(self._circles.values()):
            if rank in circle.ranks:
                circle.on_gone(rank, gone)

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
