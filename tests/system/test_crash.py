"""Death and power cuts at every point of an overwrite: the old checkpoint or the new one, whole."""

from __future__ import annotations

import multiprocessing as mp
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.protocol.job import Job
from tests.support.crash import cut_power, die_before, mount_ext4, unmount_ext4
from tests.support.processes import ProcessWorld
from tests.support.wide import wide
from tests.system.checks import errors_of
from tests.system.jobs import load_job, save_job


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(50, 60, generator=generator),
        "b": torch.randn(7, generator=generator),
        "step": step,
    }


def overwrite(path: str, step: int, number: int) -> None:
    die_before(number)
    holdfast.save(state_of(step), path, step=step)


def loaded(path: str) -> int:
    """Which step the folder holds; every value must be that step's."""
    state = state_of(999)
    holdfast.load(state, path)
    want = state_of(state["step"])
    assert torch.equal(state["w"], want["w"])
    assert torch.equal(state["b"], want["b"])
    return int(state["step"])


def test_killed_at_every_call_of_an_overwrite(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    path, number, survived = str(tmp_path / "step"), 0, []
    holdfast.save(state_of(1), path, step=1)
    while True:
        number += 1
        holdfast.save(state_of(1), path, step=1)
        process = context.Process(target=overwrite, args=(path, 2, number))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        survived.append(loaded(path))
        if process.exitcode == 0:
            break
    assert number > 12  # it did die at many places
    assert survived[0] == 1
    assert survived[-1] == 2
    assert sorted(survived) == survived  # old until some call, new from then on


@pytest.mark.parametrize(
    "number",
    [
        *(1, 9, 17),
        *wide([5, 13]),
        *(pytest.param(number, marks=pytest.mark.soak) for number in range(1, 18) if number % 4 != 1),
    ],
)
def test_committer_killed_in_an_overwrite(
    world: ProcessWorld, mortal: ProcessWorld, tmp_path: Path, number: int
) -> None:
    path = str(tmp_path / "step")
    world.run(save_job, path, 1, {})
    how = {"job": Job(timeout=20.0, stall_timeout=3.0), "mishap": {0: ("die_before", number)}}
    mortal.start(save_job, path, 2, how)
    results = mortal.collect(30)
    if results[0].died is None:
        pytest.fail("the committer was to die, but makes fewer calls than that")
    outcomes = {
        "committed" if result.error is None else type(result.error).__name__ for result in results[1:]
    }
    assert len(outcomes) == 1, outcomes
    step = 2 if outcomes == {"committed"} else 1
    assert step == 2 or all("rank 0" in str(error) for error in errors_of(results))
    world.run(load_job, path, step, {})


@pytest.fixture
def loop_ext4(tmp_path: Path) -> Iterator[Path]:
    place = mount_ext4(tmp_path)
    yield place
    unmount_ext4(place)


def test_power_cut_right_after_save(loop_ext4: Path) -> None:
    run = loop_ext4 / "run"
    for step in (1, 2):
        holdfast.Checkpoints(run, asynchronous=False).save(step, state_of(step))
        cut_power(loop_ext4)
        assert holdfast.latest(run) == str(run / f"step-{step:08d}")
        assert loaded(str(run / f"step-{step:08d}")) == step
    holdfast.save(state_of(3), run / "step-00000002", step=3)  # an overwrite is as durable
    cut_power(loop_ext4)
    assert loaded(str(run / "step-00000002")) == 3


def test_power_cut_test_can_fail(loop_ext4: Path) -> None:
    """What is not synced does not survive the same cut."""
    torch.save(state_of(1), loop_ext4 / "unsynced.pt")
    cut_power(loop_ext4)
    kept = loop_ext4 / "unsynced.pt"
    assert not kept.exists() or kept.stat().st_size == 0


@pytest.mark.parametrize("number", range(1, 26))
def test_power_cut_at_every_call_of_an_overwrite(loop_ext4: Path, number: int) -> None:
    path = str(loop_ext4 / "run" / "step")
    holdfast.save(state_of(1), path, step=1)
    context = mp.get_context("forkserver")
    process = context.Process(target=overwrite, args=(path, 2, number))
    process.start()
    process.join(60)
    cut_power(loop_ext4)
    step = loaded(path)
    assert step == 2 if process.exitcode == 0 else step in (1, 2)
