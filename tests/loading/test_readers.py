"""A step stays while somebody reads it, however it is read; and a step that is gone is said to be gone."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import holdfast
from holdfast import dcp
from holdfast._core.loading import stored_checkpoint
from holdfast._core.store import pins
from holdfast.errors import CorruptCheckpoint, Replaced
from tests.support.threads import in_a_fork

ALONE = holdfast.Job(no_dist=True)


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(value)), "x": torch.full((50,), float(value)), "step": value}


def saved(run: Path, step: int) -> None:
    with holdfast.Checkpoints(run, keep=1, job=ALONE) as made:
        made.save(step, state(step))


def by_open(folder: str) -> Callable[[], torch.Tensor]:
    checkpoint = holdfast.open(folder)
    return lambda: checkpoint["x"][...]


def by_lazy_load(folder: str) -> Callable[[], torch.Tensor]:
    values = holdfast.load(folder, lazy=True)
    return lambda: values["x"][...]


def by_stock(folder: str) -> Callable[[], torch.Tensor]:
    reader = dcp.HoldfastReader(folder)
    reader.read_metadata()

    def read() -> torch.Tensor:
        found = state(0)
        stock.load(found, storage_reader=reader, no_dist=True)
        return found["x"]

    return read


@pytest.mark.parametrize("way", [by_open, by_lazy_load, by_stock])
def test_a_step_stays_until_its_reader_is_done(way: Callable[[str], Any], tmp_path: Path) -> None:
    saved(tmp_path, 1)
    first = str(tmp_path / "step-00000001")
    read = way(first)
    saved(tmp_path, 2)
    saved(tmp_path, 3)
    assert read().eq(1).all()
    assert not (tmp_path / "step-00000002").exists()
    del read
    gc.collect()
    saved(tmp_path, 4)
    assert not Path(first).exists()


def test_a_load_of_values_reads_one_step_beside_a_run_that_keeps_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    read_boxes = stored_checkpoint.read_boxes

    def read_while_it_goes_on(*given: Any) -> Any:
        saved(tmp_path, 2)
        return read_boxes(*given)

    monkeypatch.setattr(stored_checkpoint, "read_boxes", read_while_it_goes_on)
    values = holdfast.load(tmp_path / "step-00000001")
    assert values["x"].eq(1).all()
    assert values["step"] == 1


def test_two_that_are_compared_stay(tmp_path: Path) -> None:
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 1)

    def meanwhile(read: int) -> None:
        saved(tmp_path / "a", 2)
        saved(tmp_path / "b", 2)

    steps = [tmp_path / name / "step-00000001" for name in ("a", "b")]
    assert holdfast.same(*steps, where=True, progress=meanwhile).same
    assert all(step.with_name("step-00000002").exists() for step in steps)


def test_a_fork_that_drops_its_copy_leaves_the_step_to_its_reader(tmp_path: Path) -> None:
    """As a worker of a data loader does, whose data set has opened a checkpoint."""
    saved(tmp_path, 1)
    checkpoint = holdfast.open(tmp_path / "step-00000001")
    in_a_fork(checkpoint.close)
    saved(tmp_path, 2)
    assert checkpoint["x"][...].eq(1).all()
    checkpoint.close()


def test_a_step_that_is_gone_is_told(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    checkpoint = holdfast.open(tmp_path / "step-00000001")
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(Replaced, match="removed or replaced while it was read") as error:
        checkpoint["x"][...]
    assert error.value.hint == "Open it again, or a newer step."
    saved(tmp_path, 2)
    checkpoint = holdfast.open(tmp_path / "step-00000002")
    shutil.rmtree(tmp_path / "step-00000002" / "data")
    with pytest.raises(CorruptCheckpoint, match=r"A data file of .* is missing"):
        checkpoint["x"][...]
    checkpoint.close()


def test_storage_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins.Pin, "_try", lambda self, reader: reader.close())
    monkeypatch.setattr(pins, "PATIENCE", 0.0)
    saved(tmp_path, 1)
    checkpoint = holdfast.open(tmp_path / "step-00000001")
    saved(tmp_path, 2)
    with pytest.raises(Replaced) as error:
        checkpoint["x"][...]
    assert "no locks that keep a step for a reader" in error.value.hint
