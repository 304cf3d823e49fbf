"""What stacks decide, and what they don't."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import Call, Rank, Source, Stack
from holdfast._watch.own_stacks import activity_here
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Diagnosis

WAITS = "    all_reduce (torch/distributed/distributed_c10d.py:3000)\n    step (train.py:50)\n    train (train.py:90)\n"


def dump(folder: Path, rank: int, lines: str, again: str = "", more: str = "", state: str = "idle") -> None:
    for name, text in ((f"rank-{rank}.txt", lines), (f"rank-{rank}-again.txt", again)):
        if text:
            (folder / name).write_text(
                f'Process {rank}: python\n\nThread {rank} ({state}): "MainThread"\n{text}{more}'
            )


def among_waiting(folder: Path, lines: str, again: str = "", more: str = "") -> Diagnosis:
    """Ranks 0 to 2 wait, and rank 3 is elsewhere."""
    for rank in range(3):
        dump(folder, rank, WAITS)
    dump(folder, 3, lines, again, more)
    return diagnose(read_all([str(folder)]))


BEFORE = "    read (data.py:7)\n    step (train.py:40)\n    train (train.py:90)\n"
MOVED = "    read (data.py:9)\n    step (train.py:40)\n    train (train.py:90)\n"
BEHIND = "    write (log.py:7)\n    step (train.py:60)\n    train (train.py:90)\n"
BEHIND_MOVED = "    write (log.py:9)\n    step (train.py:60)\n    train (train.py:90)\n"


@pytest.mark.parametrize(
    ("lines", "again", "kind"),
    [
        (BEFORE, MOVED, "late"),
        (BEFORE, BEFORE, "stuck"),
        (BEFORE, "", None),
        (BEHIND, BEHIND_MOVED, None),
        (BEHIND, BEHIND, "stuck"),
    ],
)
def test_moving_is_late_and_still_is_stuck(lines: str, again: str, kind: str | None, tmp_path: Path) -> None:
    """Behind the collective, a rank that moves may be in the round before, or have left it out."""
    found = among_waiting(tmp_path, lines, again)
    assert (found.verdict.kind if found.verdict is not None else None) == kind
    named = found.verdict or found.possible[0]
    assert named.ranks == (3,)
    assert named.waiting == (0, 1, 2)


@pytest.mark.parametrize(("state", "kind"), [("idle", "stuck"), ("active", None), ("active+gil", None)])
def test_a_rank_that_uses_the_cpu_on_one_line_may_wait_for_its_gpu(
    state: str, kind: str | None, tmp_path: Path
) -> None:
    """Composed from https://github.com/pytorch/pytorch/issues/95944: all ranks wait for their GPUs, the last one in
    `item()`, which py-spy shows as a line of the program. `(active)` is what it shows of a thread that runs."""
    waits = (
        "    synchronize (torch/cuda/__init__.py:496)\n    train (train.py:120)\n    main (train.py:300)\n"
    )
    item = "    train (train.py:96)\n    main (train.py:300)\n"
    for rank in range(7):
        dump(tmp_path, rank, waits)
    dump(tmp_path, 7, item, item, state=state)
    found = diagnose(read_all([str(tmp_path)])).verdict
    assert (found.kind if found is not None else None) == kind


@pytest.mark.parametrize("function", ["run", "<module>"])
def test_a_function_of_the_program_is_not_idle(function: str, tmp_path: Path) -> None:
    """Composed from https://github.com/pytorch/pytorch/issues/54059: one rank validates, and the others wait in a
    barrier. It is in a call of C, of which py-spy shows nothing."""
    dump(tmp_path, 0, f"    {function} (train.py:52)\n")
    for rank in (1, 2, 3):
        dump(
            tmp_path,
            rank,
            f"    barrier (torch/distributed/distributed_c10d.py:2500)\n    {function} (train.py:60)\n",
        )
    found = diagnose(read_all([str(tmp_path)]))
    assert found.verdict is None
    assert [(one.kind, one.ranks) for one in found.possible] == [("late", (0,))]


@pytest.mark.parametrize(("world", "kind"), [(4, "branch"), (8, None)])
def test_two_places_of_half_of_the_ranks_decide_nothing(world: int, kind: str | None, tmp_path: Path) -> None:
    """Composed from https://github.com/modelscope/ms-swift/issues/1817, which posts two stacks, and not all. Both
    may wait for a rank that is not shown."""
    for rank in range(4):
        name, line = ("recv", 50) if rank < 2 else ("all_reduce", 80)
        dump(
            tmp_path,
            rank,
            f"    {name} (torch/distributed/distributed_c10d.py:2)\n    step (schedule.py:{line})\n",
        )
    (tmp_path / "job.log").write_text(f"world size {world}\n")
    found = diagnose(read_all([str(tmp_path)])).verdict
    assert (found.kind if found is not None else None) == kind


def test_the_thread_that_works_for_an_idle_main_thread_counts(tmp_path: Path) -> None:
    idle = "    main_loop (ray/_private/worker.py:900)\n"
    gone = among_waiting(tmp_path, idle)
    assert gone.verdict is not None
    assert (gone.verdict.kind, gone.verdict.ranks) == ("branch", (3,))
    busy = among_waiting(tmp_path, idle, more=f'\nThread 77 (idle): "actor"\n{WAITS}')
    assert busy.verdict is None


def test_kernels_that_are_launched_decide_nothing(tmp_path: Path) -> None:
    """No host is blocked: where each of them is says nothing of the GPU."""
    for rank in range(4):
        line = 136 if rank else 245
        dump(
            tmp_path, rank, f"    apply (layer.py:7)\n    forward (model.py:{line})\n    run (engine.py:9)\n"
        )
    assert diagnose(read_all([str(tmp_path)])).verdict is None


def test_more_than_one_thing_at_once_is_not_judged(tmp_path: Path) -> None:
    dump(tmp_path, 4, BEFORE, MOVED)
    found = among_waiting(tmp_path, BEFORE, BEFORE)
    assert found.verdict is None
    assert found.possible[0].ranks == (3, 4)


def test_ranks_that_make_a_group_are_not_all_known_to_make_the_same(tmp_path: Path) -> None:
    helper = "    _new_process_group_helper (torch/distributed/distributed_c10d.py:2000)\n"
    for rank in range(3):
        dump(
            tmp_path,
            rank,
            helper + "    new_group (torch/distributed/distributed_c10d.py:5000)\n    main (train.py:9)\n",
        )
    made = diagnose(read_all([str(tmp_path)])).verdict
    assert made is not None
    assert (made.kind, made.ranks) == ("lifecycle", None)


@pytest.mark.parametrize(("woken", "kind"), [(0, "stuck"), (200, None)])
def test_a_rank_that_wakes_again_and_again_on_one_line_may_come(
    woken: int, kind: str | None, tmp_path: Path
) -> None:
    """It sleeps between two looks at something; one that is blocked does not go on even once."""
    here = Source("roll call")
    program = (Call("step", "train.py", 50), Call("train", "train.py", 90))
    waits = Stack(
        "MainThread", (Call("all_reduce", "torch/distributed/distributed_c10d.py", 3000), *program), here
    )
    polls = Stack("MainThread", (Call("look", "data.py", 7), Call("step", "train.py", 40), program[1]), here)
    for rank, stack in enumerate([waits, waits, waits, polls]):
        found = Rank(rank, stacks=(stack,), later=(stack,), busy=0.0, woken=woken)
        answer = {"roll_call": found, "members": {}, "world_size": 4, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert (said.verdict.kind if said.verdict is not None else None) == kind
    assert (said.verdict or said.possible[0]).ranks == (3,)


def test_wakes_of_a_thread_are_counted() -> None:
    before = activity_here()[2]
    for _ in range(20):
        time.sleep(0.001)
    assert activity_here()[2] - before >= 20
