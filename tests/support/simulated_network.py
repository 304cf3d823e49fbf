"""What simulated ranks see of each other that are on hosts of their own: the real watch over neighbours, on paths
and over a message store that the simulation gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from holdfast._core.base.values import Message
from holdfast._core.roster import neighbours
from holdfast._core.roster.links import Path
from holdfast.errors import RosterLost

if TYPE_CHECKING:
    from tests.support.simulate import World


class SimulatedRoster:
    """What one rank's watch reads and writes in the message store."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.ranks

    def _reach(self) -> None:
        if self.world.lost(self.rank) or self.world.away_for(self.rank):
            raise RosterLost("The message store can't be reached.")

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        self._reach()
        return [self.world.board.get(key) for key in keys]

    def put(self, key: str, message: Message) -> None:
        self._reach()
        self.world.board[key] = message

    def base(self) -> SimulatedRoster:
        return self

    def way(self) -> tuple[str, str]:
        return "host", "store"


class SimulatedLink:
    """A path between two ranks, as `links.Link` shows it."""

    def __init__(self, world: World, here: int, there: int) -> None:
        self.world, self.here, self.there = world, here, there
        self.verified = self.open = False

    def look(self) -> Path:
        path = self._path()
        self.verified = self.verified or path is Path.OPEN
        if path is not Path.ENDED:
            self.open = path is Path.OPEN
        return path if self.verified else Path.UNKNOWN

    def _path(self) -> Path:
        world, faults = self.world, self.world.faults
        both = (self.here, self.there)
        if self.there in world.dead and self.there in faults.host_gone:
            return Path.UNREACHABLE
        if any(map(world.away_for, both)) or any(map(world.is_cut, (both, both[::-1]))):
            return Path.UNREACHABLE
        # Behind a firewall of its own a rank gets no answer; of another's it gets a refusal.
        if world.is_refusing(self.here):
            return Path.UNREACHABLE
        if world.is_refusing(self.there):
            return Path.REFUSED
        if self.there in world.dead:
            return Path.ENDED if self.open else Path.REFUSED
        return Path.OPEN

    def is_up(self) -> bool:
        return self.verified

    def close(self) -> None: ...


class _Listens:
    port = 1

    def __init__(self, *how: Any) -> None: ...

    def accept(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def network(world: World) -> Iterator[None]:
    """Put the simulation's paths, ports and clock under the watches."""

    def link(address: str, port: int, token: str, on_end: Callable[[], None]) -> SimulatedLink:
        return SimulatedLink(world, world.watching, int(token))

    with (
        patch.object(neighbours, "Link", link),
        patch.object(neighbours, "Listener", _Listens),
        patch.object(neighbours, "time", SimpleNamespace(monotonic=world.clock.now)),
    ):
        yield
