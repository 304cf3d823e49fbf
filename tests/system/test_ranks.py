"""Ranks that are absent, late, stopped, or killed, in saves of eight real processes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast._core.protocol.call import find_roster
from holdfast._core.protocol.job import Job
from holdfast._core.roster.lost import see
from holdfast.errors import CommitUnconfirmed, DeadlineExceeded, RankFailed, RosterLost
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK, ended, wait_until
from tests.system.checks import (
    PATIENT,
    at_once,
    errors_of,
    in_time,
    names_rank,
    no_checkpoint,
    no_data,
    same_everywhere,
)
from tests.system.jobs import load_job, save_job

FAST = Job(timeout=30.0, stall_timeout=3.0)


def test_saves_and_loads(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    world.run(save_job, path, 1, {})
    reports = world.run(load_job, path, 1, {})
    assert all(report.step == 1 for report in reports)
    assert all(report.bytes_read >= report.bytes_needed > 0 for report in reports)


@pytest.mark.parametrize("absent", [3, 0])
def test_absent_rank_is_named(world: ProcessWorld, tmp_path: Path, absent: int) -> None:
    path = str(tmp_path / "run" / "step-1")
    world.run(save_job, str(tmp_path / "before"), 0, {})  # so that everybody has been heard of
    ranks = [rank for rank in range(8) if rank != absent]
    world.start(save_job, path, 1, {"job": FAST}, ranks=ranks)
    errors = errors_of(world.collect(40))
    error = same_everywhere(errors, 7)
    assert isinstance(error, RankFailed)
    names_rank(world, error, absent, "has not entered", "idle since save of", "committed'")
    in_time(errors, 3.0)
    no_checkpoint(path)
    no_data(path)
    # The absent rank comes after all: it gets the same error at once, and the next save works.
    world.start(save_job, path, 1, {"job": PATIENT}, ranks=[absent])
    late = errors_of(world.collect(40))
    assert late[0].message == error.message
    at_once(late)
    world.run(save_job, path, 1, {"job": FAST})
    world.run(load_job, path, 1, {})


def test_deadline_names_the_absent_rank(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "run" / "step-1")
    world.run(save_job, str(tmp_path / "before"), 0, {})  # so that everybody has been heard of
    world.start(save_job, path, 1, {"job": Job(timeout=3.0, stall_timeout=60.0)}, ranks=[0, 1, 2, 3, 4, 5, 7])
    errors = errors_of(world.collect(40))
    error = same_everywhere(errors, 7)
    assert isinstance(error, DeadlineExceeded)
    names_rank(world, error, 6)
    in_time(errors, 3.0)
    no_checkpoint(path)
    no_data(path)


def install(rank: int) -> None:
    holdfast.install(framework="megatron-core")


def is_known(rank: int, other: int) -> bool:
    return see(find_roster(Job()), [other])[other].vitals is not None


def warm_up(rank: int) -> None:
    holdfast.warm_up("all", job=Job(timeout=40.0))


def test_who_ends_before_its_first_call_is_known_only_after_install(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        world.run(install, ranks=[3])
        # A rank that nobody has heard of.
        world.signal(2, signal.SIGKILL)
        job = Job(timeout=3.0, participants=(0, 1, 2))
        world.start(save_job, str(tmp_path / "a"), 1, {"job": job}, ranks=[0, 1])
        error = same_everywhere(errors_of(world.collect(40, [0, 1])), 2)
        assert isinstance(error, DeadlineExceeded)
        assert "rank 2, which has not been heard of" in error.message
        assert "holdfast.install()" in error.hint
        # One that has made no call either, but has installed.
        wait_until(lambda: world.run(is_known, 3, ranks=[0]) == [True])
        world.signal(3, signal.SIGKILL)
        world.start(warm_up, ranks=[0, 1])
        error = same_everywhere(errors_of(world.collect(40, [0, 1])), 2)
        assert type(error) is RankFailed
        assert error.rank == 3
        assert ended(error.message)


def test_late_rank_is_waited_for(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    took = world.run(save_job, path, 1, {"job": Job(stall_timeout=30.0), "delay": {2: 3.0}}, timeout=60)
    assert took[5] - took[2] > 2.0
    world.run(load_job, path, 1, {})


@pytest.mark.parametrize(
    ("event", "share", "phase"),
    [("save.entered", 0.0, ""), ("save.writing", 0.5, "writing"), ("save.written", 0.0, "writ")],
    ids=["before", "during", "after"],
)
@pytest.mark.parametrize("victim", [pytest.param(5, marks=pytest.mark.wide), 0])
def test_killed_rank_is_named(
    mortal: ProcessWorld, tmp_path: Path, event: str, share: float, phase: str, victim: int
) -> None:
    path = str(tmp_path / "step-2")
    mortal.run(save_job, str(tmp_path / "step-1"), 1, {})
    mortal.start(save_job, path, 2, {"job": PATIENT, "mishap": {victim: ("die", event, share)}})
    results = mortal.collect(40)
    assert results[victim].died == -signal.SIGKILL
    if event == "save.written" and all(result.error is None for result in results if result.rank != victim):
        pytest.fail("the victim died before it could report that it had written")
    errors = errors_of(results)
    error = same_everywhere(errors, 7)
    names_rank(mortal, error, victim, phase)
    assert ended(str(error)), error
    at_once(errors)  # on one host a death is seen without a timeout
    no_checkpoint(path)
    no_data(path, but_of=[victim])
    assert os.path.exists(tmp_path / "step-1" / "index.safetensors")


@pytest.mark.parametrize("victim", [5, 0])
def test_stopped_rank_is_named(mortal: ProcessWorld, tmp_path: Path, victim: int) -> None:
    path, flag = str(tmp_path / "step-1"), tmp_path / "paused"
    mortal.start(save_job, path, 1, {"job": FAST, "mishap": {victim: ("pause", "save.writing", str(flag))}})
    wait_until(flag.exists)
    errors = errors_of(mortal.collect(40, [rank for rank in range(8) if rank != victim]))
    in_time(errors, 3.0)
    mortal.signal(victim, signal.SIGCONT)
    errors += errors_of(mortal.collect(40))
    error = same_everywhere(errors, 8)  # the stopped rank learns of it when it wakes
    names_rank(mortal, error, victim, "writing", "no progress")
    no_checkpoint(path)
    no_data(path)


def test_stopped_rank_is_waited_for(mortal: ProcessWorld, tmp_path: Path) -> None:
    path, flag = str(tmp_path / "step-1"), tmp_path / "paused"
    how = {"job": PATIENT, "mishap": {5: ("pause", "save.writing", str(flag))}}
    mortal.start(save_job, path, 1, how)
    wait_until(flag.exists)
    assert mortal.collect_some(3.0) == [], "all wait"
    mortal.signal(5, signal.SIGCONT)
    for result in mortal.collect(40):
        result.get()
    mortal.run(load_job, path, 1, {})


def test_store_host_dies(tmp_path: Path) -> None:
    path, flag = str(tmp_path / "step-1"), tmp_path / "paused"
    with ProcessWorld(8, store_host="rank 0") as world:
        world.start(save_job, path, 1, {"job": FAST, "mishap": {0: ("pause", "save.entered", str(flag))}})
        wait_until(flag.exists)
        world.signal(0, signal.SIGKILL)
        results = world.collect(40)
        errors = errors_of(results)
        assert len(errors) == 7
        for error in errors:
            assert isinstance(error, RosterLost | CommitUnconfirmed), error
            assert "message store" in str(error)
        in_time(errors, 6.0)
        no_checkpoint(path)


def test_non_participant_is_told(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    how = {"job": replace(PATIENT, participants=range(6)), "change": dict.fromkeys(range(8), _plain)}
    world.start(save_job, path, 1, how)
    results = world.collect(40)
    for result in results[:6]:
        assert result.error is None, result.trace
    for error in errors_of(results[6:]):
        assert "the participants are 0, 1, 2, 3, 4, 5" in str(error)
    at_once(errors_of(results[6:]))
    assert os.path.exists(os.path.join(path, "index.safetensors"))


def _plain(state: dict) -> None:  # type: ignore[type-arg]
    for name in [name for name in state["model"] if "experts" in name]:
        del state["model"][name]


def test_a_failed_load_says_nothing_of_a_commit(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    world.run(save_job, path, 1, {})
    world.start(load_job, path, 1, {"job": FAST}, ranks=range(7))
    for error in errors_of(world.collect(40)):
        assert error.rank == 7
        assert "what is in storage is untouched" in str(error)
        assert "committed" not in error.hint


def test_stopped_store_host_holds_nobody(tmp_path: Path) -> None:
    """A store host that is stopped, not dead: every call into it blocks, and still all come back."""
    path, flag = str(tmp_path / "step-1"), tmp_path / "paused"
    with ProcessWorld(8, store_host="rank 0") as world:
        world.start(
            save_job, path, 1, {"job": Job(timeout=4.0), "mishap": {0: ("pause", "save.entered", str(flag))}}
        )
        wait_until(flag.exists)
        errors = errors_of(world.collect_some(4.0 + SLACK, range(1, 8)))
        world.signal(0, signal.SIGCONT)
        world.collect(40)
    assert len(errors) == 7
    in_time(errors, 4.0)
    for error in errors:
        assert isinstance(error, DeadlineExceeded | CommitUnconfirmed | RankFailed), error
        assert "asks the message store, which does not answer" in str(error)
        assert error.rank is None, "nobody can be named without the message store"
        assert error.missing == ()
    no_checkpoint(path)


def test_interrupted_rank_tells_the_others(world: ProcessWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "step-1")
    world.start(save_job, path, 1, {"job": PATIENT, "mishap": {3: ("interrupt", "save.writing")}})
    results = world.collect(40)
    assert isinstance(results[3].error, KeyboardInterrupt)
    errors = errors_of(result for result in results if result.rank != 3)
    error = same_everywhere(errors, 7)
    assert error.rank == 3
    assert "was interrupted by KeyboardInterrupt" in str(error)
    at_once(errors)
    no_checkpoint(path)
    no_data(path)
    world.run(save_job, path, 1, {"job": FAST})
    world.run(load_job, path, 1, {})


def test_a_failure_alone_is_not_remembered(world: ProcessWorld, tmp_path: Path) -> None:
    assert world.run(alone_job, str(tmp_path), ranks=[4]) == [None]


def alone_job(rank: int, folder: str) -> None:
    import torch

    import holdfast
    from holdfast.errors import NotCommitted

    place = f"{folder}/step"
    with pytest.raises(NotCommitted):
        holdfast.load({"w": torch.zeros(3)}, place, job=holdfast.Job(participants=[rank]))
    holdfast.save({"w": torch.ones(3)}, place, job=holdfast.Job(participants=[rank]))
    state = {"w": torch.zeros(3)}
    holdfast.load(state, place, job=holdfast.Job(participants=[rank]))
    assert state["w"].tolist() == [1.0] * 3
