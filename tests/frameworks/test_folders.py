"""A framework that writes a part of a checkpoint by itself is given no URL."""

from __future__ import annotations

import ast
import inspect
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast._core.protocol.job import Job
from holdfast._frameworks.deepspeed.engine import replacements as deepspeed_replacements
from holdfast._frameworks.folders import _SHARDED
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


TRAINER = SimpleNamespace(args=SimpleNamespace(output_dir="s3://bucket/run"))
LOCAL = SimpleNamespace(args=SimpleNamespace(output_dir="run"))
TRAINERS = [
    ("transformers.trainer:Trainer._save_checkpoint", (TRAINER, None, None), (LOCAL, None, None)),
    ("transformers.trainer:Trainer.save_model", (TRAINER,), (TRAINER, "elsewhere")),
    ("transformers.trainer:Trainer.save_model", (LOCAL, "gs://bucket/run"), (LOCAL,)),
    ("transformers.trainer:Trainer._load_from_checkpoint", (LOCAL, "s3://bucket/run"), (TRAINER, "run")),
    ("accelerate.accelerator:Accelerator.save_state", (None, "s3://bucket/run"), (None, "run")),
    ("accelerate.accelerator:Accelerator.load_state", (None, Path("s3://bucket/run")), (None, Path("run"))),
    (
        "accelerate.utils.fsdp_utils:save_fsdp_model",
        (None, None, None, "az://box/run"),
        (None, None, None, "run"),
    ),
    ("swift.megatron.trainers.base:BaseMegatronTrainer.save_checkpoint", (TRAINER,), (LOCAL,)),
    ("swift.megatron.utils.megatron_lm_utils:save_mcore_checkpoint", (TRAINER.args, []), (LOCAL.args, [])),
    (
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
        (None, "s3://bucket/run"),
        (None, "run", "hdfs://cluster/run"),
    ),
]


class FSDPStrategy:
    """As Lightning names one that writes to paths."""


class MyStrategy(FSDPStrategy):
    pass


SHARDED = SimpleNamespace(strategy=MyStrategy(), _strategy=MyStrategy())
WHOLE = SimpleNamespace(strategy=SimpleNamespace(), _strategy=SimpleNamespace())
TRAINERS += [
    ("lightning.fabric.fabric:Fabric.save", (SHARDED, "s3://b/x", {}), (SHARDED, "x", {})),
    ("lightning.fabric.fabric:Fabric.load", (SHARDED, Path("s3://b/x")), (WHOLE, "s3://b/x")),
    (
        "lightning.pytorch.trainer.trainer:Trainer.save_checkpoint",
        (SHARDED, "s3://b/x"),
        (WHOLE, "s3://b/x"),  # by fsspec, whole
    ),
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start",
        (SimpleNamespace(trainer=SHARDED), "s3://b/x"),
        (SimpleNamespace(trainer=SHARDED), "x"),
    ),
    ("nemo_rl.utils.native_checkpoint:save_checkpoint", (None, "s3://b/x"), (None, "x")),
]


@pytest.mark.parametrize(("place", "url", "path"), TRAINERS)
def test_trainers(
    settings: Settings, tmp_path: Path, place: str, url: tuple[object, ...], path: tuple[object, ...]
) -> None:
    """They write beside torch DCP: for a URL nothing is called, and a path goes on as before."""
    called: list[tuple[object, ...]] = []
    guarded = guard_of(place, settings).make(with_arguments_of(place, called))
    with pytest.raises(BadInput, match="this framework writes a part of a checkpoint by itself"):
        guarded(*url)
    assert (called, list(tmp_path.iterdir())) == ([], [])
    guarded(*path)
    assert called == [path]


def with_arguments_of(place: str, called: list[tuple[object, ...]]) -> Any:
    """Return a function with the arguments of a framework's, by its source: its imports may not be installed."""
    module, _, name = place.partition(":")
    package, *rest = module.split(".")
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = Path(next(iter(found.submodule_search_locations)), *rest).with_suffix(".py")
    scope: Any = ast.parse(source.read_text())
    for part in name.split("."):
        scope = next(node for node in scope.body if getattr(node, "name", None) == part)
    parameters = []
    for number, one in enumerate(scope.args.args):
        has_default = number >= len(scope.args.args) - len(scope.args.defaults)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(
            inspect.Parameter(one.arg, kind, default=None if has_default else inspect.Parameter.empty)
        )

    def function(*given: object) -> None:
        called.append(given)

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return function


def test_deepspeeds_engine_is_given_no_url(settings: Settings, tmp_path: Path) -> None:
    engine = pytest.importorskip("deepspeed.runtime.engine").DeepSpeedEngine
    made = {item.name: item for item in deepspeed_replacements(settings)}
    assert len(made) == 3
    for name, replacement in made.items():
        original = getattr(engine, name.partition(".")[2])
        with pytest.raises(BadInput, match=rf"{name} got a gs:// place.*Nothing was written"):
            replacement.make(original)(engine.__new__(engine), "gs://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_lightnings_strategies_have_the_names_that_are_looked_for() -> None:
    fabric = pytest.importorskip("lightning.fabric.strategies")
    trainer = pytest.importorskip("lightning.pytorch.strategies")
    for strategies in (fabric, trainer):
        assert all(hasattr(strategies, name) for name in _SHARDED)
