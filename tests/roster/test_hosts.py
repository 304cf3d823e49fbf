"""Ranks on hosts of their own: what ends a session or a save when a rank, or its host, goes, and what does not."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast._core.roster.links import HELD
from holdfast._core.roster.process import children_of
from tests.roster.stranger_on_host import ATTACKS, FLOOD
from tests.support.hosts import Hosts, reason_not
from tests.support.waiting import ended

LIMIT = 40.0
"""Seconds for a line of a rank; they come within a few, on a machine that does nothing else."""


class Rank:
    """A rank, and what it has said."""

    def __init__(self, hosts: Hosts, rank: int, world: int, port: int, folder: str) -> None:
        head = hosts.address(world)
        words = [str(word) for word in (rank, world, head, port)]
        self.hosts, self.port = hosts, port
        self.process = hosts.start(
            rank,
            [sys.executable, "-m", "tests.roster.rank_on_host", *words],
            GLOO_SOCKET_IFNAME="eth0",
            OMP_NUM_THREADS="1",
            FOLDER=folder,
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line.strip()))

    def said(self, begins: str, within: float = LIMIT) -> tuple[float, str]:
        """Wait for a line that begins so; the lines before it are passed over."""
        ends = time.monotonic() + within
        heard = []
        while True:
            try:
                at, line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no line {begins!r}, but {heard}") from None
            heard.append(line)
            if line.startswith(begins):
                return at, line

    def heard(self) -> list[str]:
        """Return what it has said meanwhile."""
        return [self._lines.get()[1] for _ in range(self._lines.qsize())]

    def do(self, *words: object) -> None:
        """Give it a line: it begins something, or ends what it does."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{' '.join(map(str, words))}\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        self.hosts.signal(self.process, number)


def serve(hosts: Hosts, host: int) -> tuple[subprocess.Popen[str], int]:
    made = hosts.start(host, [sys.executable, "-m", "tests.roster.rank_on_host", "store"])
    assert made.stdout is not None
    return made, int(made.stdout.readline())


@contextmanager
def world_of(size: int) -> Iterator[tuple[Hosts, list[Rank]]]:
    """Ranks that have a process group, each on a host; the store is on one more."""
    with Hosts(size + 1) as hosts, tempfile.TemporaryDirectory() as folder:
        _, port = serve(hosts, size)
        ranks = [Rank(hosts, rank, size, port, folder) for rank in range(size)]
        for rank in ranks:
            rank.said("ready", 3 * LIMIT)
        yield hosts, ranks


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[Hosts, list[Rank]]]:
    """Three ranks for one test after another; the last kills one."""
    with world_of(3) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Hosts, list[Rank]]]:
    """Two ranks for one test after another; the last leaves one of them cut off."""
    with world_of(2) as made:
        yield made


def begin(ranks: list[Rank], seen: int, lost_after: float) -> None:
    for rank in ranks:
        rank.do("session", lost_after)
    for rank in ranks:
        rank.said(f"sees {seen}")


pytestmark = [
    pytest.mark.skipif(bool(reason_not()), reason=reason_not() or "can be made here"),
    pytest.mark.timeout(240),
]


