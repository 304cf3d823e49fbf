"""Training of the small MoE model: FSDP2 for the dense weights, expert parallelism for the experts, AdamW.

Holdfast is used in three places: ``app_state`` names what is saved, ``restore`` reads the newest committed
checkpoint into it, and ``train`` saves. The rest is an ordinary training loop.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from examples.moe.data import Corpus
from examples.moe.model import Experts, ModelConfig, MoELM, RouterStats


@dataclass(frozen=True)
class Layout:
    """How the ranks are used: ``ep`` neighbours hold all experts between them, ``dp`` such groups exist."""

    dp: int
    ep: int

    @property
    def world(self) -> int:
        return self.dp * self.ep

    def __str__(self) -> str:
        return f"{self.world} ranks, ep={self.ep} x dp={self.dp}"


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 24
    save_every: int = 6
    sequences: int = 32  # in the global batch, whatever the layout
    length: int = 64
    seed: int = 1234
    lr: float = 3e-3
    warmup: int = 4
    clip: float = 1.0
    save_to: str | None = None  # None: save nothing
    resume_from: str | None = None  # None: start from step 0
    timeout: float = 60.0  # of a whole save or load
    stall_timeout: float = 10.0  # how long a rank may show no sign of life in one
    asynchronous: bool = False  # copy the state and go on; the demo kills a rank in a save that it waits for
    model: ModelConfig = field(default_factory=ModelConfig)


class Hooks:
    """What a caller wants to know of a run; the demo records it, torchrun_moe.py prints it."""

    def restored(self, trainer: Trainer) -> None: ...
    def step_done(self, step: int, loss: float, probe: float, seconds: float) -> None: ...
    def saving(self, trainer: Trainer) -> None: ...
    def saved(self, report: Any) -> None: ...
    def finished(self, trainer: Trainer) -> None: ...


@dataclass
class Trainer:
    config: TrainConfig
    layout: Layout
    rank: int
    model: MoELM
    optimizer: torch.optim.Optimizer
    expert_params: list[nn.Parameter]
    expert_mesh: DeviceMesh  # ("dp", "ep")
    corpus: Corpus
    step: int = 0  # steps done


def build(config: TrainConfig, layout: Layout) -> Trainer:
    """Model, optimizer and data of one rank; the process group of ``layout.world`` ranks exists already."""
    model = MoELM(config.model)
    model.init_weights(config.seed)
    dense_mesh = init_device_mesh("cpu", (layout.world,), mesh_dim_names=("fsdp",))
    expert_mesh = init_device_mesh("cpu", (layout.dp, layout.ep), mesh_dim_names=("dp", "ep"))
    expert_params = _spread_experts(model, expert_mesh)
    _shard_dense(model, dense_mesh, set(expert_params))
    torch.manual_seed(config.seed * 1000 + dist.get_rank())
    # Two groups, because one fused optimizer call cannot take tensors of two meshes.
    dense_params = [p for p in model.parameters() if p not in set(expert_params)]
    groups = [{"params": dense_params}, {"params": expert_params}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    _make_optimizer_state(optimizer)
    corpus = Corpus(config.sequences, config.length, config.seed)
    return Trainer(config, layout, dist.get_rank(), model, optimizer, expert_params, expert_mesh, corpus)


def _spread_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Leave this rank its part of each expert tensor, as a DTensor that knows its global place."""
    params: list[nn.Parameter] = []
    first, size = mesh["ep"].get_local_rank(), mesh["ep"].size()
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        module.join(size, mesh["ep"].get_group())
        for name, full in list(module.named_parameters(recurse=False)):
            # All ranks drew the same full tensor, so each can cut its own part: nothing to communicate.
            local = full.detach().chunk(size)[first].clone()
            shard = DTensor.from_local(local, mesh, (Replicate(), Shard(0)), run_check=False)
            setattr(module, name, nn.Parameter(shard))
            params.append(getattr(module, name))
    return params


