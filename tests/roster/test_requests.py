"""What a rank that waits asks of a real TCPStore: how often, and that its wait ends at once all the same."""

from __future__ import annotations

import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.operation import agree
from holdfast._core.roster.beacon import beacon_of
from holdfast._core.roster.tcp_client import TcpClient
from holdfast._core.roster.torch_store import TorchRoster
from holdfast.errors import HoldfastError
from tests.support.processes import ProcessWorld

LARGE = 10_240
SETTLED = 3.0
"""Seconds in which a rank that waits looks more often."""
FIELDS = {1: 2, 2: 3, 4: 1, 8: 1, 12: 0}
"""Texts in a request of the server, by its first byte: set, compare-and-set, add, delete, cancel a wait."""


def requests(data: bytes) -> Iterator[int]:
    """The first byte of each request in what a client sends at once."""
    at = 0
    while at < len(data):
        kind, at = data[at], at + 1
        fields = FIELDS.get(kind, 0)
        if kind == 6:  # a wait: a number of keys comes first
            (fields,), at = struct.unpack_from("=Q", data, at), at + 8
        for _ in range(fields):
            at += 8 + struct.unpack_from("=Q", data, at)[0]
        at += 8 if kind == 4 else 0
        yield kind


def wait(rank: int, world: int) -> tuple[float, list[float], str, float]:
    """Wait for a committer that never comes; return when that began, when requests were sent, and how and when
    it ended."""
    roster = TorchRoster(None, rank, world)
    if rank == 0:
        beacon_of(roster).send()
        time.sleep(600)
    sent: list[float] = []
    plain = TcpClient._send

    def counted(self: Any, data: bytes) -> None:
        cancels = [12] if self._awaited else []
        sent.extend(time.monotonic() for _ in [*cancels, *requests(data)])
        plain(self, data)

    TcpClient._send = counted  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        agree("a choice", "memory:choice", lambda said: None, begin_call(Job(roster=roster, timeout=300.0)))
    except HoldfastError as error:
        return begun, sent, f"{type(error).__name__}: {error}", time.monotonic()
    finally:
        TcpClient._send = plain  # type: ignore[method-assign]
    raise AssertionError("rank 0 never came")


def rates(world_size: int, seconds: float) -> list[float]:
    """Requests a second of two ranks that wait for a third, which is then killed, once they look at full pace."""
    with ProcessWorld(3) as world:
        world.start(wait, world_size, ranks=[0])
        time.sleep(0.5)
        world.start(wait, world_size, ranks=[1, 2])
        time.sleep(SETTLED + seconds + 1.0)
        killed = time.monotonic()
        world.signal(0, signal.SIGKILL)
        ends = [result.get() for result in world.collect(20.0, ranks=[1, 2])]
    for begun, _, error, at in ends:
        assert error.startswith("RankFailed")
        assert "rank 0 (host" in error
        assert at - killed < 3.0
        assert begun + SETTLED + seconds < killed
    return [
        sum(begun + SETTLED <= at < begun + SETTLED + seconds for at in sent) / seconds
        for begun, sent, _, _ in ends
    ]


def test_a_rank_of_ten_thousand_asks_every_other_second_at_most_and_is_woken_at_once() -> None:
    assert max(rates(LARGE, 20.0)) <= 0.5


def test_a_rank_of_a_small_world_asks_a_few_times_a_second() -> None:
    assert max(rates(3, 6.0)) <= 16.0
