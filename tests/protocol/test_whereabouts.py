"""Errors that name missing ranks say where their code is: its heart tells, or the kernel where that can't."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.operation import agree
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.roster.process import _status
from holdfast._core.roster.whereabouts import LONGEST
from holdfast._groups.lifecycle.warm_up import warm_up
from holdfast.errors import DeadlineExceeded, HoldfastError, RankFailed
from tests.support.gil import hold_the_gil
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK, wait_for_threads, wait_until

WORLD, LATE = 3, 2
SOON = 3.0
SHORT = holdfast.Job(timeout=SOON)
GIVES_UP = holdfast.Job(timeout=60.0, stall_timeout=SOON)


@pytest.fixture(scope="module")
def world() -> Iterator[ProcessWorld]:
    """Ranks that have installed Holdfast: from then on each can be asked, also between its calls."""
    with ProcessWorld(WORLD) as shared:
        shared.run(install)
        yield shared


def install(rank: int) -> None:
    holdfast.install("torch-dcp")


def dawdle(others: threading.Thread) -> None:
    """Compute, in no call of anybody's."""
    while others.is_alive():
        torch.ones(8).sum()


def sleep_in_c(others: threading.Thread) -> None:
    while others.is_alive():
        time.sleep(0.5)


def hold_for_long(others: threading.Thread) -> None:
    hold_the_gil(2 * SOON)


def reduce_alone(others: threading.Thread) -> None:
    """Until the others come to it."""
    dist.all_reduce(torch.ones(1))


def wait_for_late_rank(
    rank: int, call: str, does: str, job: holdfast.Job, folder: str, meet: bool = True
) -> tuple[HoldfastError | None, float]:
    """All ranks but one make a call; what they raise and after how long. They begin together, or the late one
    may be asked before it is in this function."""
    if call == "load":
        holdfast.save({"w": torch.ones(4)}, folder, job=holdfast.Job(timeout=60))
    if meet:
        dist.barrier()
    begun = time.monotonic()
    error = None
    done = [Path(f"{folder}-{other}") for other in range(LATE)]
    if rank == LATE:
        others = threading.Thread(target=wait_until, args=(lambda: all(one.exists() for one in done),))
        others.start()
        globals()[does](others)
        others.join()
    else:
        try:
            if call == "save":
                holdfast.save({"w": torch.ones(4)}, folder, job=job)
            elif call == "load":
                holdfast.load({"w": torch.ones(4)}, folder, job=job)
            elif call == "warm-up":
                warm_up(job=job)
            else:
                agree(call, f"memory:{call}", lambda said: 0, begin_call(job))
        except HoldfastError as raised:
            error = raised
        done[rank].touch()
    took = time.monotonic() - begun
    if does == "reduce_alone" and rank != LATE:
        dist.all_reduce(torch.ones(1))
    return error, took


@pytest.mark.parametrize(
    ("call", "does", "job", "kind"),
    [
        ("save", "dawdle", SHORT, DeadlineExceeded),
        pytest.param("save", "dawdle", GIVES_UP, RankFailed, marks=pytest.mark.wide),
        ("choice", "sleep_in_c", SHORT, DeadlineExceeded),
        ("choice", "hold_for_long", SHORT, DeadlineExceeded),
        ("load", "reduce_alone", GIVES_UP, RankFailed),
        pytest.param("warm-up", "dawdle", SHORT, DeadlineExceeded, marks=pytest.mark.wide),
    ],
)
def test_the_function_of_a_late_rank_is_named(
    call: str,
    does: str,
    job: holdfast.Job,
    kind: type[HoldfastError],
    world: ProcessWorld,
    tmp_path: Path,
) -> None:
    world.start(wait_for_late_rank, call, does, job, str(tmp_path / "step-1"))
    for result in world.collect(60)[:LATE]:
        error, took = result.get()
        assert type(error) is kind, error
        assert [info.rank for info in error.missing] == [LATE], error
        (missing,) = error.missing
        assert missing.pid == world.pid(LATE)
        assert missing.at.startswith("its main thread is at "), error
        assert " wait_for_late_rank > " in missing.at
        assert does in missing.at
        assert str(error).count(missing.at) == 1
        assert took < SOON + SLACK


