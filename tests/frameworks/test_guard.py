"""Barriers of a framework's function over the roster, and the meeting before its other collectives."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast.errors import BadInput, RankFailed
from tests.support.collectives import counted
from tests.support.processes import ProcessWorld
from tests.support.waiting import AT_ONCE, SLACK
from tests.support.wide import wide


class Framework:
    """Waits and talks as the save functions of frameworks do."""

    def save(self, rank: int, groups: list[Any]) -> list[Any]:
        dist.barrier()
        everyone: list[Any] = [None] * 8
        dist.all_gather_object(everyone, {"rank": rank, "shape": (rank, 2)})
        told = [f"from {rank}", rank]
        dist.broadcast_object_list(told, src=3)
        some: list[Any] | None = [None] * 8 if rank == 0 else None
        dist.gather_object(rank * 10, some, dst=0)
        pair = groups[rank // 2]
        dist.barrier(group=pair)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, rank, group=pair)
        dist.barrier(group=groups[(rank // 2 + 1) % 4])  # of others: nothing happens, as with the collective
        return [everyone, told, some, both]

    def save_own(self, path: str) -> list[Any]:
        dist.barrier()
        everyone: list[Any] = [None] * 8
        dist.all_gather_object(everyone, path)
        return everyone


def guarded_job(rank: int) -> tuple[list[Any], list[str], bool]:
    import holdfast

    groups = [dist.new_group([first, first + 1]) for first in range(0, 8, 2)]
    original, barrier = Framework.save, dist.barrier
    holdfast.install(
        job=holdfast.Job(timeout=20, stall_timeout=10), guard=["tests.frameworks.test_guard.Framework.save"]
    )
    answers: list[Any] = []
    try:
        seen = counted(lambda: answers.extend(Framework().save(rank, groups)))
    finally:
        holdfast.uninstall()
    return answers, seen, Framework.save is original and dist.barrier is barrier


def test_they_do_what_the_collectives_do(mcore_world: ProcessWorld) -> None:
    found = mcore_world.run(guarded_job)
    for rank, (answers, seen, put_back) in enumerate(found):
        assert answers[0] == [{"rank": other, "shape": (other, 2)} for other in range(8)]
        assert answers[1] == ["from 3", 3]
        assert answers[2] == ([other * 10 for other in range(8)] if rank == 0 else None)
        assert answers[3] == [rank // 2 * 2, rank // 2 * 2 + 1]
        # Those that have a result are issued, once their ranks have met.
        assert "barrier" not in seen
        assert {"all_gather_object", "broadcast_object_list", "gather_object"} <= set(seen)
        assert put_back


def own_paths_job(rank: int) -> list[Any]:
    import holdfast

    here = "tests.frameworks.test_guard.Framework"
    holdfast.install(job=holdfast.Job(timeout=20, stall_timeout=5), guard=[f"{here}.save_own"])
    try:
        return Framework().save_own(f"rank-{rank}.pt")
    finally:
        holdfast.uninstall()


def test_each_rank_may_give_a_guarded_function_a_path_of_its_own(mcore_world: ProcessWorld) -> None:
    assert mcore_world.run(own_paths_job) == [[f"rank-{rank}.pt" for rank in range(8)]] * 8


def tensors_job(rank: int) -> tuple[list[Any], str]:
    """Tensor collectives meet first; on the world, participants are what counts."""
    import holdfast

    if rank >= 6:
        return [], ""
    answers: list[Any] = []
    with holdfast.guarded(
        "a save of six", job=holdfast.Job(timeout=60, stall_timeout=30.0, participants=range(6))
    ):
        dist.barrier()
        most = torch.tensor([rank])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        answers.append(int(most))
    begun = time.monotonic()
    try:
        if rank != 4:
            with holdfast.guarded("a save of all but one", job=holdfast.Job(timeout=60, stall_timeout=5.0)):
                dist.all_reduce(torch.ones(1))
    except RankFailed as error:
        assert time.monotonic() - begun < 5.0 + SLACK
        return answers, str(error)
    return answers, ""


def test_participants_are_all_ranks_inside(mcore_world: ProcessWorld) -> None:
    found = mcore_world.run(tensors_job)
    for rank, (answers, said) in enumerate(found[:6]):
        assert answers == [5]
        if rank != 4:
            assert "all_reduce in a save of all but one" in said
            assert "rank 4" in said


def after_commit_job(rank: int, folder: str) -> tuple[list[str], str]:
    """A rank that is gone after the commit: the others write what comes after it, and then raise."""
    import holdfast
    from holdfast._frameworks.guard import note_committed

    done: list[str] = []
    try:
        with holdfast.guarded("a framework's save", job=holdfast.Job(timeout=60, stall_timeout=5.0)):
            note_committed(holdfast.save({"w": torch.ones(2)}, folder, job=holdfast.Job(timeout=60)).path)
            if rank == 7:
                return done, ""
            dist.barrier()
            done.append("tracker")
            dist.barrier()
            done.append("end")
    except RankFailed as error:
        return done, str(error)
    return done, "passed"


def test_after_a_commit_a_framework_comes_to_its_end(mcore_world: ProcessWorld, tmp_path: Path) -> None:
    found = mcore_world.run(after_commit_job, str(tmp_path / "a"))
    for done, said in found[:7]:
        assert done == ["tracker", "end"]
        assert "rank 7" in said
        assert "committed and complete" in said
        assert "Nothing was committed" not in said


def refused_job(rank: int) -> tuple[list[str], int]:
    """Ranks 0 and 1 take part: what they get of calls that would wait for rank 2, and of one after."""
    import holdfast

    if rank == 2:
        return [], 0
    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast_object_list([None], src=0),
        lambda: dist.scatter_object_list([None], src=2),
        lambda: dist.broadcast(torch.zeros(1), src=0),
        lambda: dist.all_reduce(torch.zeros(1)),
        lambda: dist.all_reduce(torch.zeros(1 << 20, dtype=torch.int64), dist.ReduceOp.MAX),
    ]
    said, most = [], torch.tensor([rank])
    with holdfast.guarded(
        "a save of two", job=holdfast.Job(timeout=60, stall_timeout=30.0, participants=range(2))
    ):
        for call in calls:
            try:
                call()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return said, int(most)


def test_what_would_wait_for_a_rank_that_does_not_take_part_is_refused() -> None:
    with ProcessWorld(3) as world:
        for said, most in world.run(refused_job)[:2]:
            names = ("broadcast_object_list", "scatter_object_list", "broadcast", "all_reduce", "all_reduce")
            for told, name in zip(said, names, strict=True):
                assert told.startswith(f"BadInput: {name}")
                assert "on all ranks in a save of two: only 2 of them take part" in told
            assert most == 1


def barrier_of_others_job(rank: int) -> str:
    """Rank 0 calls a barrier of ranks 1 and 2, as a collective lets it, where two ranks take part."""
    import holdfast

    others = dist.new_group([1, 2])
    if rank < 2:
        with holdfast.guarded(
            "a save of two", job=holdfast.Job(timeout=60, stall_timeout=30.0, participants=range(2))
        ):
            if rank == 0:
                dist.barrier(group=others)
            dist.barrier()
    return "passed"


def test_a_barrier_of_others_is_nothing_where_some_take_part() -> None:
    with ProcessWorld(3) as world:
        assert world.run(barrier_of_others_job) == ["passed"] * 3


class Numbered:
    """A framework whose save waits twice; rank 3 leaves the first save in the middle, rank 5 skips it."""

    def save(self, rank: int, iteration: int) -> str:
        dist.barrier()
        if rank == 3 and iteration == 1:
            raise OSError("no space left on device")
        dist.barrier()
        return "saved"


def numbered_job(rank: int, skips: bool) -> list[str]:
    import holdfast
    from holdfast._frameworks.replacing import guard_of
    from holdfast._frameworks.settings import Settings

    settings = Settings(holdfast.Job(timeout=60, stall_timeout=5.0))
    guard = guard_of("tests.frameworks.test_guard:Numbered.save", settings, told_by=("iteration",))
    save, said = guard.make(Numbered.save), []
    for iteration in (1, 2, 3):
        try:
            said.append(
                "skipped" if skips and rank == 5 and iteration == 1 else save(Numbered(), rank, iteration)
            )
        except (OSError, RankFailed) as error:
            said.append(type(error).__name__)
        dist.barrier()  # the trainer's own: all ranks go on to the next together
    return said


@pytest.mark.parametrize("skips", [False, True], ids=["raises in the middle", "and another skips it"])
def test_the_save_after_one_that_failed_meets_again(skips: bool, mcore_world: ProcessWorld) -> None:
    for rank, said in enumerate(mcore_world.run(numbered_job, skips)):
        assert said[1:] == ["saved", "saved"], rank
        if rank not in (3, 5):
            assert said[0] == "RankFailed"


def absent_job(rank: int) -> tuple[str, float]:
    import holdfast

    guarded = holdfast.guarded
    dist.barrier()  # importing takes longer than a silence may, where the machine is busy
    begun = time.monotonic()
    if rank == 5:
        return "elsewhere", 0.0
    try:
        with guarded("the end of a save", job=holdfast.Job(timeout=20, stall_timeout=2.0)):
            dist.barrier()
    except RankFailed as error:
        return f"{error.rank}: {error}", time.monotonic() - begun
    return "passed", 0.0


def test_who_never_comes_is_named(mcore_world: ProcessWorld) -> None:
    for rank, (said, took) in enumerate(mcore_world.run(absent_job)):
        if rank != 5:
            assert said.startswith("5: ")
            assert "barrier in the end of a save" in said
            assert took < AT_ONCE


class Kinds:
    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    def inherited(self) -> str:
        return "here"


class Derived(Kinds): ...


def unreached(rank: int) -> list[str]:
    """What is logged by the end of an installation of which one guard was reached."""
    import holdfast

    here, said = "tests.frameworks.test_guard", io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("holdfast").addHandler(handler)
    try:
        holdfast.install(guard=[f"{here}.Kinds.static", f"{here}.Kinds.of_class"])
        holdfast.install(guard=[f"{here}.Kinds.static", f"{here}.Kinds.of_class"])
        Kinds.static(1)
        holdfast.uninstall()
        holdfast.install(guard=[f"{here}.Kinds.static"])
        Kinds.static(1)
        holdfast.uninstall()
    finally:
        logging.getLogger("holdfast").removeHandler(handler)
    return [line for line in said.getvalue().splitlines() if line.startswith("install(guard=")]


def test_a_guard_that_is_never_reached_says_so_once_on_rank_0() -> None:
    with ProcessWorld(2) as world:
        said, other = world.run(unreached)
    assert [line.partition(":")[0] for line in said] == [
        "install(guard=...) guarded nothing in tests.frameworks.test_guard.Kinds.of_class"
    ]
    assert other == []


NEVER = """
import sys, torch.distributed as dist, holdfast
holdfast.install(guard=["json.dump"])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1:]:
    raise KeyError("no data")
