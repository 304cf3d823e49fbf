"""Megatron-Bridge's own save and load of a model under Megatron-FSDP (`ckpt_format="fsdp_dtensor"`)."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.frameworks.megatron.models import Layout
from tests.frameworks.megatron_fsdp.megatron import FsdpTraining, begin, dtensors
from tests.support.stand_ins import stand_in_for


class Bridge:
    """Its global state over a training, as its own loop sets it up."""

    def __init__(self, run: FsdpTraining, folder: str, load_from: str) -> None:
        stand_in_for("megatron-bridge")
        from megatron.bridge.training import checkpointing, config
        from megatron.bridge.training.state import GlobalState
        from megatron.bridge.training.tokenizers.config import TokenizerConfig
        from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        init_num_microbatches_calculator(0, None, 8, 1, 1)
        self.module, self.run = checkpointing, run
        self.state = GlobalState()
        self.state.cfg = config.ConfigContainer(
            train=config.TrainingConfig(train_iters=10, global_batch_size=8, micro_batch_size=1),
            model=run.config,
            optimizer=config.OptimizerConfig(use_distributed_optimizer=True),
            scheduler=config.SchedulerConfig(),
            dataset=None,
            logger=config.LoggerConfig(),
            tokenizer=TokenizerConfig(),
            checkpoint=config.CheckpointConfig(save=folder, load=load_from, ckpt_format="fsdp_dtensor"),
        )
        self.schedule = OptimizerParamScheduler(
            run.optimizer, 1e-3, 1e-3, 1e-3, 0, 100, "constant", 0.0, 0.0, 100, "constant"
        )

    def save(self) -> None:
        self.state.train_state.step = self.run.iteration
        with contextlib.redirect_stdout(io.StringIO()):
            self.module.save_checkpoint(
                self.state, self.run.models, self.run.optimizer, self.schedule, 0, checkpointing_context={}
            )

    def load(self) -> int:
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.module.load_checkpoint(
                self.state, self.run.models, self.run.optimizer, self.schedule, checkpointing_context={}
            )
        return int(found[0])


def prepare(rank: int, layout: Layout, seed: int, offloads: float | None = None) -> FsdpTraining:
    from megatron.core import tensor_parallel

    os.environ["RANK"] = str(rank)
    logging.disable(logging.WARNING)
    begin(layout)
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = lambda state, *args: None
    run = FsdpTraining(layout, seed, offloads)
    tensor_parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    return run


def values_of(run: FsdpTraining) -> dict[str, torch.Tensor]:
    """What this rank holds of the model and of its optimizer."""
    return {name: value.to_local().clone() for name, value in dtensors(run.state()).items()}


def save(rank: int, folder: str, layout: Layout, installs: bool) -> str:
    """After a step, as ranks are: some have no optimizer state of some parameters. A collective of stock's that
    not all enter ends after 4 seconds."""
    import holdfast

    if installs:
        holdfast.install(warm_up=False, session=False, job=holdfast.Job(timeout=60, stall_timeout=30))
    run = prepare(rank, layout, 1)
    run.step()
    dist.barrier()
    if not installs:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), group)
    try:
        Bridge(run, folder, "").save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def save_load_compare(
    rank: int, folder: str, layout: Layout, offloads: float | None = None
) -> tuple[int, int, list[float]]:
    """Load what was saved after further steps; the values are as they were. Returns the losses of these
    steps."""
    import holdfast

    holdfast.install(warm_up=False, session=False, job=holdfast.Job(timeout=60, stall_timeout=30))
    run = prepare(rank, layout, 1, offloads)
    run.step()
    bridge = Bridge(run, folder, folder)
    bridge.save()
    before = values_of(run)
    losses = [run.step() for _ in range(2)]
    changed = sum(
        not torch.equal(value, before[name]) for name, value in values_of(run).items() if name in before
    )
    assert bridge.load() == 1
    after = values_of(run)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    dist.barrier()
    return changed, len(before), losses


def resume(rank: int, folder: str, layout: Layout, offloads: float | None) -> list[float]:
    """The losses of a training that begins with other values, and loads."""
    import holdfast

    holdfast.install(warm_up=False, session=False, job=holdfast.Job(timeout=60, stall_timeout=30))
    run = prepare(rank, layout, 2, offloads)
    run.iteration = Bridge(run, folder, folder).load()
    return [run.step() for _ in range(2)]
