"""Jobs of ranks that take fingerprints of a sharded state under published names."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

import holdfast
from holdfast.errors import HoldfastError

HIDDEN, EXPERTS = 6, 8
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_experts": EXPERTS,
    "vocab_size": 26,
}
LAYER = "model.layers.0"


def whole() -> dict[str, torch.Tensor]:
    """Weights under the names of transformers' modules."""
    random = torch.Generator().manual_seed(3)
    shapes = {
        "lm_head.weight": (26, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{LAYER}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        f"{LAYER}.mlp.experts.gate_up_proj": (EXPERTS, 4, HIDDEN),
        f"{LAYER}.mlp.experts.down_proj": (EXPERTS, HIDDEN, 2),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def published_fingerprints(rank: int) -> Any:
    """Fingerprints of the weights cut as FSDP2 cuts them, on meshes of one and of two dimensions: 26 rows over
    8 ranks are 4, 4, 4, 4, 4, 4, 2 and none."""
    found = []
    for sizes, placements in (((8,), [Cut(0)]), ((2, 4), [Replicate(), Cut(0)])):
        mesh = init_device_mesh("cpu", sizes)
        model = {
            name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
            for name, tensor in whole().items()
        }
        optim = {"state": {"lm_head.weight": {"exp_avg": model["lm_head.weight"]}}}
        for state in (model, {"model": model, "optim": optim}):
            job = holdfast.Job(timeout=60, stall_timeout=30)
            found.append(holdfast.fingerprint(state, published=CONFIG, job=job))
    return found


def open_offsets(rank: int) -> str:
    """The error for shards whose offsets are known only to all ranks together."""
    part = holdfast.Shard(torch.ones(1 + rank % 2, HIDDEN), (12, HIDDEN), (None, 0), position=rank)
    try:
        holdfast.fingerprint({"lm_head.weight": part}, published=CONFIG, job=holdfast.Job(timeout=60))
    except HoldfastError as error:
        return error.message
    return ""
