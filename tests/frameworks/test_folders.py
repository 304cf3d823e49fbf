"""A framework that writes a part of a checkpoint by itself is given no URL."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from holdfast._core.protocol.job import Job
from holdfast._frameworks.megatron.patches import replacements
from holdfast._frameworks.replacing import guard_of
from holdfast._frameworks.settings import Settings
from holdfast.errors import BadInput


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(
        Job(no_dist=True),
        checkpoints=True,
        huggingface=True,
        guard=True,
        guarded=(),
        warm_up=False,
        session=False,
        operations=None,
        memory_budget=None,
        after_end=None,
    )


def test_megatron_lm(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders are arguments of the program."""
    variables = ModuleType("megatron.training.global_vars")
    arguments = SimpleNamespace(save="s3://bucket/run", load=str(tmp_path))
    monkeypatch.setattr(variables, "_GLOBAL_ARGS", arguments, raising=False)
    monkeypatch.setitem(sys.modules, variables.__name__, variables)
    called = []
    for name in ("save_checkpoint", "load_checkpoint"):
        guard = guard_of(f"megatron.training.checkpointing:{name}", settings)

        def function(iteration: int, name: str = name) -> None:
            called.append(name)

        guarded = guard.make(function)
        if name == "save_checkpoint":
            with pytest.raises(
                BadInput, match=r"save_checkpoint got a s3:// place, but this framework writes"
            ):
                guarded(1)
        else:
            guarded(1)
    assert called == ["load_checkpoint"]
    arguments.save = "msc://profile/run"  # Megatron's own way to object stores
    guarded = guard_of("megatron.training.checkpointing:save_checkpoint", settings).make(function)
    guarded(2)
    assert len(called) == 2


def test_megatron_bridge(settings: Settings) -> None:
    called = []

    def save_checkpoint(state: object, model: object) -> None:
        called.append(state)

    place = "megatron.bridge.training.checkpointing:save_checkpoint"
    guarded = guard_of(place, settings).make(save_checkpoint)

    def state(folder: str | None) -> object:
        return SimpleNamespace(cfg=SimpleNamespace(checkpoint=SimpleNamespace(save=folder, load=None)))

    with pytest.raises(BadInput, match="a local folder named 'gs:'"):
        guarded(state("gs://bucket/run"), None)
    guarded(state("/run"), None)
    guarded(state(None), None)
    assert len(called) == 2


def test_what_replaces_megatron_cores_save_takes_paths(settings: Settings, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    for replacement in replacements(settings):
        if replacement.name in ("save", "load", "load_common_state_dict"):
            call = replacement.make(lambda *_: None)
            given = (
                ({"w": torch.zeros(2)}, "s3://bucket/x")
                if replacement.name != "load_common_state_dict"
                else ("az://b/x",)
            )
            with pytest.raises(BadInput, match="this framework writes a part of a checkpoint by itself"):
                call(*given)
    assert list(tmp_path.iterdir()) == []
