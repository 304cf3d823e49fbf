"""Names and shapes of real mixture-of-experts models.

Hugging Face names, one tensor an expert and projection. Nothing is allocated: a shape is a tuple.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]

ADAM = ("weight", "exp_avg", "exp_avg_sq", "master")


@dataclass(frozen=True)
class Spec:
    """One global tensor. `expert` is its expert number (None: dense); `tp_dim` the dimension that tensor
    parallelism cuts (None: a replica on every tensor-parallel rank)."""

    name: str
    shape: Shape
    expert: int | None = None
    tp_dim: int | None = None


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention with its q and k norms."""

    hidden: int
    heads: int
    groups: int
    head_dim: int

    def specs(self, layer: str) -> Iterator[Spec]:
        a = f"{layer}.self_attn"
        yield Spec(f"{a}.q_proj.weight", (self.heads * self.head_dim, self.hidden), tp_dim=0)
        yield Spec(f"{a}.k_proj.weight", (self.groups * self.head_dim, self.hidden), tp_dim=0)
        yield Spec(f"{a}.v_proj.weight", (self.groups * self.head_dim, self.hidden), tp_dim=0)
        yield Spec(f"{a}.o_proj.weight", (self.hidden, self.heads * self.head_dim), tp_dim=1)
        yield Spec(f"{a}.q_norm.weight", (self.head_dim,))
        yield Spec(f"{a}.k_norm.weight", (self.head_dim,))


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention."""

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def specs(self, layer: str) -> Iterator[Spec]:
        a, qk = f"{layer}.self_attn", self.nope_dim + self.rope_dim
        yield Spec(f"{a}.q_a_proj.weight", (self.q_rank, self.hidden))
        yield Spec(f"{a}.q_a_layernorm.weight", (self.q_rank,))
        yield Spec(f"{a}.q_b_proj.weight", (self.heads * qk, self.q_rank), tp_dim=0)
        yield Spec(f"{a}.kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope_dim, self.hidden))
        yield Spec(f"{a}.kv_a_layernorm.weight", (self.kv_rank,))
        yield Spec(
            f"{a}.kv_b_proj.weight", (self.heads * (self.nope_dim + self.value_dim), self.kv_rank), tp_dim=0
        )
        yield Spec(f"{a}.o_proj.weight", (self.hidden, self.heads * self.value_dim), tp_dim=1)


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    first_moe: int  # layers below this one are dense
    experts: int
    hidden: int
    expert_ffn: int
    dense_ffn: int
    vocab: int
    attention: Attention | LatentAttention
    shared_experts: int = 0
    router_bias: bool = False

    def specs(self) -> Iterator[Spec]:
        """Every parameter, in layer order."""
        yield Spec("model.embed_tokens.weight", (self.vocab, self.hidden), tp_dim=0)
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            yield from self.attention.specs(layer)
            yield Spec(f"{layer}.input_layernorm.weight", (self.hidden,))
            yield Spec(f"{layer}.post_attention_layernorm.weight", (self.hidden,))
            if index < self.first_moe:
                yield from gated(f"{layer}.mlp", self.hidden, self.dense_ffn)
            else:
                yield from self.moe(f"{layer}.mlp")
        yield Spec("model.norm.weight", (self.hidden,))
        yield Spec("lm_head.weight", (self.vocab, self.hidden), tp_dim=0)

    def moe(self, mlp: str) -> Iterator[Spec]:
        yield Spec(f"{mlp}.gate.weight", (self.experts, self.hidden))
        if self.router_bias:
            yield Spec(f"{mlp}.gate.e_score_correction_bias", (self.experts,))
        if self.shared_experts:
            yield from gated(f"{mlp}.shared_experts", self.hidden, self.shared_experts * self.expert_ffn)
        for expert in range(self.experts):
            yield from gated(f"{mlp}.experts.{expert}", self.hidden, self.expert_ffn, expert)

    def parameters(self) -> int:
        total = 0
        for spec in self.specs():
            count = 1
            for extent in spec.shape:
                count *= extent
            total += count
        return total

    def adam_specs(self, classes: tuple[str, ...] = ADAM) -> Iterator[Spec]:
        """Every parameter once for each class of state, named `class.parameter`."""
        for spec in self.specs():
            for kind in classes:
                yield Spec(f"{kind}.{spec.name}", spec.shape, spec.expert, spec.tp_dim)

    def held_by(self, ep_rank: int, ep: int, classes: tuple[str, ...] = ADAM) -> list[Spec]:
        """What one rank holds under expert parallelism: all dense tensors and its share of the experts."""
        first, last = ep_rank * self.experts // ep, (ep_rank + 1) * self.experts // ep
        return [s for s in self.adam_specs(classes) if s.expert is None or first <= s.expert < last]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a model in columns, so that what a rank holds is a mask: for thousands of ranks."""

    names: list[str]
    shapes: list[Shape]
    experts: np.ndarray  # expert number, -1: dense
    layers: np.ndarray  # layer number; the embedding counts to the first, norm and head to the last
    model: Model

    def rows(self, ep_rank: int, ep: int, stage: int = 0, stages: int = 1) -> np.ndarray:
        """The tensors of one expert-parallel rank of one pipeline stage."""
        home = self.experts * ep // self.model.experts
        place = self.layers * stages // self.model.layers
        return np.flatnonzero(((self.experts < 0) | (home == ep_rank)) & (place == stage))


