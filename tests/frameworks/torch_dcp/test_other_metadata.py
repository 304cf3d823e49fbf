"""Stock DCP saves into the folder of a Holdfast checkpoint, whose index it does not know, and the other way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import holdfast
from holdfast import dcp
from holdfast._frameworks.torch_dcp.torch_dist import export_torch_dist
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import BadInput

ALONE = holdfast.Job(no_dist=True)


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((9,), value)}


def stock_save(value: float, place: Path) -> None:
    stock.save(state(value), storage_writer=FileSystemWriter(place, overwrite=True))


def loaded(place: Path) -> float:
    back = state(0.0)
    holdfast.load(back, place, job=ALONE)
    return float(back["w"][0])


def saved(value: float, place: Path) -> None:
    holdfast.save(state(value), place, job=ALONE)


def saved_with_marker(value: float, place: Path) -> None:
    dcp.save(state(value), checkpoint_id=place)


@pytest.mark.parametrize("save", [saved, saved_with_marker])
@pytest.mark.parametrize("before", [False, True], ids=["", "stock before"])
def test_an_index_that_stock_dcp_saved_beside_is_not_loaded(
    save: Callable[[float, Path], None], before: bool, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint"
    if before:
        stock_save(0.5, place)
    save(1.0, place)
    assert loaded(place) == 1.0
    assert loaded(Path(shutil.copytree(place, tmp_path / "copy"))) == 1.0
    found = verify(place)
    assert isinstance(found, Verified)
    assert found.whole
    stock_save(2.0, place)
    with pytest.raises(BadInput, match=r"holds two checkpoints: .* has written \.metadata since"):
        loaded(place)
    with pytest.raises(BadInput, match="holds two checkpoints"):
        holdfast.open(place)
    with pytest.raises(BadInput, match="holds two checkpoints"):
        dcp.load(state(0.0), checkpoint_id=place)
    with pytest.raises(BadInput, match="holds two checkpoints"):
        export_torch_dist(place, tmp_path / "stock")
    found = verify(place)
    assert isinstance(found, Verified)
    assert "holds two checkpoints" in found.damage[0].problem
    # As the hint says.
    (place / "index.safetensors").rename(tmp_path / "index")
    assert loaded(place) == 2.0
    (tmp_path / "index").rename(place / "index.safetensors")
    (place / ".metadata").rename(tmp_path / "metadata")
    assert loaded(place) == 1.0
    (tmp_path / "metadata").rename(place / ".metadata")
    save(3.0, place)  # a save replaces what is there
    assert loaded(place) == 3.0


def test_a_save_that_is_passed_on_to_torch_is_loaded_or_an_error(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    dcp.save(state(1.0), checkpoint_id=place)
    writer = FileSystemWriter(place, single_file_per_rank=False, overwrite=True)
    dcp.save(state(2.0), storage_writer=writer)
    with pytest.raises(BadInput, match="holds two checkpoints"):
        loaded(place)
