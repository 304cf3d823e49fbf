"""Engines of DeepSpeed on CPU, over gloo, as a script of its users makes them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ENV = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
BATCH = 12
WORDS = 11
State = dict[str, dict[str, torch.Tensor]]


class Model(nn.Module):
    """Odd sizes, tied weights, a frozen layer, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 7)
        self.inner = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Linear(5, 7)
        self.head = nn.Linear(7, WORDS, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("count", torch.tensor(3))
        self.frozen.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.inner(self.emb(words))) * self.scale.to(self.norm.weight.dtype)
        out: torch.Tensor = self.head(self.frozen(torch.relu(inner)))
        return out


def model_and_optimizer(grouping: str = "as saved") -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {
            "params": [parameter for parameter in trained if parameter.ndim == 1],
            "weight_decay": 0.0,
            "lr": 2e-2,
        },
    ]
    if grouping == "swapped":
        groups.reverse()
    elif grouping == "one":
        groups = [{"params": trained}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def engine(
    stage: int, bf16: bool, zero: dict[str, Any], more: dict[str, Any], grouping: str = "as saved"
) -> Any:
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"
    # Otherwise it compiles collectives over shared memory, which takes minutes; gloo's do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    model, optimizer = model_and_optimizer(grouping)
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "gradient_clipping": 1.0,
        "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": bf16},
        **more,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (BATCH,), generator=torch.Generator().manual_seed(step))


def train(made: Any, steps: range) -> list[float]:
    """Train; return the mean loss of each step."""
    losses, rank, size = [], dist.get_rank(), dist.get_world_size()
    for step in steps:
        words = batch(step).chunk(size)[rank]
        loss = nn.functional.cross_entropy(made(words).float(), (words + 1) % WORDS)
        made.backward(loss)
        made.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    return losses


def whole(made: Any) -> State:
    """All weights and moments, gathered by DeepSpeed's own functions."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(made.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Below ZeRO 3 it links the moments with parameters at the first step only, in the state of that time.
        made.optimizer._hp_optimizer_states_linked = False
        made.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: {
            "fp32": safe_get_full_fp32_param(parameter).clone(),
            **{
                key: safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            },
        }
        for name, parameter in made.module.named_parameters()
        if parameter.requires_grad
    }


def save(
    rank: int, folder: str, stage: int, bf16: bool, zero: dict[str, Any], more: dict[str, Any]
) -> tuple[State, list[float]]:
    """Train three steps, save, and train on; return what was saved, and the losses after it."""
    made = engine(stage, bf16, zero, more)
    train(made, range(3))
    found = whole(made)
    made.save_checkpoint(folder, tag="three", client_state={"epoch": 4, "seen": [1, torch.ones(2)]})
    return found, train(made, range(3, 6))


def resume(
    rank: int, folder: str, stage: int, bf16: bool, zero: dict[str, Any], more: dict[str, Any], out: str = ""
) -> tuple[State, list[float], dict[str, Any]]:
    """Load as a user does, and train on; return what was loaded, the losses, and what goes with it."""
    import holdfast

    holdfast.install()
    made = engine(stage, bf16, zero, more)
    # Not what was saved, so that nothing is right by itself.
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.add_(1)
        for buffer in made.module.buffers():
            buffer.add_(1)
    path, client = made.load_checkpoint(folder)
    found = whole(made)
    frozen = made.module.frozen.weight
    rest = {
        "path": path,
        "client": {key: client[key] for key in ("epoch", "seen")},
        "steps": made.global_steps,
        "schedule": made.lr_scheduler.state_dict(),
        "rates": [group["lr"] for group in made.optimizer.param_groups],
        "buffers": {name: buffer.clone() for name, buffer in made.module.named_buffers()},
        "frozen": gathered(frozen),
    }
    if out:
        made.save_checkpoint(out, tag="three", client_state=rest["client"])
    return found, train(made, range(3, 6)), rest


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def tried(rank: int, folder: str, stage: int, grouping: str = "as saved") -> list[float] | str:
    """Load; return the decay of each group, or what is said if it is refused."""
    import holdfast

    holdfast.install()
    made = engine(stage, False, {}, {}, grouping)
    try:
        made.load_checkpoint(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return [group["weight_decay"] for group in made.optimizer.param_groups]


def stock(rank: int, folder: str, stage: int) -> str:
    """What DeepSpeed itself says of another number of ranks."""
    made = engine(stage, False, {}, {})
    try:
        made.load_checkpoint(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def consolidated(rank: int, folder: str) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    return {name: value.detach() for name, value in found.items()}


def weights(rank: int, folder: str, stage: int) -> dict[str, torch.Tensor]:
    """Load just the weights; return them."""
    import holdfast

    holdfast.install()
    made = engine(stage, False, {}, {})
    made.load_checkpoint(folder, load_optimizer_states=False)
    return {name: gathered(parameter) for name, parameter in made.module.named_parameters()}
