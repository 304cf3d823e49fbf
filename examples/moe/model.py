"""A small Qwen3-MoE-shaped language model with expert parallelism over a real all-to-all.

RMSNorm, grouped-query attention with q/k norm and RoPE, a top-k softmax router with the load-balancing
loss, and SwiGLU experts. The module tree and the parameter names follow Qwen3-MoE, except that the experts of
a layer are three stacked tensors ``[E, ...]``: the name and the global shape of an expert tensor then do not
depend on how many ranks the experts are spread over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. The vocabulary is 256 bytes and one separator, which no number of ranks divides."""

    vocab: int = 257
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 16
    top_k: int = 2
    ffn: int = 192
    rope_base: float = 10_000.0
    aux_weight: float = 0.01


class RouterStats(NamedTuple):
    """What one router did with this rank's tokens; the load-balancing loss is made of it."""

    prob_sum: Tensor  # [E], differentiable: sum of the router's probabilities over the tokens
    counts: Tensor  # [E], how many (token, choice) pairs each expert was given


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding of ``x`` [batch, heads, time, head_dim], positions from 0."""
    half = x.shape[-1] // 2
    inverse = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.q_proj = nn.Linear(cfg.dim, cfg.heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(cfg.dim, cfg.kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.heads * cfg.head_dim, cfg.dim, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim)
        self.k_norm = RMSNorm(cfg.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, time, -1, self.cfg.head_dim)

        q = rope(self.q_norm(split(self.q_proj(x))).transpose(1, 2), self.cfg.rope_base)
        k = rope(self.k_norm(split(self.k_proj(x))).transpose(1, 2), self.cfg.rope_base)
        v = split(self.v_proj(x)).transpose(1, 2)
        groups = self.cfg.heads // self.cfg.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, time, -1))
        return out


class _AllToAll(torch.autograd.Function):
    """The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out = grad.new_empty((sum(ctx.send), *grad.shape[1:]))
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """``send[r]`` consecutive rows of ``x`` go to rank r of ``group``, ``receive[r]`` rows come from it."""
    out: Tensor = _AllToAll.apply(x, send, receive, group)  # type: ignore[no-untyped-call]
    return out


class Experts(nn.Module):
    """The stacked SwiGLU experts of one layer.

    They are plain tensors until training replaces each with a DTensor [E, ...] that is Shard(0) over the mesh
    dimension "ep" and Replicate over "dp".
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.dim))  # gate_proj
        self.w3 = nn.Parameter(torch.empty(cfg.experts, cfg.ffn, cfg.dim))  # up_proj
        self.w2 = nn.Parameter(torch.empty(cfg.experts, cfg.dim, cfg.ffn))  # down_proj
        self.experts = cfg.experts
        self.ep_size = 1
        self.group: Group = None

    def join(self, ep_size: int, group: dist.ProcessGroup) -> None:
        """From now on the experts are spread over the ``ep_size`` ranks of ``group``."""
        self.ep_size, self.group = ep_size, group

    def forward(self, x: Tensor, expert_of_row: Tensor, counts: Tensor) -> Tensor:
        """Rows ``x`` [n, D] through the expert of each; ``counts`` [E] is how many rows each expert gets."""
        order = torch.argsort(expert_of_row, stable=True)
        local = self.experts // self.ep_size
        sent = counts.view(self.ep_size, local)
        got = torch.empty_like(sent)  # [source rank, local expert]
        dist.all_to_all_single(got, sent, group=self.group)
        send, receive = sent.sum(1).tolist(), got.sum(1).tolist()
        rows = all_to_all(x[order], send, receive, self.group)

        # The rows came ordered by (source rank, expert); the experts want (expert, source rank).
        block_expert = torch.arange(local).repeat(self.ep_size)
        by_expert = torch.argsort(block_expert.repeat_interleave(got.flatten()), stable=True)
        out = self._apply_experts(rows[by_expert], got.sum(0).tolist())
        out = out[torch.argsort(by_expert)]

        back = all_to_all(out, receive, send, self.group)
        return back[torch.argsort(order)]

    def _apply_experts(self, rows: Tensor, sizes: list[int]) -> Tensor:
        w1, w2, w3 = (_local(w) for w in (self.w1, self.w2, self.w3))
        # An expert without rows is computed too (on an empty matrix): its gradient is then zero, not absent.
        parts = [
            F.linear(F.silu(F.linear(part, w1[e])) * F.linear(part, w3[e]), w2[e])
            for e, part in enumerate(torch.split(rows, sizes))
        ]
        return torch.cat(parts)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class MoE(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.gate = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.experts = Experts(cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        tokens = x.reshape(-1, x.shape[-1])
        probs = F.softmax(self.gate(tokens), dim=-1)
        weight, expert = probs.topk(self.cfg.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        flat = expert.flatten()
        counts = torch.bincount(flat, minlength=self.cfg.experts)
        out = self.experts(tokens.repeat_interleave(self.cfg.top_k, dim=0), flat, counts)
        mixed = (out.view(*weight.shape, -1) * weight[..., None]).sum(1)
        return mixed.view_as(x), RouterStats(probs.sum(0), counts)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.dim)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.dim)
        self.mlp = MoE(cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, RouterStats]:
        x = x + self.self_attn(self.input_layernorm(x))
        y, stats = self.mlp(self.post_attention_layernorm(x))
        return x + y, stats


class MoELM(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab, cfg.dim)
        self.layers = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = RMSNorm(cfg.dim)
        self.lm_head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[RouterStats]]:
        x, stats = self.embed_tokens(tokens), []
        for layer in self.layers:
            x, layer_stats = layer(x)
            stats.append(layer_stats)
        return self.lm_head(self.norm(x)), stats

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """The same weights on every rank and in every layout: one generator, parameters in order of name."""
        generator = torch.Generator().manual_seed(seed)
        for _, p in sorted(self.named_parameters()):
            if p.dim() > 1:
                p.normal_(0.0, 0.5 * p.shape[-1] ** -0.5, generator=generator)
