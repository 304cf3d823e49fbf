"""Functions that `install` guards in trainers that save through torch DCP, as `module:qualified name`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import wraps

from holdfast._core.base.reporting import warn_once
from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings

ACCELERATE = (
    "accelerate.accelerator:Accelerator.save_state",
    "accelerate.accelerator:Accelerator.load_state",
    "accelerate.utils.fsdp_utils:save_fsdp_model",
    "accelerate.utils.fsdp_utils:load_fsdp_model",
    "accelerate.utils.fsdp_utils:save_fsdp_optimizer",
    "accelerate.utils.fsdp_utils:load_fsdp_optimizer",
)
TRANSFORMERS = (
    "transformers.trainer:Trainer.save_model",
    "transformers.trainer:Trainer._save_checkpoint",
    "transformers.trainer:Trainer._load_from_checkpoint",
    "transformers.trainer:Trainer._load_optimizer_and_scheduler",
)


def of_lightning(fabric: str, pytorch: str) -> tuple[str, ...]:
    """Return Lightning's functions. fabric, pytorch: the packages, which depend on the distribution."""
    return (
        f"{fabric}.fabric:Fabric.save",
        f"{fabric}.fabric:Fabric.load",
        f"{fabric}.fabric:Fabric.load_raw",
        f"{pytorch}.trainer.trainer:Trainer.save_checkpoint",
        f"{pytorch}.trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start",
    )


def of_transformers(settings: Settings) -> Iterator[Replacement]:
    yield Replacement(
        "transformers.trainer_utils", "get_last_checkpoint", "checkpoints", _last, optional=True
    )


def _last(original: Callable[..., object]) -> Callable[..., object]:
    """Make a `get_last_checkpoint` that skips incomplete checkpoints.

    Trainer writes `trainer_state.json` last, and can't resume without it.
    """

    @wraps(original)
    def get_last_checkpoint(folder: str) -> object:
        newest = original(folder)
        steps = [int(found[1]) for name in os.listdir(folder) if (found := _STEP.fullmatch(name))]
        for step in sorted(steps, reverse=True):
            path = os.path.join(folder, f"checkpoint-{step}")
            if os.path.exists(os.path.join(path, "trainer_state.json")):
                if path != newest:
                    warn_once(
                        f"{newest} is incomplete: it has no trainer_state.json. {path} is taken instead."
                    )
                return path
        return newest

    return get_last_checkpoint


_STEP = re.compile(r"checkpoint-(\d+)")
