"""torchtitan's own CheckpointManager over an FSDP2 model, as its trainer makes it."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDE = 10


class Progress:
    """The trainer's own state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class Run:
    """A model, its optimizer, and the manager."""

    def __init__(self, folder: str, async_mode: str, ours: bool = False) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(WIDE, 14), nn.ReLU(), nn.Linear(14, WIDE))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        adamw = OptimizersContainer.Config(
            param_groups=default_adamw(1e-2).param_groups, implementation="for-loop"
        )
        self.optimizers = OptimizersContainer(adamw, model_parts=[self.model])
        self.schedule = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=10
        )
        self.progress = Progress()
        if ours:
            from holdfast.torchtitan import CheckpointManager
        config = CheckpointManager.Config(enable=True, folder="checkpoint", interval=1, async_mode=async_mode)
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=folder,
        )
        self.manager.states.pop("dataloader")  # there are no data

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * self.progress.step + dist.get_rank())
            loss = self.model(torch.randn(4, WIDE, generator=generator)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedule.step()
            self.progress.step += 1
            losses.append(float(loss.detach()))
        return losses


def install(stall_timeout: float = 30) -> None:
    import holdfast

    logging.disable(logging.WARNING)
    holdfast.install(job=holdfast.Job(timeout=60, stall_timeout=stall_timeout))


def save(rank: int, folder: str, async_mode: str, ours: bool) -> tuple[list[float], list[str]]:
    """The losses after a save, and what is guarded. ours: by the class of ours, without `install`."""
    import holdfast

    if not ours:
        install()
    run = Run(folder, async_mode, ours)
    run.train(2)
    assert run.manager.save(2)
    run.manager.maybe_wait_for_saving()
    [found] = [one for one in holdfast.installed() if one.name == "torchtitan"]
    return run.train(2), list(found.guarded)


def load(rank: int, folder: str) -> list[float]:
    install()
    run = Run(folder, "disabled")
    assert run.manager.load()
    assert run.progress.step == 2
    return run.train(2)


def save_without(rank: int, folder: str, absent: int) -> tuple[str, float]:
    """One rank never comes to the save."""
    install(2)
    run = Run(folder, "disabled")
    run.train(1)
    begun = time.monotonic()
    if rank == absent:
        return "elsewhere", 0.0
    try:
        run.manager.save(1)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "saved", time.monotonic() - begun
