"""Errors that name missing ranks say where their code is: told by a thread of the rank that is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import DeadlineExceeded, HoldfastError, RankFailed
from holdfast.groups.lifecycle.warm_up import warm_up
from holdfast.protocol.call import begin_call
from holdfast.protocol.operation import agree
from holdfast.protocol.whereabouts import LONGEST
from holdfast.roster.memory import Board, MemoryRoster
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK

WORLD, LATE = 3, 2
SHORT: dict[str, Any] = {"timeout": 3.0, "stall_timeout": 60.0}
SILENT: dict[str, Any] = {"timeout": 60.0, "stall_timeout": 3.0}


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    with ProcessWorld(WORLD) as shared:
        shared.run(meet)
        yield shared


def meet(rank: int) -> None:
    """A call of all ranks: from here on each can be asked."""
    agree("first meeting", "memory:first", lambda said: 0, begin_call(timeout=60, stall_timeout=60))


def dawdle(seconds: float) -> None:
    """Compute, in no call of anybody's."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        torch.ones(8).sum()


def sleep_in_c(seconds: float) -> None:
    time.sleep(seconds)


def reduce_alone(seconds: float) -> None:
    """Until the others come to it."""
    dist.all_reduce(torch.ones(1))


def wait_for_late_rank(
    rank: int, call: str, does: str, limits: dict[str, Any], folder: str
) -> tuple[HoldfastError | None, float]:
    """All ranks but one make a call; what they raise and after how long."""
    if call == "load":
        holdfast.save({"w": torch.ones(4)}, folder, timeout=60)
    begun = time.monotonic()
    error = None
    if rank == LATE:
        globals()[does](2 * min(limits.values()))
    else:
        try:
            if call == "save":
                holdfast.save({"w": torch.ones(4)}, folder, **limits)
            elif call == "load":
                holdfast.load({"w": torch.ones(4)}, folder, **limits)
            elif call == "warm-up":
                warm_up(**limits)
            else:
                agree(call, f"memory:{call}", lambda said: 0, begin_call(**limits))
        except HoldfastError as raised:
            error = raised
    took = time.monotonic() - begun
    if does == "reduce_alone" and rank != LATE:
        dist.all_reduce(torch.ones(1))
    return error, took


@pytest.mark.parametrize(
    ("call", "does", "limits", "kind"),
    [
        ("save", "dawdle", SHORT, DeadlineExceeded),
        ("save", "dawdle", SILENT, RankFailed),
        ("choice", "sleep_in_c", SHORT, DeadlineExceeded),
        ("load", "reduce_alone", SILENT, RankFailed),
        ("warm-up", "dawdle", SHORT, DeadlineExceeded),
    ],
)
def test_the_function_of_a_late_rank_is_named(
    call: str,
    does: str,
    limits: dict[str, Any],
    kind: type[HoldfastError],
    world: ProcessWorld,
    tmp_path: Path,
) -> None:
    world.start(wait_for_late_rank, call, does, limits, str(tmp_path / "step-1"))
    for result in world.collect(60)[:LATE]:
        error, took = result.get()
        assert type(error) is kind, error
        (missing,) = error.missing
        assert missing.rank == LATE
        assert missing.pid == world.pid(LATE)
        assert missing.at.startswith("its main thread is at "), error
        assert " wait_for_late_rank > test_whereabouts.py:" in missing.at
        assert does in missing.at
        assert str(error).count(missing.at) == 1
        assert took < min(limits.values()) + SLACK


def test_a_rank_that_is_stopped_can_not_tell_and_holds_nobody(tmp_path: Path) -> None:
    with ProcessWorld(WORLD) as world:
        world.run(meet)
        world.signal(LATE, signal.SIGSTOP)
        world.start(wait_for_late_rank, "save", "dawdle", SHORT, str(tmp_path / "step-1"), ranks=range(LATE))
        results = world.collect(30)
        world.signal(LATE, signal.SIGCONT)
    for result in results:
        error, took = result.get()
        assert isinstance(error, DeadlineExceeded)
        assert [(info.rank, info.at) for info in error.missing] == [(LATE, "")]
        assert took < 5.0


def threads_that_tell(rank: int, folder: str) -> list[int]:
    """How many threads answer for this rank after calls of several kinds, in a fork, and after the end of the
    group."""

    def count() -> int:
        return sum(thread.name == "holdfast-where" for thread in threading.enumerate())

    meet(rank)
    holdfast.save({"w": torch.ones(4)}, f"{folder}/direct", timeout=30)
    holdfast.async_save({"w": torch.ones(4)}, f"{folder}/beside", timeout=30).committed(30)
    found = [count()]
    child = os.fork()
    if not child:
        os._exit(count())
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    dist.barrier()
    dist.destroy_process_group()
    return [*found, count()]


@pytest.mark.parametrize("store_host", ["launcher", "rank 0"])
def test_one_thread_a_process_tells_for_as_long_as_its_group_is_there(
    store_host: str, tmp_path: Path
) -> None:
    with ProcessWorld(WORLD, store_host=store_host) as world:
        assert world.run(threads_that_tell, str(tmp_path)) == [[1, 0, 0]] * WORLD


def test_ranks_that_are_threads_of_one_process_are_told_apart() -> None:
    board = Board()
    raised: list[HoldfastError] = []

    def be(rank: int) -> None:
        roster = MemoryRoster(rank, 2, board)
        agree("meeting", "memory:x", lambda said: 0, begin_call(roster, timeout=20, stall_timeout=20))
        if rank == 1:
            dawdle(3.0)
            return
        try:
            agree("choice", "memory:y", lambda said: 0, begin_call(roster, timeout=1, stall_timeout=20))
        except HoldfastError as error:
            raised.append(error)

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank {rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    (missing,) = raised[0].missing
    assert missing.rank == 1
    assert "its thread 'rank 1' is at " in missing.at
    assert "dawdle" in missing.at


def deep(calls: int) -> None:
    if calls:
        deep(calls - 1)
    else:
        time.sleep(4.0)


def in_deep(rank: int) -> HoldfastError | None:
    if rank == LATE:
        deep(200)
        return None
    try:
        agree("choice", "memory:deep", lambda said: 0, begin_call(timeout=2.0, stall_timeout=60))
    except HoldfastError as error:
        return error
    return None


def test_a_deep_stack_is_told_by_its_last_calls(world: ProcessWorld) -> None:
    error = world.run(in_deep, timeout=30)[0]
    assert isinstance(error, HoldfastError)
    assert error.missing[0].at.count(" deep") == 4
    assert len(error.missing[0].at) < LONGEST