def catalog(model: Model, classes: tuple[str, ...] = ADAM) -> Catalog:
    specs = list(model.adam_specs(classes))
    experts = [-1 if spec.expert is None else spec.expert for spec in specs]
    layers = [layer_of(spec.name, model) for spec in specs]
    return Catalog(
        [s.name for s in specs], [s.shape for s in specs], np.asarray(experts), np.asarray(layers), model
    )


def layer_of(name: str, model: Model) -> int:
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1])
    return 0 if "embed_tokens" in parts else model.layers - 1


def gated(mlp: str, hidden: int, ffn: int, expert: int | None = None) -> Iterator[Spec]:
    """gate and up [ffn, hidden], down [hidden, ffn]."""
    yield Spec(f"{mlp}.gate_proj.weight", (ffn, hidden), expert, 0)
    yield Spec(f"{mlp}.up_proj.weight", (ffn, hidden), expert, 0)
    yield Spec(f"{mlp}.down_proj.weight", (hidden, ffn), expert, 1)


QWEN3_30B_A3B = Model(
    "Qwen3-30B-A3B",
    layers=48,
    first_moe=0,
    experts=128,
    hidden=2048,
    expert_ffn=768,
    dense_ffn=6144,
    vocab=151_936,
    attention=Attention(2048, 32, 4, 128),
)

DEEPSEEK_V3_671B = Model(
    "DeepSeek-V3-671B",
    layers=61,
    first_moe=3,
    experts=256,
    hidden=7168,
    expert_ffn=2048,
    dense_ffn=18_432,
    vocab=129_280,
    shared_experts=1,
    router_bias=True,
    attention=LatentAttention(7168, 128, 1536, 512, 128, 64, 128),
)

# The state the save and load benchmark moves: 2.38 GB with Adam (bf16 weights, fp32 states).
SMALL_MOE = Model(
    "small MoE",
    layers=4,
    first_moe=0,
    experts=32,
    hidden=1024,
    expert_ffn=384,
    dense_ffn=384,
    vocab=4096,
    attention=Attention(1024, 16, 4, 64),
)

TINY_MOE = Model(
    "tiny MoE",
    layers=1,
    first_moe=0,
    experts=8,
    hidden=1024,
    expert_ffn=384,
    dense_ffn=384,
    vocab=4096,
    attention=Attention(1024, 16, 4, 64),
)


def stacked_fc1_chunks(
    layers: int, experts: int = 128, rows: int = 768, hidden: int = 2048, *, halves: int = 2
) -> tuple[Shape, list[Shape], Shape]:
    """Megatron's stacked fc1 key: the global shape, the offset of every chunk, and their common size."""
    shape = (layers, experts, halves * rows, hidden)
    offsets: list[Shape] = [
        (layer, expert, half * rows, 0)
        for layer in range(layers)
        for expert in range(experts)
        for half in range(halves)
    ]
    return shape, offsets, (1, 1, rows, hidden)
