"""Gated delta nets of megatron-core on a CPU. What it takes from flash-linear-attention and Transformer Engine
has a stand-in here: a length of one, and a norm whose weight is the difference to one. The delta rule is its
own, of PyTorch's operations (`deterministic_mode`)."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch


class Norm(torch.nn.Module):
    """An RMS norm with a weight that is the difference to one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values, self.weight.shape, 1 + self.weight, self.eps)


def with_length_one(values: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return values * torch.rsqrt((values * values).sum(-1, keepdim=True) + eps)


def block(config: Any, stage: int | None) -> Any:
    """The layers of a stage: gated delta nets, and attention in every so many."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.ssm import gated_delta_net as delta
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    where: Any = getattr(delta, "common", delta)  # since 0.19
    where.HAVE_FLA, where.l2norm = True, with_length_one
    stock = WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **named: Any) -> Any:
        if config.layernorm_zero_centered_gamma:
            return Norm(hidden_size, eps)
        return stock(cls, config, hidden_size, eps, **named)

    WrappedTorchNorm.__new__ = norm
    variant, config.experimental_attention_variant = config.experimental_attention_variant, None
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    config.experimental_attention_variant = variant  # 0.19 makes no layers without Transformer Engine of it
    first = get_transformer_layer_offset(config, vp_stage=stage)
    parts = delta.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    layers.layer_specs = [deepcopy(layer) for layer in layers.layer_specs]  # one serves several layers
    for number, layer in enumerate(layers.layer_specs, first + 1):
        if number % config.linear_attention_freq:
            layer.submodules.self_attention = ModuleSpec(module=delta.GatedDeltaNet, submodules=parts)
    return layers
