"""Ranks on hosts of their own: what ends a session when a rank, or its host, goes, and what does not."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.hosts import Hosts, reason_not
from tests.support.waiting import ended

LIMIT = 40.0
"""Seconds for a line of a rank; they come within a few, on a machine that does nothing else."""


class Rank:
    """A rank, and what it has said."""

    def __init__(self, hosts: Hosts, rank: int, world: int, port: int) -> None:
        head = hosts.address(world)
        words = [str(word) for word in (rank, world, head, port)]
        self.hosts = hosts
        self.process = hosts.start(
            rank,
            [sys.executable, "-m", "tests.roster.rank_on_host", *words],
            GLOO_SOCKET_IFNAME="eth0",
            OMP_NUM_THREADS="1",
        )
        self._lines: queue.Queue[tuple[float, str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put((time.monotonic(), line.strip()))

    def said(self, begins: str) -> tuple[float, str]:
        """Wait for a line that begins so; the lines before it are passed over."""
        ends = time.monotonic() + LIMIT
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

    def go(self, lost_after: float | None = None) -> None:
        """Begin a session, or end it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{lost_after}\n")
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
    with Hosts(size + 1) as hosts:
        _, port = serve(hosts, size)
        ranks = [Rank(hosts, rank, size, port) for rank in range(size)]
        for rank in ranks:
            rank.said("ready")
        yield hosts, ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Hosts, list[Rank]]]:
    """Two ranks for one session after another."""
    with world_of(2) as made:
        yield made


def begin(ranks: list[Rank], seen: int, lost_after: float) -> None:
    for rank in ranks:
        rank.go(lost_after)
    for rank in ranks:
        rank.said(f"sees {seen}")


pytestmark = [
    pytest.mark.skipif(bool(reason_not()), reason=reason_not() or "can be made here"),
    pytest.mark.timeout(240),
]


def test_a_rank_that_is_killed_on_another_host_ends_the_others_at_once() -> None:
    with world_of(3) as (_, ranks):
        begin(ranks, 2, lost_after=60.0)
        killed = time.monotonic()
        ranks[1].signal(signal.SIGKILL)
        for rank in (ranks[0], ranks[2]):
            at, said = rank.said("RankFailed 1 ")
            assert at - killed < 20.0, "a moment, on a busy machine, and not lost_after"
            assert ended(said), said


def end_well(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.go()
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


def test_where_ports_are_closed_between_hosts_silence_alone_ends_nothing(
    pair: tuple[Hosts, list[Rank]],
) -> None:
    hosts, ranks = pair
    hosts.close_between(0, 1)
    begin(ranks, 0, lost_after=1.0)
    time.sleep(1.0)
    ranks[1].signal(signal.SIGSTOP)
    time.sleep(3.0)
    ranks[1].signal(signal.SIGCONT)
    assert [rank.heard() for rank in ranks] == [[], []]
    end_well(ranks)
    hosts.open_between(0, 1)


def test_a_host_that_is_gone_ends_the_others_after_lost_after_and_not_before(
    pair: tuple[Hosts, list[Rank]],
) -> None:
    """The last: the host stays away."""
    hosts, ranks = pair
    begin(ranks, 1, lost_after=2.0)
    pulled = time.monotonic()
    hosts.pull(1)
    at, said = ranks[0].said("RankFailed 1 ")
    assert at - pulled >= 2.0
    assert "its host has not answered for " in said
