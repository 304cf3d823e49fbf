"""Our errors are caught by code that knows only the framework's."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import holdfast.dcp
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast.errors import HoldfastError, NotCommitted, from_message


def test_torchs(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as met:
        holdfast.dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "none", no_dist=True)
    error = met.value
    assert isinstance(error, NotCommitted)
    assert error.failures == {}
    assert str(error).startswith("load of")


def test_megatrons(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from holdfast import megatron

    with pytest.raises(CheckpointingException) as met:
        megatron.load({}, tmp_path / "none")
    assert isinstance(met.value, HoldfastError)


def test_megatrons_load_raises_what_its_strategy_raises(tmp_path: Path) -> None:
    """For a key or a shape that a checkpoint has not, stock megatron-core raises torch's exception."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.core import CheckpointingException

    from holdfast import megatron

    saved = ShardedTensor.from_rank_offsets("w", torch.ones(4))
    megatron.save({"w": saved}, tmp_path / "step")
    for key, size in (("v", 4), ("w", 5)):
        asked = {"x": ShardedTensor.from_rank_offsets(key, torch.ones(size))}
        for kind in (CheckpointException, CheckpointingException):
            with pytest.raises(kind) as met:
                megatron.load(asked, tmp_path / "step")
            assert isinstance(met.value, HoldfastError)
        assert met.value.failures == {}
        assert str(pickle.loads(pickle.dumps(met.value))) == str(met.value)


def test_such_an_error_travels_as_ours(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted) as met:
        holdfast.dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "none", no_dist=True)
    again = pickle.loads(pickle.dumps(met.value))
    assert type(again) is NotCommitted
    assert str(again) == str(met.value)
    told = from_message(met.value.to_message())
    assert type(told) is NotCommitted
