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


def test_it_stays_a_checkpoint_of_megatron_and_one_of_dcp_is_none(folder: Path, tmp_path: Path) -> None:
    assert megatron.check_is_distributed_checkpoint(folder)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "dcp")
    assert not megatron.check_is_distributed_checkpoint(tmp_path / "dcp")
