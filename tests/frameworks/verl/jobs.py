"""verl's own MegatronCheckpointManager over a small real model, as a worker of verl has it."""

from __future__ import annotations

import logging
import os
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from holdfast._core.base.options import Options
from tests.frameworks.megatron.cpu import use_cpu
from tests.frameworks.megatron.jobs import training
from tests.frameworks.megatron.models import Layout, Recipe, Training
from tests.support.stand_ins import stand_in_for

SMALL = Recipe(layers=2)
CONFIG = SimpleNamespace(
    model=SimpleNamespace(path=""),
    megatron=SimpleNamespace(
        dist_ckpt_optim_fully_reshardable=False, distrib_optim_fully_reshardable_mem_efficient=False
    ),
)
"""What the manager asks of verl's configuration."""


def import_verl() -> Any:
    """The module of verl's manager."""
    logging.disable(logging.WARNING)  # what verl's imports say of GPUs that are not there
    use_cpu()
    stand_in_for("verl")
    from verl.utils.checkpoint import megatron_checkpoint_manager

    return megatron_checkpoint_manager


def manager_of(run: Training, contents: list[str], async_save: bool = False) -> Any:
    """verl's manager, made with the arguments that its engine gives it."""
    from megatron.core import tensor_parallel
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from verl.trainer.config import CheckpointConfig

    tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    schedule = OptimizerParamScheduler(
        run.optimizer, 1e-3, 1e-3, 1e-3, 0, 100, "constant", 0.0, 0.0, 100, "constant"
    )
    return import_verl().MegatronCheckpointManager(
        config=CONFIG,
        checkpoint_config=CheckpointConfig(
            save_contents=contents, load_contents=contents, async_save=async_save
        ),
        model_config=None,
        transformer_config=run.config,
        role="actor",
        model=run.models,
        arch="Qwen3MoeForCausalLM",
        hf_config=None,
        param_dtype=torch.float32,
        share_embeddings_and_output_weights=False,
        processing_class=None,
        optimizer=run.optimizer,
        optimizer_scheduler=schedule,
        use_distributed_optimizer=True,
        use_dist_checkpointing=True,
    )


CONTENTS = ["model", "optimizer", "extra"]


def save_and_load(
    rank: int, layout: Layout, folder: str, load_from: str | None, options: Options
) -> list[float]:
    """With `install()` before verl is imported: losses after a save."""
    import holdfast

    os.environ["RANK"] = str(rank)
    job = holdfast.Job(timeout=60, stall_timeout=30, options=options)
    holdfast.install(warm_up=False, session=False, job=job)
    import_verl()
    with training(layout, SMALL, seed=3) as run:
        manager = manager_of(run, CONTENTS)
        if load_from is None:
            run.step()
        else:
            manager.load_checkpoint(load_from)
            run.iteration = 1
        manager.save_checkpoint(folder, global_step=1)
        return [run.step() for _ in range(2)]


def save_without(rank: int, folder: str, absent: int) -> tuple[str, float, str]:
    """One rank never comes to verl's save; then all of them save the next step."""
    import holdfast

    os.environ["RANK"] = str(rank)
    holdfast.install(warm_up=False, session=False, job=holdfast.Job(timeout=30, stall_timeout=2))
    import_verl()
    with training(Layout(tp=2, ep=2), SMALL, seed=3) as run:
        manager = manager_of(run, CONTENTS)
        run.step()
        begun, said = time.monotonic(), "elsewhere"
        if rank != absent:
            try:
                manager.save_checkpoint(f"{folder}/global_step_1", global_step=1)
                said = "saved"
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        took = time.monotonic() - begun
        dist.barrier()  # the trainer's own
        manager.save_checkpoint(f"{folder}/global_step_2", global_step=2)
        return said, took, "saved"
