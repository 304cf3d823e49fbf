"""The table of frameworks for `install`: their functions that save, load and finalize, by module and name.

The names come from the versions that docs/megatron.md lists. A name that a version does not have is left out
and reported; no framework is imported to find out.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import UnionType

from holdfast._frameworks import torch_checkpoint, trainers
from holdfast._frameworks.deepspeed import engine as deepspeed
from holdfast._frameworks.folders import refuse_urls
from holdfast._frameworks.guard import guarded
from holdfast._frameworks.huggingface import patches as huggingface
from holdfast._frameworks.megatron import patches as megatron
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


@dataclass(frozen=True)
class Framework:
    """A framework, and the functions of it that `install` replaces and guards."""

    name: str
    """Its name in `install(framework=)`."""
    distribution: str
    """Its name on PyPI, for its version; empty if it has none."""
    package: str
    """The package whose import shows that the framework is in use."""
    guards: tuple[str, ...] = ()
    """`module:qualified name` of functions that wait: saves, loads, and the end of asynchronous saves."""
    replacements: Callable[[Settings], Iterator[Replacement]] = lambda settings: iter(())
    uses: tuple[str, ...] = ()
    """Frameworks that it calls; `install` changes them, too."""
    paths_differ: bool = False
    """Whether ranks may give a guarded function different paths: it takes rank 0's, or each host has a disk
    of its own. Then paths can't identify a call."""


def _verl(settings: Settings) -> Iterator[Replacement]:
    """Add the method by which verl's trainer asks its workers at every step to finalize asynchronous saves.

    No worker of verl has it, so without it no asynchronous save is ever finalized.
    """

    def make(_: object) -> Callable[..., object]:
        decorator = import_module("verl.single_controller.base.decorator")

        def async_calls_finalize_fn_exec(self: object, blocking: bool = False) -> None:
            # Imported at the call, because verl may be imported before megatron-core.
            base = import_module("megatron.core.dist_checkpointing.strategies.base")
            base.async_calls.maybe_finalize_async_calls(blocking=blocking)

        register = decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
        made: Callable[..., object] = register(async_calls_finalize_fn_exec)
        return made

    place = "verl.workers.engine_workers"
    for worker in ("ActorRolloutRefWorker", "TrainingWorker"):
        yield Replacement(
            place, f"{worker}.async_calls_finalize_fn_exec", "checkpoints", make, optional=True, adds=True
        )


