"""The watch over neighbours: real processes in a ring, and one neighbour on a clock of the test's."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import pytest

from holdfast._protocol.call import find_roster
from holdfast._protocol.job import Job
from holdfast._roster import neighbours
from holdfast._roster.beacon import beacon_of
from holdfast._roster.links import Path
from holdfast._roster.neighbours import LONGEST_TURN, Neighbour
from holdfast._roster.presence import Gone, Vitals, see
from holdfast._roster.process import Identity
from tests.support.processes import ProcessWorld

WORLD = 6
KILLED = ("its process was killed by SIGKILL", "its process has ended")
"""The second one if its parent has asked for the exit code already."""
heard: list[tuple[int, Gone, float]] = []
"""What this process was told of ends."""


def watch(rank: int) -> None:
    beacon = beacon_of(find_roster(Job()))
    beacon.watch.begin("test", range(WORLD), lambda gone, how: heard.append((gone, how, time.monotonic())))
    beacon.send()
    beacon.keep("test")


def near(rank: int, expected: list[int]) -> list[int]:
    """Wait until these neighbours are watched; return those that are."""
    watch, ends = beacon_of(find_roster(Job())).watch, time.monotonic() + 20
    while sorted(watch.near()) != expected and time.monotonic() < ends:
        time.sleep(0.05)
    return sorted(watch.near())


def told(rank: int, of: list[int], seconds: float) -> dict[int, tuple[Gone, float]]:
    """Wait until this rank was told of the end of others."""
    ends = time.monotonic() + seconds
    while not {one for one, _, _ in heard} >= set(of) and time.monotonic() < ends:
        time.sleep(0.02)
    return {one: (how, at) for one, how, at in heard}


def known(rank: int, of: int) -> tuple[str, bool | None]:
    """What a rank that need not be its neighbour knows of one."""
    seen = see(find_roster(Job()), [of])[of]
    return seen.ended, seen.there


def end(rank: int, code: int) -> None:
    os._exit(code)


def unwatch(rank: int) -> int:
    beacon = beacon_of(find_roster(Job()))
    beacon.watch.end("test")
    beacon.let_go("test")
    return len(beacon.watch.near())


def test_a_ring_sees_every_end_at_once_and_how_it_was() -> None:
    with ProcessWorld(WORLD) as world:
        world.run(watch)
        for rank in range(WORLD):
            around = sorted([(rank - 1) % WORLD, (rank + 1) % WORLD])
            assert world.run(near, around, ranks=[rank]) == [around]
        # A stopped process is there.
        world.signal(4, signal.SIGSTOP)
        killed = time.monotonic()
        world.signal(2, signal.SIGKILL)
        for seen in world.run(told, [2], 20.0, ranks=[1, 3]):
            how, at = seen[2]
            assert how.how in KILLED
            assert not how.clean
            assert at - killed < 5.0
        ((ended, there),) = world.run(known, 2, ranks=[0])
        assert ended in KILLED
        assert there is False
        world.signal(4, signal.SIGCONT)
        # The ring has closed over the gap; two neighbours that end at once are seen from both sides.
        for rank in (3, 4):
            world.start(end, 0 if rank == 3 else 7, ranks=[rank])
        assert {result.died for result in world.collect(20)} == {0, 7}
        for rank, seen in zip((1, 5), world.run(told, [3, 4], 20.0, ranks=[1, 5]), strict=True):
            assert set(seen) >= {3, 4}, rank
            assert seen[3][0].clean or seen[3][0].how == KILLED[1]
            assert not seen[4][0].clean
        assert world.run(near, [0, 5], ranks=[1]) == [[0, 5]]
        assert world.run(told, [], 0.0, ranks=[0])[0].keys() <= {2, 3, 4}
        assert world.run(unwatch, ranks=[0, 1, 5]) == [0, 0, 0]


class Given:
    """A link whose path the test gives."""

    path = Path.OPEN

    def __init__(self, *how: Any) -> None: ...

    def look(self) -> Path:
        return self.path

    def close(self) -> None: ...


class Elsewhere:
    """A neighbour on another host, on a clock of the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(neighbours, "Link", Given)
        monkeypatch.setattr(neighbours.time, "monotonic", lambda: self.now)
        who = Identity(1, "h", 7, machine="other", started="1", token="t", address="10.0.0.1", port=9)
        self.vitals = Vitals(who, beat=1)
        self.neighbour = Neighbour(1, self.vitals, "10.0.0.9", lambda: None)
        self.link: Any = self.neighbour._link

    def look(self, path: Path, after: float = 1.0, beat: int | None = None) -> str:
        self.now += after
        self.link.path = path
        shown = None if beat is None else msgspec.structs.replace(self.vitals, beat=beat)
        return self.neighbour.look(shown, lost_after=120.0)

    def lost_after(self, limit: float, **how: Any) -> float:
        """Seconds of looks, one each second, until it is given up."""
        began = self.now
        while not self.look(Path.UNREACHABLE, **how):
            assert self.now - began < limit
        return self.now - began


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return Elsewhere(monkeypatch)


def test_a_host_is_gone_that_neither_answers_nor_beats_for_lost_after(elsewhere: Elsewhere) -> None:
    assert not elsewhere.look(Path.OPEN, beat=1)
    assert 120.0 <= elsewhere.lost_after(130.0, beat=1) <= 122.0
    assert elsewhere.look(Path.UNREACHABLE, beat=1).startswith("its host has not answered for 12")


@pytest.mark.parametrize("sign", [Path.OPEN, Path.UNKNOWN])
def test_one_answer_begins_the_count_anew(sign: Path, elsewhere: Elsewhere) -> None:
    for _ in range(119):
        assert not elsewhere.look(Path.UNREACHABLE, beat=1)
    assert not elsewhere.look(sign, beat=1)
    assert elsewhere.lost_after(130.0, beat=1) >= 119.0


def test_a_host_that_beats_is_not_gone_however_unreachable(elsewhere: Elsewhere) -> None:
    for beat in range(1000):
        assert not elsewhere.look(Path.UNREACHABLE, beat=beat)


@pytest.mark.parametrize("path", [Path.OPEN, Path.UNKNOWN])
def test_silence_alone_is_nothing(path: Path, elsewhere: Elsewhere) -> None:
    for _ in range(5000):
        assert not elsewhere.look(path, after=3.0, beat=1)


def test_the_absence_of_the_one_who_looks_does_not_count(elsewhere: Elsewhere) -> None:
    assert not elsewhere.look(Path.UNREACHABLE, beat=1)
    assert not elsewhere.look(Path.UNREACHABLE, after=3600.0, beat=1)
    assert elsewhere.lost_after(130.0, beat=1) >= 120.0 - 2 * LONGEST_TURN


def test_a_refusal_is_an_end_at_once(elsewhere: Elsewhere) -> None:
    assert elsewhere.look(Path.ENDED, beat=1) == "its process has ended"