def _shard_dense(model: MoELM, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no AVG


def _make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """AdamW makes its state in the first step; a run that resumes needs it before that, to load into."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p.detach()),
                "exp_avg_sq": torch.zeros_like(p.detach()),
            }


# --- the checkpoint -----------------------------------------------------------------------------------------


def app_state(trainer: Trainer, *, rng: bool = True) -> dict[str, Any]:
    """Everything a run needs to go on, under names and global shapes that hold in every layout.

    The tensors are the live ones, so loading into this dict loads into model and optimizer.
    """
    import holdfast

    state: dict[str, Any] = {
        "model": {name: p.detach() for name, p in trainer.model.named_parameters()},
        "optimizer": {name: trainer.optimizer.state[p] for name, p in trainer.model.named_parameters()},
        "trainer": {"step": trainer.step, "seed": trainer.config.seed, "layout": str(trainer.layout)},
    }
    if rng:
        # Optional: on fewer ranks the random states of others may go, on more a rank keeps its own.
        state["rng"] = holdfast.PerRank(torch.get_rng_state(), optional=True)
    return state


def restore(trainer: Trainer, folder: str) -> bool:
    """Load the newest committed checkpoint under ``folder``; False where there is none."""
    import holdfast

    checkpoints = holdfast.Checkpoints(
        folder, job=holdfast.Job(timeout=trainer.config.timeout, stall_timeout=trainer.config.stall_timeout)
    )
    state = app_state(trainer)
    if checkpoints.restore(state) is None:
        return False
    trainer.step = state["trainer"]["step"]
    if state["trainer"]["layout"] == str(trainer.layout):
        # On another layout a rank has no predecessor whose random numbers it could go on with.
        torch.set_rng_state(state["rng"].value)
    return True


# --- the training loop --------------------------------------------------------------------------------------


def train(config: TrainConfig, layout: Layout, hooks: Hooks) -> None:
    """Build, resume if asked to, and train to ``config.steps``, saving on the way."""
    trainer = build(config, layout)
    if config.resume_from is not None and restore(trainer, config.resume_from):
        hooks.restored(trainer)
    checkpoints = None
    if config.save_to is not None:
        import holdfast

        checkpoints = holdfast.Checkpoints(
            config.save_to,
            asynchronous=config.asynchronous,
            job=holdfast.Job(timeout=config.timeout, stall_timeout=config.stall_timeout),
        )
    while trainer.step < config.steps:
        start = time.monotonic()
        loss = train_step(trainer)
        probe = torch.rand(()).item()  # stands for dropout: goes on equally only if the RNG state came back
        hooks.step_done(trainer.step, loss, probe, time.monotonic() - start)
        if checkpoints is not None and trainer.step % config.save_every == 0:
            hooks.saving(trainer)
            pending = checkpoints.save(trainer.step, app_state(trainer))
            if not config.asynchronous:
                hooks.saved(pending.committed())
    if checkpoints is not None:
        checkpoints.close()
    hooks.finished(trainer)


def train_step(trainer: Trainer) -> float:
    """One optimizer step; returns the cross-entropy of the global batch in nats a byte."""
    config = trainer.config
    inputs, targets = trainer.corpus.part(trainer.step, trainer.rank, trainer.layout.world)
    logits, stats = trainer.model(inputs)
    # Every rank has equally many tokens: the mean of the ranks' means is the mean over the global batch.
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + config.model.aux_weight * _balance_loss(stats, config)).backward()  # type: ignore[no-untyped-call]
    _reduce_expert_grads(trainer)
    _clip_grads(trainer)
    for group in trainer.optimizer.param_groups:
        group["lr"] = config.lr * min(1.0, (trainer.step + 1) / config.warmup)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    trainer.step += 1
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / trainer.layout.world


def _balance_loss(stats: list[RouterStats], config: TrainConfig) -> Tensor:
    """E * sum_e f_e * P_e, mean over the layers, with f_e taken over the global batch.

    f_e has no gradient, and P_e enters linearly: with the global f_e the mean over the ranks is the loss of
    the global batch, in every layout. With each rank's own f_e it would depend on how the batch was split.
    """
    tokens = config.sequences * config.length
    counts = torch.stack([s.counts for s in stats])
    dist.all_reduce(counts)
    fraction = counts / (tokens * config.model.top_k)
    mean_prob = torch.stack([s.prob_sum for s in stats]) / (tokens // dist.get_world_size())
    return config.model.experts * (fraction * mean_prob).sum(-1).mean()


def _reduce_expert_grads(trainer: Trainer) -> None:
    """Average the expert gradients as FSDP averages the dense ones.

    The all-to-all has already summed over the ranks of "ep"; the sum over "dp" is left, then the mean.
    """
    grads = [_local_grad(p) for p in trainer.expert_params]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat, group=trainer.expert_mesh["dp"].get_group())
    flat /= trainer.layout.world
    for grad, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _clip_grads(trainer: Trainer) -> None:
    """Clip by the global norm: a dense gradient lies once over all ranks, an expert gradient ``dp`` times."""
    experts = set(trainer.expert_params)
    params = list(trainer.model.parameters())
    total = torch.zeros(())
    for p in params:
        share = trainer.layout.dp if p in experts else 1
        total += _local_grad(p).square().sum() / share
    dist.all_reduce(total)
    scale = (trainer.config.clip / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for p in params:
        _local_grad(p).mul_(scale)


def _local_grad(p: nn.Parameter) -> Tensor:
    assert isinstance(p.grad, DTensor)
    return p.grad.to_local()