def test_a_rank_that_is_stopped_can_not_tell_and_its_state_is(world: ProcessWorld, tmp_path: Path) -> None:
    world.signal(LATE, signal.SIGSTOP)
    world.start(
        wait_for_late_rank, "save", "dawdle", SHORT, str(tmp_path / "step-1"), False, ranks=range(LATE)
    )
    results = world.collect(30)
    world.signal(LATE, signal.SIGCONT)
    for result in results:
        error, took = result.get()
        assert isinstance(error, DeadlineExceeded)
        (missing,) = error.missing
        assert missing.rank == LATE
        assert "stopped by a signal (state T)" in str(missing)
        assert took < SOON + SLACK


def save_and_look(rank: int, folder: str) -> tuple[set[str], object, int]:
    """What is left in this process after saves of both kinds: threads, the type of exits, signal handlers."""
    before = set(threading.enumerate())
    holdfast.save({"w": torch.ones(4)}, f"{folder}/direct", job=holdfast.Job(timeout=30))
    holdfast.async_save({"w": torch.ones(4)}, f"{folder}/beside", job=holdfast.Job(timeout=30)).committed(30)
    wait_for_threads(before)
    left = {thread.name for thread in threading.enumerate() if thread not in before}
    # Of a handler that faulthandler has set, the `signal` module does not know.
    caught = int(_status(os.getpid(), "SigCgt"), 16) >> 33  # real-time signals
    return left, str(SystemExit.__dict__["code"]), caught


def test_a_save_alone_leaves_no_thread_and_changes_no_exit_and_no_signal(tmp_path: Path) -> None:
    with ProcessWorld(WORLD) as world:
        for left, code, caught in world.run(save_and_look, str(tmp_path)):
            assert not left
            assert code == str(SystemExit.__dict__["code"])
            assert "member 'code'" in code
            assert caught == 0


def hearts(rank: int) -> list[int]:
    """How many threads of Holdfast's are there while it is installed, and after that; and after the group."""

    def count() -> int:
        return sum(thread.name.startswith("holdfast") for thread in threading.enumerate())

    before = set(threading.enumerate())
    holdfast.install("torch-dcp")
    found = [count()]
    holdfast.uninstall()
    wait_for_threads(before)
    found.append(count())
    holdfast.install("torch-dcp")
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(2.5)
    return [*found, count()]


@pytest.mark.parametrize("store_host", ["launcher", "rank 0"])
def test_one_thread_stands_while_it_is_installed(store_host: str) -> None:
    with ProcessWorld(WORLD, store_host=store_host) as world:
        # The last one answers `holdfast doctor`.
        assert world.run(hearts) == [[1, 0, 1]] * WORLD


def test_ranks_that_are_threads_of_one_process_are_told_apart() -> None:
    board = Board()
    raised: list[HoldfastError] = []

    def be(rank: int) -> None:
        roster = MemoryRoster(rank, 2, board)
        agree(
            "meeting",
            "memory:x",
            lambda said: 0,
            begin_call(holdfast.Job(roster=roster, timeout=20)),
        )
        if rank == 1:
            dawdle(threads[0])
            return
        try:
            agree(
                "choice",
                "memory:y",
                lambda said: 0,
                begin_call(holdfast.Job(roster=roster, timeout=1)),
            )
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
        time.sleep(3.0)


def in_deep(rank: int) -> HoldfastError | None:
    if rank == LATE:
        deep(200)
        return None
    try:
        agree("choice", "memory:deep", lambda said: 0, begin_call(holdfast.Job(timeout=1.0)))
    except HoldfastError as error:
        return error
    return None


def test_a_deep_stack_is_told_by_its_last_calls(world: ProcessWorld) -> None:
    error = world.run(in_deep, timeout=30)[0]
    assert isinstance(error, HoldfastError)
    assert error.missing[0].at.count(" deep") == 4
    assert len(error.missing[0].at) < LONGEST
