"""The `.metadata` beside a checkpoint that megatron-core's functions saved: for tools of torch DCP."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast import dcp, megatron
from holdfast._core.format.names import COMMON
from holdfast._core.roster.memory import MemoryRoster
from holdfast._frameworks.megatron import mcore

JOB = holdfast.Job(roster=MemoryRoster())
save = functools.partial(megatron.save, job=JOB)


def weight(key: str, *shape: int) -> mcore.ShardedTensor:
    data = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return mcore.ShardedTensor.from_rank_offsets(key, data)


def extra(key: str) -> mcore.ShardedObject:
    return mcore.ShardedObject(key, {"scale": 2}, (1,), (0,))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {"model": {"w": weight("decoder.w", 4, 3), "extra": extra("decoder._extra_state")}}
    save({**state, "iteration": 5}, tmp_path / "iter_0000005")
    return tmp_path / "iter_0000005"


def test_tools_of_dcp_see_what_a_megatron_save_holds(folder: Path) -> None:
    found = stock.FileSystemReader(folder).read_metadata().state_dict_metadata
    said = found["decoder.w"]
    assert isinstance(said, TensorStorageMetadata)
    assert (said.size, said.properties.dtype) == (torch.Size([4, 3]), torch.float32)
    assert isinstance(found["decoder._extra_state/shard_0_1"], BytesStorageMetadata)
    assert set(found) == set(megatron.load_sharded_metadata(folder)) | {COMMON}


def test_torchs_own_load_reads_it(folder: Path) -> None:
    state = {"decoder.w": torch.zeros(4, 3)}
    stock.load(state, checkpoint_id=folder)
    assert torch.equal(state["decoder.w"], weight("decoder.w", 4, 3).data)


def test_it_stays_a_checkpoint_of_megatron(folder: Path) -> None:
    assert megatron.check_is_distributed_checkpoint(folder)


def test_a_save_by_dcp_in_its_place_is_one_of_dcp(folder: Path) -> None:
    dcp.save({"v": torch.zeros(2)}, checkpoint_id=folder)
    assert not (folder / "metadata.json").exists()
    assert not megatron.check_is_distributed_checkpoint(folder)
    assert set(stock.FileSystemReader(folder).read_metadata().state_dict_metadata) == {"v"}


def test_a_save_by_megatron_in_place_of_dcps_is_one_of_megatron(tmp_path: Path) -> None:
    dcp.save({"v": torch.zeros(2)}, checkpoint_id=tmp_path / "a")
    assert not megatron.check_is_distributed_checkpoint(tmp_path / "a")
    save({"w": weight("w", 2)}, tmp_path / "a")
    assert megatron.check_is_distributed_checkpoint(tmp_path / "a")
    assert "v" not in stock.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata


def test_a_save_without_marks_leaves_none_that_tell_of_the_old_names(folder: Path) -> None:
    (folder / "notes.json").write_text("{}")
    holdfast.save({"z": torch.zeros(2)}, folder, expected=None, job=JOB)
    assert sorted(path.name for path in folder.iterdir()) == ["data", "index.safetensors", "notes.json"]


def test_a_metadata_json_of_the_user_stays(tmp_path: Path) -> None:
    holdfast.save({"z": torch.zeros(2)}, tmp_path / "a", job=JOB)
    (tmp_path / "a" / "metadata.json").write_text('{"mine": 1}')
    holdfast.save({"z": torch.ones(2)}, tmp_path / "a", job=JOB)
    assert (tmp_path / "a" / "metadata.json").read_text() == '{"mine": 1}'


def test_without_metadata_json_no_mark_of_dcps_is_left(tmp_path: Path) -> None:
    """Its name is taken by a folder: the checkpoint is committed, and still one of Megatron's."""
    (tmp_path / "a" / "metadata.json").mkdir(parents=True)
    save({"w": weight("w", 2)}, tmp_path / "a")
    assert not (tmp_path / "a" / ".metadata").exists()
    assert megatron.check_is_distributed_checkpoint(tmp_path / "a")
