"""Roll calls of real ranks over gloo, and the judgement of many simulated ones."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast._watch.collector import Collector
from holdfast._watch.diagnose import diagnose
from holdfast._watch.dumps import read_roll_call
from holdfast._watch.evidence import Call, Operation, Rank, Source, Stack
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Verdict
from tests.support.processes import ProcessWorld, Result
from tests.watch.jobs import TIMEOUT, job


def called(
    kind: str, folder: Path, wakes: int | None = None, seconds: float = TIMEOUT
) -> tuple[list[Result], list[str], Verdict | None]:
    """Run a job that hangs in one way: its results, what was told, and the diagnosis of its files."""
    with ProcessWorld(4) as world:
        world.start(job, str(folder), kind, seconds)
        if wakes is not None:  # a rank that has stopped itself
            time.sleep(3 * TIMEOUT)
            world.signal(wakes, signal.SIGCONT)
        results = world.collect(timeout=60)
    told = [text for result in results if result.value for text in result.value["told"]]
    return results, told, diagnose(read_all([str(folder)])).verdict if list(folder.iterdir()) else None


def test_a_late_rank_is_told_and_comes(tmp_path: Path) -> None:
    """Once, on one rank, before the timeout; the job goes on, and that is told, too."""
    results, told, verdict = called("late", tmp_path, seconds=2 * TIMEOUT)
    assert all(result.get()["came"] for result in results)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, verdict.waiting) == ("late", (1,), (0, 2, 3))
    assert (verdict.group, verdict.operation) == ("1:train", "all_reduce")
    assert verdict.call is not None
    assert verdict.call.function in ("step_of_work", "another_step", "compute")
    calls = [text for text in told if text.startswith("Roll call of 4 of 4 ranks")]
    assert len(calls) == 1
    assert "late (80%, by stacks): rank 1:" in calls[0]
    assert "in eval" in calls[0]
    assert sum("is over, after" in text for text in told) == 1
    (folder,) = (tmp_path / "roll-calls").iterdir()
    assert sorted(os.listdir(folder)) == [f"rank-{rank}.json" for rank in range(4)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "expected", "ranks"),
    [
        ("asleep", "stuck", (1,)),
        ("with_the_gil", "stuck", (1,)),
        ("with_a_lock", "stuck", (1,)),
        ("in_another_order", "cycle", None),
        ("another_operation", "mismatch", (1,)),
        ("gone", "died", (1,)),
    ],
)
def test_each_way_to_hang_gets_its_class_and_rank(
    kind: str, expected: str, ranks: Any, tmp_path: Path
) -> None:
    _, told, verdict = called(kind, tmp_path)
    assert verdict is not None, told
    assert (verdict.kind, verdict.ranks) == (expected, ranks)
    assert sum(text.startswith("Roll call of") for text in told) == 1


@pytest.mark.soak
def test_a_rank_behind_the_collective_is_named_and_not_judged(tmp_path: Path) -> None:
    """It has left the collective out, or it is still in the round before: lines don't tell."""
    _, told, verdict = called("past_it", tmp_path)
    assert verdict is None
    possible = diagnose(read_all([str(tmp_path)])).possible
    assert {one.kind for one in possible} == {"branch", "late"}
    assert all((one.ranks, one.waiting) == ((1,), (0, 2, 3)) for one in possible)
    assert any("rank 1: works at" in text for text in told)


@pytest.mark.soak
def test_a_stopped_rank_is_answered_for(tmp_path: Path) -> None:
    _, told, verdict = called("stopped", tmp_path, wakes=1)
    assert verdict is not None, told
    assert (verdict.kind, verdict.ranks, verdict.basis) == ("stuck", (1,), "order")
    assert "stopped by a signal" in verdict.summary


@pytest.mark.soak
def test_a_healthy_job_is_not_called(tmp_path: Path) -> None:
    results, told, _ = called("healthy", tmp_path)
    assert all(result.get()["came"] for result in results)
    assert told == []
    assert list(tmp_path.iterdir()) == []


def answer(
    rank: int, world: int, calls: tuple[Call, ...], pending: bool, later: tuple[Call, ...] = ()
) -> Any:
    """What a rank of a simulated world answers."""
    here = Source("roll call")
    operation = Operation(
        "0:default_pg", 7 if pending else 6, "all_reduce", "started" if pending else "completed", here, (1, 1)
    )
    stacks = (Stack("MainThread", calls, here),)
    found = Rank(
        rank, (operation,), stacks=stacks, later=(Stack("MainThread", later or calls, here),), busy=0.0
    )
    members = {"0:default_pg": list(range(world))} if rank == 0 else {}
    return json.loads(
        msgspec.json.encode({"roll_call": found, "members": members, "world_size": world, "by": rank})
    )


def test_a_thousand_ranks_are_judged_in_seconds() -> None:
    """And in time that grows with their number only."""
    main = Call("train", "train.py", 90)
    waits = (Call("all_reduce", "torch/distributed/distributed_c10d.py", 3000), main)
    works = (Call("plan", "planner.py", 5), Call("train", "train.py", 80))
    moved = (Call("plan", "planner.py", 9), Call("train", "train.py", 80))
    seconds = {}
    for world in (1000, 4000):
        collector = Collector()
        began = time.monotonic()
        for rank in range(world):
            late = rank == 613
            read_roll_call(
                answer(rank, world, works if late else waits, not late, moved if late else ()),
                collector,
                f"rank-{rank}",
            )
        collected = time.monotonic()
        found = diagnose(collector.evidence())
        seconds[world] = time.monotonic() - collected
        assert found.verdict is not None
        assert (found.verdict.kind, found.verdict.ranks, found.is_complete) == ("late", (613,), True)
        if world == 1000:
            assert time.monotonic() - began < 10
    assert seconds[4000] < 12 * seconds[1000] + 0.5
