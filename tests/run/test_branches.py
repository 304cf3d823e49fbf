"""A run that goes back to an older step is followed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._core.format.names import INDEX, LEFT
from holdfast._core.store.local import open_store
from holdfast._tools.checkpoints.inspect import describe_run, fate
from holdfast._tools.checkpoints.prune import prune
from holdfast.errors import HoldfastError
from tests.run import jobs
from tests.support.processes import ProcessWorld

ALONE = holdfast.Job(no_dist=True)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value))}


def checkpoints(run: Path, keep: int | None = None, keep_every: int | None = None) -> holdfast.Checkpoints:
    return holdfast.Checkpoints(run, keep=keep, keep_every=keep_every, asynchronous=False, job=ALONE)


def train(run: Path, *steps: int, sign: int = 1, keep: int | None = None) -> None:
    with checkpoints(run, keep) as made:
        for step in steps:
            made.save(step, state(sign * step))


def newest(run: Path) -> tuple[int | None, float]:
    """What the next start of the job restores."""
    with checkpoints(run) as made:
        found = state(0)
        return made.restore(found), float(found["w"][0])


def test_the_branch_is_the_newest_and_keep_removes_the_steps_behind_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1000, 1500, 2000)
    with checkpoints(tmp_path, keep=2) as made:
        assert made.restore(state(0), 1500) == 1500
        assert made.latest() == 2000  # a restore alone may be an evaluation
        assert not caplog.records
        found = []
        for step in (1600, 1700, 1800):
            made.save(step, state(-step))
            found.append((made.steps(), made.latest()))
    assert found == [([1500, 1600], 1600), ([1600, 1700], 1700), ([1700, 1800], 1800)]
    assert newest(tmp_path) == (1800, -1800)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "goes back to step 1500 and leaves step 2000 behind" in said


def test_without_keep_all_stay_until_the_run_saves_them_again(tmp_path: Path) -> None:
    train(tmp_path, 1000, 1500, 2000, 2500)
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 1000)
        made.save(1600, state(-1600))
        assert made.steps() == [1000, 1500, 1600, 2000, 2500]
        assert str(holdfast.latest(tmp_path)).endswith("step-00001600")
        fates = {
            step.step: fate(run, step) for run in [describe_run(open_store(tmp_path))] for step in run.steps
        }
        assert fates == {
            1000: "",
            1500: "left behind",
            1600: "",
            2000: "left behind",
            2500: "left behind",
        }
        made.save(2000, state(-2000))
    assert newest(tmp_path) == (2000, -2000)
    pruned = prune(tmp_path, keep=2)
    assert pruned.kept == (1600, 2000)
    assert [(item.path, item.why) for item in pruned.removed] == [
        ("step-00001500", "the run has left it behind"),
        ("step-00002500", "the run has left it behind"),
        ("step-00001000", "older than the newest 2 committed"),
    ]


def test_the_rules_that_inspect_tells_are_those_of_the_branch(tmp_path: Path) -> None:
    train(tmp_path, 1500, 2000, keep=9)
    with checkpoints(tmp_path, keep=5) as made:
        made.restore(state(0), 1500)
        made.save(1600, state(-1600))
    assert describe_run(open_store(tmp_path)).rules == "the newest 5"


def test_a_step_that_was_loaded_for_a_comparison_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, 1000, 1500, 2000)
    with checkpoints(tmp_path, keep=3) as made:
        made.restore(state(0))
        made.restore(state(0), 1000)
        made.save(2100, state(2100))
        assert made.steps() == [1500, 2000, 2100]
    assert not (tmp_path / LEFT).exists()


def test_a_run_may_go_back_twice_and_return(tmp_path: Path) -> None:
    train(tmp_path, 1000, 2000, 3000)
    for back, step in ((2000, 2100), (1000, 1100)):
        with checkpoints(tmp_path) as made:
            made.restore(state(0), back)
            made.save(step, state(-step))
        assert newest(tmp_path) == (step, -step)
    assert set(json.loads((tmp_path / LEFT).read_text())["left"]) == {
        "step-00002000",
        "step-00002100",
        "step-00003000",
    }
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 3000)
        made.save(3100, state(3100))
    (tmp_path / "step-00003100" / INDEX).unlink()
    assert newest(tmp_path) == (3000, 3000)


@pytest.mark.parametrize("damaged", [(1600,), (1600, 1500, 1000)])
def test_a_damaged_step_of_the_branch_falls_back_within_it_first(
    tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    train(tmp_path, 1000, 1500, 2000)
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 1500)
        made.save(1600, state(-1600))
    for step in damaged:
        index = tmp_path / f"step-{step:08}" / INDEX
        index.write_bytes(index.read_bytes()[:-40])
    assert newest(tmp_path) == ((1500, 1500) if damaged == (1600,) else (2000, 2000))


def test_a_first_save_that_fails_leaves_the_restored_step_as_the_newest(tmp_path: Path) -> None:
    train(tmp_path, 1000, 1500, 2000)
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 1500)
        with pytest.raises(HoldfastError):
            made.save(1600, state(-1600), expected=["not there"])
        assert newest(tmp_path) == (1500, 1500)
        made.save(1600, state(-1600))
        made.save(1700, state(-1700))
    assert newest(tmp_path) == (1700, -1700)
    assert set(json.loads((tmp_path / LEFT).read_text())["left"]) == {"step-00002000"}


def test_a_run_that_begins_again_in_the_folder_of_another_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, 1500, 2000)
    train(tmp_path, 100, 200, sign=-1)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "has step 2000, and step 100 is saved below it" in said
    assert newest(tmp_path) == (2000, 2000)


def test_a_run_that_first_saves_the_restored_step_again_goes_back(tmp_path: Path) -> None:
    train(tmp_path, 1500, 2000)
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 1500)
        made.save(1500, state(1500))
    assert newest(tmp_path) == (1500, 1500)


def test_a_step_kept_by_another_rule_stays_behind(tmp_path: Path) -> None:
    train(tmp_path, 1000, 1500, 2000)
    with checkpoints(tmp_path, keep=1, keep_every=1000) as made:
        made.restore(state(0), 1500)
        made.save(1600, state(-1600))
        assert made.steps() == [1000, 1600, 2000]
    assert newest(tmp_path) == (1600, -1600)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"left": [1]}',
        b'{"left": {"../x": "00"}, "version": "0"}',
        b'{"left": {"\xff": "00"}}',
        b'{"a":' + b"[" * 50_000,
    ],
)
def test_a_damaged_list_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    train(tmp_path, 1000, 2000)
    (tmp_path / LEFT).write_bytes(content)
    assert newest(tmp_path) == (2000, 2000)
    with checkpoints(tmp_path) as made:
        made.restore(state(0), 1000)
        made.save(1100, state(-1100))
    assert newest(tmp_path) == (1100, -1100)


def test_ranks_go_back_together_with_two_saves_in_flight(tmp_path: Path) -> None:
    train(tmp_path, 1500, 1700, 2000)
    with ProcessWorld(2) as world:
        for steps, latest in world.run(jobs.go_back, str(tmp_path)):
            assert (steps, latest) == ([1500, 1600, 1700, 1800, 2000], 1800)
    assert newest(tmp_path) == (1800, -1800)
    assert set(json.loads((tmp_path / LEFT).read_text())["left"]) == {"step-00001700", "step-00002000"}
