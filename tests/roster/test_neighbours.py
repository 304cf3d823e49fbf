"""The watch over neighbours: real processes in a ring, and one neighbour on a clock of the test's."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import msgspec
import pytest

from holdfast._core.protocol.call import find_roster
from holdfast._core.protocol.job import Job
from holdfast._core.roster import neighbours
from holdfast._core.roster.beacon import beacon_of
from holdfast._core.roster.links import Path
from holdfast._core.roster.lost import LONGEST_TURN, MISSED, Gone, see
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.neighbours import Neighbour, Watch
from holdfast._core.roster.presence import Vitals
from holdfast._core.roster.process import Identity, this_process
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

    def is_up(self) -> bool:
        return True

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
        self.link: Any = self.neighbour.link

    def look(self, path: Path, after: float = 1.0, beat: int | None = None) -> str:
        """`beat` None: the message store does not answer."""
        self.now += after
        self.link.path = path
        shown = None if beat is None else msgspec.structs.replace(self.vitals, beat=beat)
        return self.neighbour.look(shown, lost_after=120.0)

    def lost_after(self, limit: float, path: Path = Path.UNREACHABLE, **how: Any) -> float:
        """Seconds of looks, one each second, until it is given up."""
        began = self.now
        while not self.look(path, **how):
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


def test_an_end_that_the_kernel_tells_counts_once_three_messages_are_missing(elsewhere: Elsewhere) -> None:
    assert not elsewhere.look(Path.ENDED, beat=1)
    assert elsewhere.lost_after(4.0, Path.ENDED, beat=1) <= MISSED
    assert elsewhere.look(Path.ENDED, beat=1) == "its process has ended"


def test_a_port_that_refuses_is_a_host_that_does_not_answer(elsewhere: Elsewhere) -> None:
    assert not elsewhere.look(Path.REFUSED, beat=1)
    assert 120.0 <= elsewhere.lost_after(130.0, Path.REFUSED, beat=1) <= 122.0
    assert elsewhere.look(Path.REFUSED, beat=1).startswith(
        "its port refuses connections, and nothing was heard"
    )


@pytest.mark.parametrize("path", list(Path))
def test_who_is_heard_in_the_store_has_not_ended_whatever_its_path_shows(
    path: Path, elsewhere: Elsewhere
) -> None:
    for beat in range(1000):
        assert not elsewhere.look(path, beat=beat // 2)  # on a busy machine, every other second


@pytest.mark.parametrize("path", list(Path))
def test_who_can_not_reach_the_store_judges_nobody(path: Path, elsewhere: Elsewhere) -> None:
    """It may be the one that is cut off: the others speak in the store, and it can't read that."""
    assert not elsewhere.look(Path.OPEN, beat=1)
    for _ in range(1000):
        assert not elsewhere.look(path)
    if path is Path.UNREACHABLE:  # it reads again, and the time without counts for nothing
        assert elsewhere.lost_after(130.0, beat=1) >= 119.0


# -- the watch of one rank, over a store and over paths that the test gives ----------------------------


class Three:
    """Rank 0's watch over ranks 1 and 2, each on a host of its own; all three are neighbours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(neighbours, "Link", lambda *how: Given())
        monkeypatch.setattr(neighbours.time, "monotonic", lambda: self.now)
        self.roster = MemoryRoster(0, 3)
        self.beats, self.hears = {1: 1, 2: 1}, {1: [0, 2], 2: [0, 1]}
        self.gone: list[tuple[int, str]] = []
        self.watch = Watch(this_process(0), lambda address, port: None, lambda: None)
        self.watch.lost_after = 10.0
        self.watch.begin("test", range(3), lambda rank, gone: self.gone.append((rank, gone.how)))
        self.turn()

    def turn(self, seconds: int = 1, silent: tuple[int, ...] = ()) -> None:
        """Let so many seconds pass, with a beat of everybody but the silent in each."""
        for _ in range(seconds):
            self.now += 1.0
            for rank in self.beats:
                self.beats[rank] += rank not in silent
                who = Identity(rank, "h", 7, f"m{rank}", "1", f"t{rank}", f"10.0.0.{rank}", 9)
                vitals = Vitals(who, beat=self.beats[rank], hears=self.hears[rank])
                self.roster.put(f"at/{rank}", msgspec.to_builtins(vitals))
            self.watch.beat(self.roster)

    def path(self, rank: int, path: Path) -> None:
        link: Any = self.watch._neighbours[rank].link
        link.path = path

    def ended(self, rank: int) -> str:
        return see(self.roster, [rank])[rank].ended


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Three:
    return Three(monkeypatch)


def test_a_rank_is_given_up_when_no_path_and_no_message_shows_it(three: Three) -> None:
    three.path(1, Path.UNREACHABLE)
    three.hears[2] = [0]
    three.turn(9, silent=(1,))
    assert not three.gone
    three.turn(3, silent=(1,))
    assert three.gone == [(1, "its host has not answered for 10 s")]
    assert three.ended(1) == "its host has not answered for 10 s"


@pytest.mark.parametrize("path", [Path.UNREACHABLE, Path.REFUSED, Path.ENDED])
def test_a_rank_that_another_neighbour_hears_is_not_given_up(path: Path, three: Three) -> None:
    """It holds the GIL, and the way from here to it is cut."""
    three.path(1, path)
    three.turn(200, silent=(1,))
    assert not three.gone


def test_the_word_of_a_neighbour_counts_for_as_long_as_it_is_renewed(three: Three) -> None:
    """Both were on the host that has gone."""
    for rank in (1, 2):
        three.path(rank, Path.UNREACHABLE)
    three.turn(16, silent=(1, 2))
    assert {rank for rank, _ in three.gone} == {1, 2}


def test_a_verdict_does_not_outlive_a_sign_of_life(three: Three) -> None:
    three.path(1, Path.UNREACHABLE)
    three.hears[2] = [0]
    three.turn(15, silent=(1,))
    assert three.ended(1)
    three.turn(1)  # the partition has healed
    assert not three.ended(1)
    three.turn(5)
    assert sorted(three.watch.near()) == [1, 2], "it is watched again"
    three.turn(30, silent=(1,))  # over the same path, which has not come back
    assert three.ended(1)
    assert len(three.gone) >= 2


def test_a_message_that_was_on_its_way_saves_nobody(three: Three) -> None:
    three.path(1, Path.ENDED)
    three.hears[2] = [0]
    three.turn(5, silent=(1,))
    assert three.ended(1) == "its process has ended"
    three.turn(1)  # its last word arrives
    three.turn(6, silent=(1,))
    assert three.ended(1) == "its process has ended"
