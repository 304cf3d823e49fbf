"""A run that starts from another one, or from a checkpoint, and then goes on from its own steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file

import holdfast
from holdfast._core.format.names import INDEX
from holdfast.errors import BadInput, CorruptCheckpoint, NotCommitted
from tests.run import jobs
from tests.support.processes import ProcessWorld

ALONE = holdfast.Job(no_dist=True)


def state(value: float = 0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value))}


def checkpoints(run: Path, **how: Any) -> holdfast.Checkpoints:
    return holdfast.Checkpoints(run, asynchronous=False, job=ALONE, **how)


def train(run: Path, *steps: int) -> None:
    with checkpoints(run) as made:
        for step in steps:
            made.save(step, state(step))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_ranks_start_from_another_run_and_then_from_their_own(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    with ProcessWorld(2) as world:
        world.run(jobs.start, str(source), None, [10, 20])
        before = files(source)
        for restored, path, value, steps in world.run(jobs.start, str(run), str(source), [21, 22]):
            assert (restored, path, value, steps) == (20, str(source / "step-00000020"), 20.0, [21, 22])
        for restored, path, value, _ in world.run(jobs.start, str(run), str(source), [23]):
            assert (restored, path, value) == (22, str(run / "step-00000022"), 22.0)
        for error in world.run(jobs.start_apart, str(tmp_path / "apart"), str(source)):
            assert "ranks start it from different checkpoints: rank 0 from None, rank 1 from" in error
    assert files(source) == before, "it is only read"


def test_a_run_that_counts_from_0_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The number of the other run's step says nothing of this run's steps."""
    source, run = tmp_path / "source", tmp_path / "run"
    train(source, 1500, 2000)
    caplog.set_level(logging.INFO, "holdfast")
    with checkpoints(run, start_from=source / "step-00001500", keep=2) as made:
        found = state()
        assert made.restore(found) == 1500
        assert found["w"][0] == 1500
        [line] = [record for record in caplog.records if "starts from" in record.message]
        assert line.message == f"{run} has no step yet: the run starts from {source}/step-00001500."
        assert made.latest() is None
        for step in (1, 2, 3):
            made.save(step, state(step))
        assert made.steps() == [2, 3]
    assert not [record.message for record in caplog.records if record.levelno > logging.INFO]
    assert holdfast.latest(source) == str(source / "step-00002000")
    assert {path.name for path in source.iterdir()} == {"step-00001500", "step-00002000"}


def test_it_starts_from_what_load_reads(tmp_path: Path) -> None:
    dcp, published, plain = tmp_path / "dcp", tmp_path / "published", tmp_path / "plain"
    stock.save(state(1), checkpoint_id=dcp, no_dist=True)
    published.mkdir()
    save_file(state(2), published / "model.safetensors")
    holdfast.save(state(3), plain, step=7, job=ALONE)
    for source, step, value in ((dcp, 0, 1), (published, 0, 2), (plain, 7, 3)):
        found = state()
        with checkpoints(tmp_path / f"run-{value}", start_from=source) as made:
            assert made.restore(found) == step
        assert found["w"].tolist() == [value] * 4
        report = made.restore_report(found)
        assert report is not None
        assert report.path == str(source)


def test_what_is_not_there_or_damaged_is_no_fresh_start(tmp_path: Path) -> None:
    source, run = tmp_path / "source", tmp_path / "run"
    train(source, 1, 2)
    with pytest.raises(NotCommitted, match="nowhere"):
        checkpoints(run, start_from=tmp_path / "nowhere").restore(state())
    (source / "step-00000002" / INDEX).write_bytes(b"damaged")
    with pytest.raises(CorruptCheckpoint):
        checkpoints(run, start_from=source).restore(state())
    assert checkpoints(run, start_from=source / "step-00000001").restore(state()) == 1
    # Own steps that are all damaged are no reason to begin anew.
    train(run, 5)
    (run / "step-00000005" / INDEX).write_bytes(b"damaged")
    with pytest.raises(CorruptCheckpoint):
        checkpoints(run, start_from=source / "step-00000001").restore(state())
    with pytest.raises(NotCommitted):
        checkpoints(tmp_path / "empty", start_from=source).restore(state(), 1)
    with pytest.raises(BadInput):
        checkpoints(run, start_from=7)
