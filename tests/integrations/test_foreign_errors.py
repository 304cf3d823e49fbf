"""Our errors are caught by code that knows only the framework's."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import holdfast.dcp
import tests.integrations.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
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


def test_such_an_error_travels_as_ours(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted) as met:
        holdfast.dcp.load({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "none", no_dist=True)
    again = pickle.loads(pickle.dumps(met.value))
    assert type(again) is NotCommitted
    assert str(again) == str(met.value)
    told = from_message(met.value.to_message())
    assert type(told) is NotCommitted