def end_well(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.do("end")
    for rank in ranks:
        rank.said("through")


def test_a_host_that_comes_back_ends_nothing(pair: tuple[Hosts, list[Rank]]) -> None:
    hosts, ranks = pair
    begin(ranks, 1, lost_after=12.0)
    hosts.pull(1)
    for rank in ranks:
        rank.said("sees 0")  # the connection has broken
    time.sleep(1.0)
    hosts.plug(1)
    for rank in ranks:
        rank.said("sees 1")
    time.sleep(2.0)
    assert [rank.heard() for rank in ranks] == [[], []]
    end_well(ranks)


def test_a_rank_that_is_stopped_on_another_host_ends_nothing(pair: tuple[Hosts, list[Rank]]) -> None:
    _, ranks = pair
    begin(ranks, 1, lost_after=1.0)
    ranks[1].signal(signal.SIGSTOP)
    time.sleep(3.0)
    ranks[1].signal(signal.SIGCONT)
    end_well(ranks)


def test_where_ports_are_closed_between_hosts_silence_alone_ends_nothing() -> None:
    with world_of(2) as (hosts, ranks):
        hosts.close_between(0, 1)
        begin(ranks, 0, lost_after=1.0)
        time.sleep(1.0)
        ranks[1].signal(signal.SIGSTOP)
        time.sleep(6.0)
        ranks[1].signal(signal.SIGCONT)
        assert [rank.heard() for rank in ranks] == [[], []]
        end_well(ranks)


# -- saves: between two of them, too, a rank speaks and can be reached ---------------------------------


def save(ranks: list[Rank], step: int, lost_after: float = 60.0) -> None:
    for rank in ranks:
        rank.do("save", lost_after, step)
    for rank in ranks:
        rank.said(f"saved {step}")


def see(rank: Rank, count: int) -> None:
    """Wait until a rank sees so many neighbours."""
    rank.do("see")
    rank.said(f"sees {count}")
    rank.do("end")


def test_a_host_that_goes_between_two_saves_and_comes_back_after_the_verdict(
    pair: tuple[Hosts, list[Rank]],
) -> None:
    hosts, ranks = pair
    save(ranks, 1)
    see(ranks[0], 1)
    pulled = time.monotonic()
    hosts.pull(1)
    ranks[0].do("save", 6.0, 2)
    at, said = ranks[0].said("RankFailed 1 ")
    assert 6.0 <= at - pulled < 30.0
    assert "its host has not answered for " in said
    hosts.plug(1)
    see(ranks[0], 1)
    save(ranks, 3)


def test_ports_that_a_firewall_begins_to_refuse_end_nothing(pair: tuple[Hosts, list[Rank]]) -> None:
    hosts, ranks = pair
    save(ranks, 4)
    see(ranks[0], 1)
    ranks[0].do("save", 3.0, 5)
    hosts.refuse_between(0, 1)
    time.sleep(8.0)  # rank 1 trains; its heart speaks in the store
    assert ranks[0].heard() == []
    ranks[1].do("save", 3.0, 5)
    for rank in ranks:
        rank.said("saved 5")
    save(ranks, 6)
    hosts.accept_between(0, 1)
    see(ranks[0], 1)


def test_a_rank_that_one_neighbour_still_reaches_is_not_given_up_by_the_other(
    three: tuple[Hosts, list[Rank]],
) -> None:
    """It is stopped, so it says nothing itself, and of three hosts one can't send to it."""
    hosts, ranks = three
    save(ranks, 1)
    for rank in ranks:
        see(rank, 2)
    hosts.close_way(0, 1)
    ranks[1].signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        rank.do("save", 3.0, 2)
    time.sleep(12.0)
    assert [rank.heard() for rank in ranks] == [[], [], []]
    ranks[1].signal(signal.SIGCONT)
    ranks[1].do("save", 3.0, 2)
    for rank in ranks:
        rank.said("saved 2")
    ranks[1].signal(signal.SIGSTOP)
    hosts.close_way(2, 1)  # nobody reaches it any more, as if its host were gone
    for rank in (ranks[0], ranks[2]):
        rank.do("save", 3.0, 3)
    for rank in (ranks[0], ranks[2]):
        rank.said("RankFailed 1 ")
    ranks[1].signal(signal.SIGCONT)
    for other in (0, 2):
        hosts.open_way(other, 1)
    for rank in ranks:
        see(rank, 2)  # it has spoken, and is watched again
    save(ranks, 4)


# -- a stranger on the host of the store, at the ports of the ranks ---------------------------------------


def memory(process: int) -> int:
    """Return the bytes that a process has in memory."""
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.parametrize("what", ATTACKS)
def test_a_stranger_at_the_ports_ends_nothing_and_costs_little(
    what: str, pair: tuple[Hosts, list[Rank]]
) -> None:
    """He goes on for longer than `lost_after`."""
    hosts, ranks = pair
    begin(ranks, 1, lost_after=3.0)
    pids = [children_of(rank.process.pid)[0] for rank in ranks]
    before = [memory(pid) for pid in pids]
    address, port = hosts.address(2), ranks[0].port
    words = [address, str(port), "2", what, "8"]
    stranger = hosts.start(2, [sys.executable, "-m", "tests.roster.stranger_on_host", *words])
    assert stranger.stdout is not None
    line = stranger.stdout.readline().split()
    most = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    assert line[:1] == ["made"], line
    assert int(line[1]) >= (FLOOD if what == "flood" else 100)
    for rank in ranks:
        assert not [line for line in rank.heard() if not line.startswith("sees ")]
    assert max(most) < HELD + 100
    for pid, then in zip(pids, before, strict=True):
        assert memory(pid) - then < 64 << 20
    for rank in ranks:
        rank.do("end")
    for rank in ranks:
        rank.said("through")
    save(ranks, 10 + list(ATTACKS).index(what))
    see(ranks[0], 1)


def test_a_rank_that_is_killed_on_another_host_ends_the_others_soon(
    three: tuple[Hosts, list[Rank]],
) -> None:
    """The last with these: the rank stays away."""
    _, ranks = three
    begin(ranks, 2, lost_after=60.0)
    killed = time.monotonic()
    ranks[1].signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        at, said = rank.said("RankFailed 1 ")
        assert at - killed < 20.0, "a few seconds, on a busy machine, and not lost_after"
        assert ended(said), said


def test_a_host_that_is_gone_ends_the_others_after_lost_after_and_not_before(
    pair: tuple[Hosts, list[Rank]],
) -> None:
    """The last with these: the host stays away."""
    hosts, ranks = pair
    begin(ranks, 1, lost_after=4.0)
    pulled = time.monotonic()
    hosts.pull(1)
    at, said = ranks[0].said("RankFailed 1 ")
    assert at - pulled >= 4.0
    assert "its host has not answered for " in said
