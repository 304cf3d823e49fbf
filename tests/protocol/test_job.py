"""`holdfast.Job`: what it refuses, whom its participants name, and what holds in calls that are given none."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Job, dcp, events
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import defaults, job_of
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast.errors import BadInput
from tests.support.processes import ProcessWorld
from tests.support.waiting import SLACK

SOON, LATE = 0.5, 2.5


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as shared:
        yield shared


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"timeout": 0}, "timeout must be a positive, finite number of seconds, not 0"),
        ({"timeout": float("nan")}, "timeout must be a positive"),
        ({"stall_timeout": -1}, "stall_timeout must be a positive"),
        ({"report_after": "5"}, "report_after must be a positive"),
        ({"lost_after": None}, "lost_after must be a positive"),
        ({"participants": 3}, "participants=3 must be ranks"),
        ({"participants": "01"}, "participants='01' must be ranks"),
        ({"participants": b"01"}, "participants=b'01' must be ranks"),
        ({"participants": [0.5]}, r"participants=\[0.5\] must be ranks"),
        ({"grid": {"tp": 2}}, "grid must be a holdfast.Grid"),
        ({"options": {"retries": 1}}, "options must be a holdfast.Options"),
        ({"roster": "tcp://here"}, "roster='tcp://here' is no roster"),
    ],
)
def test_what_is_no_job_is_told_where_it_is_made(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Job(**values)
    with pytest.raises(BadInput, match=words):
        replace(Job(), **values)


def test_a_job_is_a_value() -> None:
    job = Job(participants=range(2), timeout=5)
    assert job == Job(participants=[0, 1], timeout=5)
    assert pickle.loads(pickle.dumps(job)) == job
    with pytest.raises(AttributeError):
        job.timeout = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        (None, None),
        (range(3), (0, 1, 2)),
        ([3, 1], (1, 3)),
        (iter([3, 1]), (1, 3)),
        ({2, 0}, (0, 2)),
        (torch.tensor([2, 0]), (0, 2)),
        (lambda: [3, 1], (1, 3)),
        (lambda: None, None),
    ],
)
def test_participants_are_ranks_or_a_function(given: Any, ranks: tuple[int, ...] | None) -> None:
    job = Job(participants=given)
    assert job.ranks() == ranks
    assert job.ranks() == ranks, "an iterator is not used up"


def test_a_function_is_asked_at_each_call() -> None:
    grown = [0]
    board = Board()
    job = Job(participants=lambda: grown, roster=MemoryRoster(0, 3, board))
    assert begin_call(job).participants == (0,)
    grown.append(2)
    assert begin_call(job).participants == (0, 2)
    grown.append(3)
    with pytest.raises(BadInput, match="must be different ranks of a world of 3"):
        begin_call(job)


def test_a_function_that_gives_no_ranks_is_told() -> None:
    with pytest.raises(BadInput, match="must be ranks"):
        Job(participants=lambda: ["0"]).ranks()  # type: ignore[list-item, return-value]


def with_a_group(rank: int, folder: str) -> list[tuple[int, ...] | None]:
    both, mine = dist.new_group([0, 1]), [dist.new_group([number]) for number in (0, 1)][rank]
    found = [Job(participants=group).ranks() for group in (both, mine)]
    holdfast.save({"w": torch.ones(2)}, f"{folder}/{rank}", job=Job(participants=mine, timeout=30))
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{folder}/both", process_group=both, job=Job(timeout=30))
    with pytest.raises(BadInput, match="process_group=, or a job with participants, not both"):
        dcp.save(
            {"w": torch.ones(2)},
            checkpoint_id=f"{folder}/x",
            process_group=both,
            job=Job(participants=[0, 1]),
        )
    with pytest.raises(BadInput, match="no process group that this rank is in"):
        Job(participants=dist.group.WORLD.__class__(0, 1)).ranks()  # type: ignore[union-attr, call-arg]
    return found


def test_participants_are_a_process_group(pair: ProcessWorld, tmp_path: Path) -> None:
    assert pair.run(with_a_group, str(tmp_path)) == [[(0, 1), (0,)], [(0, 1), (1,)]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "both"]


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda job, at: holdfast.save({"w": torch.ones(2)}, at / "s", job=job),
    "load": lambda job, at: holdfast.load({"w": torch.ones(2)}, at / "s", job=job),
    "async_save": lambda job, at: holdfast.async_save({"w": torch.ones(2)}, at / "s", job=job),
    "Checkpoints": lambda job, at: holdfast.Checkpoints(at, job=job),
    "dcp.save": lambda job, at: dcp.save({"w": torch.ones(2)}, checkpoint_id=at / "s", job=job),
    "install": lambda job, at: holdfast.install(job=job),
    "session": lambda job, at: holdfast.session(job=job),
    "fingerprint": lambda job, at: holdfast.fingerprint({"w": torch.ones(2)}, job=job),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_given_in_its_place_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"job must be a holdfast\.Job, not \{'timeout': 5\}"):
        CALLS[name]({"timeout": 5}, tmp_path)
    assert not any(tmp_path.iterdir())
    assert holdfast.installed() == []


def test_a_call_without_a_job_has_what_install_was_told_last() -> None:
    assert job_of(None) == Job()
    for number in (1.0, 2.0):
        holdfast.install(
            "torch-dcp", job=Job(report_after=number, lost_after=9.0, timeout=7.0, participants=[5])
        )
        found = job_of(None)
        assert (found.report_after, found.lost_after) == (number, 9.0)
        assert (found.timeout, found.participants) == (None, None), "these are those of the frameworks' calls"
    holdfast.uninstall()
    assert job_of(None) == Job()
    assert len(defaults) == 1


def told_of_a_late_rank(rank: int, folder: str) -> tuple[float, float]:
    """After how many seconds rank 0 tells of the other one, and after how many its save returns."""
    holdfast.install("torch-dcp", job=Job(report_after=SOON))
    dist.barrier()
    begun = time.monotonic()
    told: list[float] = []

    def hear(event: events.Event) -> None:
        if event.name == "save.late":
            told.append(time.monotonic() - begun)

    stop = events.subscribe(hear)
    try:
        if rank == 1:
            time.sleep(LATE)
        holdfast.save({"w": torch.ones(2)}, folder)
    finally:
        stop()
        holdfast.uninstall()
    return (told[0] if told else 0.0), time.monotonic() - begun


def test_a_call_without_a_job_tells_when_install_was_told_to(pair: ProcessWorld, tmp_path: Path) -> None:
    (told, took), _ = pair.run(told_of_a_late_rank, str(tmp_path / "s"))
    assert SOON <= told < took
    assert LATE <= took < LATE + SLACK