"""


@pytest.mark.parametrize("argument", wide([[], ["fails"]], suite=[["fails"]]))
def test_at_the_end_of_a_program_that_did_not_fail(argument: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEVER, *argument], text=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == len(argument)
    assert ("guarded nothing in json.dump" in done.stderr) == (not argument)


def test_methods_of_all_kinds_are_guarded_and_put_back() -> None:
    import holdfast

    here = "tests.frameworks.test_guard"
    before = dict(vars(Kinds)), dict(vars(Derived))
    holdfast.install(guard=[f"{here}.Kinds.static", f"{here}.Kinds.of_class", f"{here}.Derived.inherited"])
    try:
        assert Kinds().static(1) == 1
        assert Derived.of_class(2) == (Derived, 2)
        assert Derived().inherited() == "here"
        with pytest.raises(BadInput):
            holdfast.install(guard=[f"{here}.Kinds.static", "nowhere.at.all"])
        assert "__wrapped__" in vars(vars(Kinds)["static"].__func__), "the install before stays"
    finally:
        holdfast.uninstall()
    assert (dict(vars(Kinds)), dict(vars(Derived))) == before


def test_guards_of_two_threads_leave_nothing_behind() -> None:
    import holdfast

    barrier, entered, leave = dist.barrier, threading.Event(), threading.Event()

    def other() -> None:
        with holdfast.guarded("another"):
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=other)
    with holdfast.guarded("one"):
        thread.start()
        entered.wait(5)
    leave.set()
    thread.join(5)
    assert dist.barrier is barrier


@pytest.mark.parametrize("place", ["nowhere.at.all", "os.path.nothing", "json"])
def test_a_name_that_is_none(place: str) -> None:
    import holdfast

    with pytest.raises(BadInput, match="guard="):
        holdfast.install(guard=[place])


def test_participants_that_are_no_ranks_leave_torch_as_it_is() -> None:
    names = ("barrier", "all_gather_object", "all_reduce", "new_group")
    before = [getattr(dist, name) for name in names]
    with (
        pytest.raises(BadInput, match="'a'"),
        holdfast.guarded("nothing", job=holdfast.Job(participants=[1, "a"])),
    ):  # type: ignore[list-item]
        pass
    assert [getattr(dist, name) for name in names] == before


def path_of_rank_0(path: str) -> str:
    """Take the path that rank 0 gives, as Lightning does."""
    given = [path]
    dist.broadcast_object_list(given, src=0)
    return given[0]


def loads_a_path_of_its_own(rank: int) -> list[str]:
    from holdfast._frameworks.frameworks import FRAMEWORKS
    from holdfast._frameworks.replacing import replacements_of
    from holdfast._frameworks.settings import Settings

    settings = Settings(job=holdfast.Job(timeout=20))
    return [
        guard.make(path_of_rank_0)(f"/local/{rank}/checkpoint")
        for framework in FRAMEWORKS
        for guard in replacements_of(framework, settings)
        if guard.name in ("Fabric.load", "Accelerator.load_state")
    ]


def test_ranks_of_a_trainer_may_give_different_paths() -> None:
    """Each has a temporary folder, a time or a disk of its own in it. To tell calls apart by it would end a
    healthy job."""
    with ProcessWorld(2) as world:
        assert world.run(loads_a_path_of_its_own) == [["/local/0/checkpoint"] * 3] * 2