FRAMEWORKS = (
    Framework(
        "megatron-core",
        "megatron-core",
        "megatron.core",
        guards=(f"{megatron.QUEUE}:AsyncCallsQueue.maybe_finalize_async_calls",),
        replacements=megatron.replacements,
    ),
    Framework(
        "torch-dcp", "torch", "torch.distributed.checkpoint", replacements=torch_checkpoint.replacements
    ),
    Framework(
        "megatron-lm",
        "",
        "megatron.training",
        guards=(
            "megatron.training.checkpointing:save_checkpoint",
            "megatron.training.checkpointing:load_checkpoint",
            "megatron.training.async_utils:maybe_finalize_async_save",
        ),
        uses=("megatron-core", "torch-dcp"),
    ),
    Framework(
        "megatron-bridge",
        "megatron-bridge",
        "megatron.bridge",
        guards=(
            "megatron.bridge.training.checkpointing:save_checkpoint",
            "megatron.bridge.training.checkpointing:load_checkpoint",
            "megatron.bridge.training.checkpointing:maybe_finalize_async_save",
            "megatron.bridge.training.checkpointing:save_fsdp_dtensor_checkpoint",
            "megatron.bridge.training.checkpointing:load_fsdp_dtensor_checkpoint",
            "megatron.bridge.training.model_load_save:save_megatron_model",
            "megatron.bridge.training.model_load_save:load_megatron_model",
        ),
        replacements=huggingface.megatron_bridge,
        uses=("megatron-core", "torch-dcp"),
    ),
    Framework("mbridge", "mbridge", "mbridge", replacements=huggingface.mbridge, uses=("megatron-core",)),
    Framework(
        "verl",
        "verl",
        "verl",
        guards=(
            "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager.save_checkpoint",
            "verl.utils.checkpoint.megatron_checkpoint_manager:MegatronCheckpointManager.load_checkpoint",
            "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
            "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine.save_checkpoint",
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine.load_checkpoint",
            "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.save_checkpoint",
            "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.load_checkpoint",
        ),
        replacements=_verl,
        uses=("megatron-core", "megatron-bridge", "mbridge", "torch-dcp"),
    ),
    Framework(
        "nemo-rl",
        "nemo-rl",
        "nemo_rl",
        guards=(
            "nemo_rl.models.megatron.community_import:import_model_from_hf_name",
            "nemo_rl.utils.native_checkpoint:save_checkpoint",
            "nemo_rl.utils.native_checkpoint:load_checkpoint",
        ),
        uses=("megatron-core", "megatron-bridge", "torch-dcp"),
    ),
    Framework(
        "mcore-bridge",
        "mcore-bridge",
        "mcore_bridge",
        replacements=huggingface.mcore_bridge,
        uses=("megatron-core",),
    ),
    Framework(
        "ms-swift",
        "ms-swift",
        "swift.megatron",
        guards=(
            "swift.megatron.utils.megatron_lm_utils:save_mcore_checkpoint",
            "swift.megatron.utils.megatron_lm_utils:load_mcore_checkpoint",
            "swift.megatron.utils.megatron_lm_utils:maybe_finalize_async_save",
            "swift.megatron.trainers.base:BaseMegatronTrainer.save_checkpoint",
        ),
        uses=("megatron-core", "mcore-bridge", "torch-dcp"),
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        "torchtitan",
        guards=(
            "torchtitan.components.checkpointer.base:BaseCheckpointManager.save",
            "torchtitan.components.checkpointer.base:BaseCheckpointManager.load",
            # before 0.3
            "torchtitan.components.checkpoint:CheckpointManager.save",
            "torchtitan.components.checkpoint:CheckpointManager.load",
        ),
        uses=("torch-dcp",),
    ),
    Framework("deepspeed", "deepspeed", "deepspeed", replacements=deepspeed.replacements),
    Framework(
        "accelerate",
        "accelerate",
        "accelerate",
        guards=trainers.ACCELERATE,
        uses=("torch-dcp",),
        paths_differ=True,
    ),
    Framework(
        "transformers",
        "transformers",
        "transformers",
        guards=trainers.TRANSFORMERS,
        replacements=trainers.of_transformers,
        uses=("accelerate", "torch-dcp"),
        paths_differ=True,
    ),
    Framework(
        "lightning",
        "lightning",
        "lightning",
        guards=trainers.of_lightning("lightning.fabric", "lightning.pytorch"),
        uses=("torch-dcp",),
        paths_differ=True,
    ),
    Framework(
        "pytorch-lightning",
        "pytorch-lightning",
        "pytorch_lightning",
        guards=trainers.of_lightning("lightning_fabric", "pytorch_lightning"),
        uses=("torch-dcp",),
        paths_differ=True,
    ),
)
TELLING_APART = (
    "global_step",
    "iteration",
    "curr_step",
    "step",
    "state.train_state.step",
    "self.state.iteration",
    "local_path",
    "checkpoint_path",
    "weights_path",
    "path",
    "output_dir",
    "input_dir",
    "filepath",
    "resume_from_checkpoint",
    "checkpoint",
    "self.state.global_step",
    "self.save_iteration",
)
"""Arguments of guarded functions, or their attributes, that identify a call: they differ between calls and
are the same on all ranks. The first one present is used."""
NAMES = tuple(framework.name for framework in FRAMEWORKS)


def replacements_of(framework: Framework, settings: Settings) -> list[Replacement]:
    replacements = [item for item in framework.replacements(settings) if settings.is_on(item.part)]
    if settings.guard:
        replacements += [
            guard_of(place, settings, told_by=int if framework.paths_differ else int | str | os.PathLike)
            for place in framework.guards
        ]
    return replacements


def guard_of(
    place: str,
    settings: Settings,
    optional: bool = True,
    reached: Callable[[str], None] = lambda place: None,
    told_by: type | UnionType | tuple[()] = (),
) -> Replacement:
    """Make the replacement that guards a function, `module:qualified name`: waits inside have deadlines.

    reached: called first in each call of the function, with its dotted name. told_by: types of arguments that
        are the same on all ranks, so that they identify a call. Empty for a user's own function: a rank may
        count its own steps, or have a folder of its own.
    """
    module, _, name = place.partition(":")

    def make(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def call(*args: object, **named: object) -> object:
            reached(f"{module}.{name}")
            given = _arguments(function, args, named)
            refuse_urls(place, given)
            told = _told_apart(given, told_by)
            with guarded(name, call=told, like_stock=True, job=settings.of_a_guard()):
                return function(*args, **named)

        return call

    return Replacement(module, name, "guard", make, optional=optional)


def _arguments(
    function: Callable[..., object], args: tuple[object, ...], named: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name; none if they are wrong, as the function itself then says."""
    with suppress(TypeError, ValueError):
        return inspect.signature(function).bind(*args, **named).arguments
    return {}


def _told_apart(given: Mapping[str, object], kinds: type | UnionType | tuple[()]) -> str:
    """Return a text that identifies a call: equal on all ranks, different for each call; "" if there is none.

    kinds: types of arguments that may be used.
    """
    for path in TELLING_APART:
        first, *attributes = path.split(".")
        value = given.get(first)
        for attribute in attributes:
            value = getattr(value, attribute, None)
        if isinstance(value, kinds):
            return f"{path}={value}"
    return ""
