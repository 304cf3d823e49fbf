"""Small real MoE models of megatron-core in any layout, trained with its DDP and DistributedOptimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.frameworks.megatron import delta
from tests.frameworks.megatron.fused import importable

VOCAB, LENGTH, BATCH = 104, 16, 8


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel axes; data parallel takes the rest of the world."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1

    def __str__(self) -> str:
        sizes = {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp or 1,
            "ep": self.ep,
            "etp": self.etp,
            "cp": self.cp,
        }
        return "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "dp"


@dataclass(frozen=True)
class Recipe:
    """Which model: Qwen3-like (all layers alike, one key for all of them) or DeepSeek-like (a key each)."""

    per_layer: bool = False
    shared_expert: bool = False
    tied: bool = False
    bf16: bool = False
    vocab: int = VOCAB
    layers: int = 4
    offload: float | None = None
    """Fraction of the optimizer that stays on the CPU (HybridDeviceOptimizer, precision-aware)."""
    latent: bool = False
    """Multi-latent attention, as DeepSeek has it."""
    delta: bool = False
    """Gated delta nets in most layers (tests/frameworks/megatron/delta.py)."""
    norm_of_all_heads: bool = False
    """Of queries, and of keys; megatron-core itself has one of each head."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More settings of the model."""
    fused: bool = False
    """The optimizer keeps its state as Transformer Engine's does (tests/frameworks/megatron/fused.py)."""
    precise: bool = False
    """It has the master weights, too, and moments in another precision (`use_precision_aware_optimizer`)."""
    muon: bool = False
    """Matrices by Muon, whole on one rank each, and the rest by Adam: Megatron-LM 0.19's default pair."""
    dense: bool = False
    """No experts."""

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def name(self) -> str:
        if self.offload is not None:
            return "offloaded"
        name = "deepseek" if self.per_layer else "dense" if self.dense else "qwen"
        return name + "-fused" * self.fused + "-precise" * self.precise + "-muon" * self.muon


class Training:
    """Model chunks, optimizer, and steps on data that is the same in every layout."""

    def __init__(self, layout: Layout, recipe: Recipe, seed: int = 1) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.layout, self.recipe = layout, recipe
        self.config = config_of(layout, recipe)
        self.config.finalize_model_grads_func = finalize_model_grads
        torch.manual_seed(seed)
        self.chunks = build(self.config, layout, recipe)
        dtype = torch.bfloat16 if recipe.bf16 else torch.float32
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, bucket_size=20_000
        )
        self.models = [
            DistributedDataParallel(self.config, ddp, chunk, **_layout_for_muon(ddp, chunk, recipe))
            for chunk in self.chunks
        ]
        more: dict[str, Any] = {}
        if recipe.offload is not None:
            more = {
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": recipe.offload,
                "use_precision_aware_optimizer": True,
            }
        if recipe.muon:
            more = {"use_layer_wise_distributed_optimizer": True}
        if recipe.precise:
            more = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
        with importable() if recipe.fused else contextlib.nullcontext():
            config = OptimizerConfig(
                optimizer="muon" if recipe.muon else "adam",
                lr=1e-3,
                clip_grad=1.0,
                bf16=recipe.bf16,
                params_dtype=dtype,
                use_distributed_optimizer=not recipe.muon,
                **more,
            )
        self.optimizer = get_megatron_optimizer(config, self.models)
        self.iteration = 0

    def step(self) -> float:
        """One step on the batch of this iteration; the mean loss over the global batch."""
        from megatron.core import parallel_state as ps
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        tokens = torch.randint(
            0, VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(100 + self.iteration)
        )
        size, rank = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
        mine = tokens[rank * BATCH // size : (rank + 1) * BATCH // size]
        # As few microbatches as a pipeline wants: each costs the same, however many rows it has.
        rows = max(1, len(mine) // self.layout.pp)
        parts = mine.split(rows)
        found: list[torch.Tensor] = []

        def forward(iterator: Iterator[torch.Tensor], model: Any) -> Any:
            batch = next(iterator)
            places = torch.arange(LENGTH)[None].expand(len(batch), -1)
            mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
            out = model(batch[:, :-1].contiguous(), places, mask, labels=batch[:, 1:].contiguous())

            def loss(value: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
                mean = value.float().mean()
                found.append(mean.detach().clone())  # it is scaled in place afterwards
                return mean, {"loss": mean.detach()}

            return out, loss

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(parts) for _ in self.models] if len(self.models) > 1 else iter(parts),
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=len(parts),
            seq_length=LENGTH,
            micro_batch_size=rows,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        self.optimizer.step()
        self.iteration += 1
        total = torch.stack(
            [torch.stack(found).sum() if found else torch.zeros(()), torch.tensor(float(len(found)))]
        )
        dist.all_reduce(total)
        return float(total[0] / total[1])

    # -- state, as Megatron's training loop makes it

    def metadata(self, **more: Any) -> dict[str, Any]:
        return {**metadata(), **more}

    def model_state(self, **more: Any) -> dict[str, Any]:
        return describe(self.chunks, **more)

    def load_model(self, state: dict[str, Any]) -> None:
        many = len(self.chunks) > 1
        for number, chunk in enumerate(self.chunks):
            chunk.load_state_dict(state[f"model{number}" if many else "model"], strict=False)


def metadata() -> dict[str, Any]:
    """How Megatron's training loop asks for state."""
    from megatron.core import parallel_state as ps

    return {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": "fully_reshardable",
    }


def describe(chunks: list[Any], **more: Any) -> dict[str, Any]:
    """The sharded state dict of a model."""
    many = len(chunks) > 1
    return {
        f"model{number}" if many else "model": chunk.sharded_state_dict(metadata={**metadata(), **more})
        for number, chunk in enumerate(chunks)
    }


def build(config: Any, layout: Layout, recipe: Recipe) -> list[Any]:
    """The model chunks of this rank."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel

    chunks = []
    for chunk in range(layout.vpp or 1):
        stage = chunk if layout.vpp else None
        spec = spec_of(config, recipe, stage)
        model = GPTModel(
            config,
            spec,
            mtp_block_spec=_predicting(config, spec, stage) if config.mtp_num_layers else None,
            vocab_size=recipe.vocab,
            max_sequence_length=LENGTH,
            pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=recipe.tied,
            position_embedding_type="rope",
            vp_stage=stage,
        )
        # An MoE layer that trains wants sequence parallelism with TP; nothing here is random anyway.
        model.eval()
        for module in model.modules():
            if hasattr(module, "expert_bias"):
                module.training = True  # since 0.19, only the bias of a router that trains is moved
        chunks.append(model.bfloat16() if recipe.bf16 else model)
    return chunks


def _layout_for_muon(ddp: Any, chunk: Any, recipe: Recipe) -> dict[str, Any]:
    """Where a model's parameters lie in the buffers, as Megatron-LM 0.19 tells it for Muon."""
    if not recipe.muon:
        return {}
    from megatron.core import parallel_state as ps
    from megatron.core.optimizer import layer_wise_optimizer

    layer_wise_optimizer.tag_params_for_buffer_routing([chunk])
    layout = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout(
        [param for param in chunk.parameters() if param.requires_grad],
        ddp.bucket_size,
        ps.get_data_parallel_world_size(with_context_parallel=True),
        ddp,
        expert_data_parallel_world_size=ps.get_expert_data_parallel_world_size(),
    )
    return {"full_param_layout": layout}


def config_of(layout: Layout, recipe: Recipe) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    named: dict[str, Any] = {
        "num_layers": recipe.layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": None if recipe.dense else 16,
        "num_moe_experts": None if recipe.dense else 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_shared_expert_intermediate_size": 16 if recipe.shared_expert else None,
        "moe_layer_freq": [0] + [1] * (recipe.layers - 1) if recipe.per_layer else 1,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # Attention that cuts sequences needs Transformer Engine. State lies over the ranks as it does with
        # it, but such a model can't run here.
        "context_parallel_size": 1,
        "sequence_parallel": layout.tp > 1 and layout.ep > 1,  # older versions insist on it
        "params_dtype": torch.bfloat16 if recipe.bf16 else torch.float32,
        "pipeline_dtype": torch.bfloat16 if recipe.bf16 else torch.float32,
        "bf16": recipe.bf16,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "deallocate_pipeline_outputs": True,
    }
    if recipe.latent:
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 8}
        heads = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 16, "kv_channels": 16}
        latent = {
            "multi_latent_attention": True,
            "rope_type": "rope",
            "num_query_groups": 4,
            **ranks,
            **heads,
        }
        config = MLATransformerConfig(**{**named, **latent, **recipe.extra})
    else:
        config = TransformerConfig(**{**named, **recipe.extra})
    config.sequence_parallel = False  # the norm of PyTorch, which stands for Transformer Engine's, has none
    return config


