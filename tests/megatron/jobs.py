"""What the ranks of a megatron-core world do; importable, as processes need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.cpu import use_cpu
from tests.megatron.models import Layout, Recipe, Training, parallel


@contextlib.contextmanager
def training(layout: Layout, recipe: Recipe, seed: int = 1) -> Iterator[Training]:
    use_cpu()
    with parallel(layout):
        yield Training(layout, recipe, seed)


def state_of(run: Training, is_loading: bool = False) -> dict[str, Any]:
    """Model, optimizer and common state as a training loop gives them to `save`."""
    from holdfast.adapters import megatron

    model = run.model_state()
    return {
        **model,
        "optimizer": megatron.optimizer_state_dict(run.optimizer, model, is_loading=is_loading),
        "iteration": run.iteration,
        "checkpoint_version": 3.0,
    }


def load_into(run: Training, folder: str, **how: Any) -> dict[str, Any]:
    from holdfast.adapters import megatron

    loaded: dict[str, Any] = megatron.load(state_of(run, is_loading=True), folder, **how)
    run.load_model(loaded)
    megatron.load_optimizer_state_dict(run.optimizer, loaded["optimizer"])
    run.iteration = loaded["iteration"]
    return loaded


def train_and_save(
    rank: int, layout: Layout, recipe: Recipe, folder: str, steps: int = 3, more: int = 2
) -> list[float]:
    """Losses of the steps before and after the save."""
    from holdfast.adapters import megatron

    with training(layout, recipe) as run:
        losses = [run.step() for _ in range(steps)]
        megatron.save(state_of(run), folder, content_metadata=run.metadata(), timeout=60, stall_timeout=30)
        return losses + [run.step() for _ in range(more)]


def load_save_train(
    rank: int, layout: Layout, recipe: Recipe, folder: str, again: str, more: int = 2
) -> list[float]:
    """Load into another layout, save what was loaded, and train on."""
    from holdfast.adapters import megatron

    with training(layout, recipe, seed=2) as run:
        load_into(run, folder, timeout=60, stall_timeout=30)
        megatron.save(state_of(run), again, content_metadata=run.metadata(), timeout=60, stall_timeout=30)
        dist.barrier()
        return [run.step() for _ in range(more)]


def fill(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