def spec_of(config: Any, recipe: Recipe, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    if recipe.delta:
        return delta.block(config, stage)
    if recipe.per_layer:
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", qk_l2_norm=False, vp_stage=stage
        )
        if recipe.latent:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = _latent_attention()
        return block
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    if recipe.norm_of_all_heads:
        attention = spec.submodules.self_attention.submodules
        queries, keys = {"heads": config.num_attention_heads}, {"heads": config.num_query_groups}
        attention.q_layernorm = ModuleSpec(_NormOfAllHeads, queries)
        attention.k_layernorm = ModuleSpec(_NormOfAllHeads, keys)
    return spec


class _NormOfAllHeads(torch.nn.RMSNorm):
    """Of `[..., heads, size]`, as one; without tensor parallelism."""

    def __init__(self, heads: int, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__(heads * hidden_size, eps)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values.flatten(-2)).view(values.shape)


def _predicting(config: Any, spec: Any, stage: int | None) -> Any:
    """Layers that predict further tokens, on the rank that has them."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank

    # 0.19 takes what it asks of the config.
    asks = "mtp_num_layers" in inspect.signature(mtp_on_this_rank).parameters
    how = {"mtp_num_layers": config.mtp_num_layers} if asks else {"config": config}
    here = mtp_on_this_rank(**how, vp_stage=stage)
    return get_gpt_mtp_block_spec(config, spec, False, stage) if here else None


def _latent_attention() -> Any:
    """Attention without Transformer Engine, for keys as wide as values; it has no such arguments."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Attention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
            assert k_channels == v_channels
            super().__init__(*args, **named)

    return Attention


@contextlib.contextmanager
def parallel(layout: Layout) -> Iterator[None]:
    """Megatron's groups for a layout, and their end: each has threads of gloo that go on polling."""
    from megatron.core import parallel_state as ps

    before = set(_groups())
    ps.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    try:
        yield
        torch.distributed.barrier()  # nobody is in a collective of these groups
        for group in set(_groups()) - before:
            torch.distributed.destroy_process_group(group)
    finally:
        ps.destroy_model_parallel()


def _groups() -> Iterable[torch.distributed.ProcessGroup]:
    return torch.distributed.distributed_c10d._world.pg_map
