"""Tiny models of types that the installed transformers does not have: tensors of random numbers, by the names and shapes
of the publisher's code, and the settings in config.json that Megatron-Bridge and Holdfast read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HIDDEN, WORDS, LAYERS, EXPERTS = 32, 128, 4, 8
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HubModel:
    """One model: what is in config.json, and the shape of each tensor."""

    config: dict[str, Any]
    shapes: Callable[[], Shapes]

    text: str = ""
    """Of a model that contains a language model: the type of that, which the publisher does not say."""

    def types(self) -> set[str]:
        return {str(self.config["model_type"])} | ({self.text} if self.text else set())


def gated(
    prefix: str, inner: int, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> Shapes:
    gate, up, down = (f"{prefix}.{part}.weight" for part in parts)
    return {gate: (inner, HIDDEN), up: (inner, HIDDEN), down: (HIDDEN, inner)}


def mimo_v2_flash() -> Shapes:
    """Four heads; a head of queries and keys has 12 numbers, one of values 8. Sliding layers have four groups."""

    def attention(layer: str, groups: int, sinks: bool) -> Shapes:
        return {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (4 * 12, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (groups * 12, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (groups * 8, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, 4 * 8),
            **({f"{layer}.self_attn.attention_sink_bias": (4,)} if sinks else {}),
        }

    shapes = around("model.", "lm_head.")
    for number, is_sliding in enumerate(MIMO["hybrid_layer_pattern"]):
        layer = f"model.layers.{number}"
        shapes |= attention(layer, 4 if is_sliding else 2, bool(is_sliding))
        shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
        if number == 0:
            shapes |= gated(f"{layer}.mlp", 64)
            continue
        shapes |= {f"{layer}.mlp.gate.weight": (EXPERTS, HIDDEN)}
        shapes |= {f"{layer}.mlp.gate.e_score_correction_bias": (EXPERTS,)}
        for expert in range(EXPERTS):
            shapes |= gated(f"{layer}.mlp.experts.{expert}", 16)
    for number in range(2):
        layer = f"model.mtp.layers.{number}"
        shapes |= attention(layer, 4, True) | gated(f"{layer}.mlp", 64)
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("enorm", "hnorm", "final_layernorm")}
        shapes |= {f"{layer}.pre_mlp_layernorm.weight": (HIDDEN,)}
        shapes |= {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    return shapes


def minimax_m3_vl() -> Shapes:
    """A dense layer, and three with experts, of which two have an indexer; a tower of one layer."""
    shapes = around("language_model.model.", "language_model.lm_head.")
    for number in range(LAYERS):
        layer = f"language_model.model.layers.{number}"
        shapes |= attention(layer)
        shapes |= {f"{layer}.self_attn.{part}_norm.weight": (8,) for part in "qk"}
        if number == 0:
            shapes |= gated(f"{layer}.mlp", 64)
            continue
        moe = f"{layer}.block_sparse_moe"
        shapes |= {f"{moe}.gate.weight": (EXPERTS, HIDDEN), f"{moe}.e_score_correction_bias": (EXPERTS,)}
        shapes |= gated(f"{moe}.shared_experts", 16)
        for expert in range(EXPERTS):
            shapes |= gated(f"{moe}.experts.{expert}", 16, ("w1", "w3", "w2"))
        if number > 1:
            shapes |= {
                f"{layer}.self_attn.index_q_proj.weight": (2 * 8, HIDDEN),
                f"{layer}.self_attn.index_k_proj.weight": (8, HIDDEN),
                f"{layer}.self_attn.index_q_norm.weight": (8,),
                f"{layer}.self_attn.index_k_norm.weight": (8,),
            }
    eyes, seen = "vision_tower.vision_model", 16
    shapes |= {f"{eyes}.embeddings.patch_embedding.weight": (seen, 3, 2, 4, 4)}
    shapes |= with_bias(f"{eyes}.pre_layrnorm", seen)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        shapes |= with_bias(f"{eyes}.encoder.layers.0.self_attn.{part}", seen, seen)
    for norm in ("layer_norm1", "layer_norm2"):
        shapes |= with_bias(f"{eyes}.encoder.layers.0.{norm}", seen)
    shapes |= with_bias(f"{eyes}.encoder.layers.0.mlp.fc1", 24, seen)
    shapes |= with_bias(f"{eyes}.encoder.layers.0.mlp.fc2", seen, 24)
    for part, inputs in {"multi_modal_projector": seen, "patch_merge_mlp": 4 * HIDDEN}.items():
        shapes |= with_bias(f"{part}.linear_1", 40, inputs) | with_bias(f"{part}.linear_2", HIDDEN, 40)
    return shapes


def attention(layer: str) -> Shapes:
    """Four heads of eight numbers in two groups, and the norms around attention and the experts."""
    return {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (4 * 8, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (2 * 8, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (2 * 8, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, 4 * 8),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }


def with_bias(name: str, *shape: int) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def around(model: str, output: str) -> Shapes:
    """What is before and behind the layers."""
    return {
        f"{model}embed_tokens.weight": (WORDS, HIDDEN),
        f"{model}norm.weight": (HIDDEN,),
        f"{output}weight": (WORDS, HIDDEN),
    }


COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
}
MIMO = {
    **COMMON,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "head_dim": 12,
    "v_head_dim": 8,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_layer_freq": [0, 1, 1, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 12,
    "swa_v_head_dim": 8,
    "swa_rope_theta": 1000.0,
    "partial_rotary_factor": 0.334,
    "sliding_window_size": 8,
    "sliding_window": 8,
    "attention_value_scale": 0.707,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": None,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
}
MINIMAX = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "tie_word_embeddings": False,
    "text_config": {
        **COMMON,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 16,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 16,
        "n_shared_experts": 1,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.0,
        "rotary_dim": 4,
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 1, 1, 1],
        "use_qk_norm": True,
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 8,
            "sparse_attention_freq": [0, 0, 1, 1],
        },
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "patch_size": 4,
        "num_channels": 3,
    },
    "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    "projector_hidden_size": 40,
}
HUB = {
    "mimo_v2_flash": HubModel(MIMO, mimo_v2_flash),
    "minimax_m3_vl": HubModel(MINIMAX, minimax_m3_vl, "minimax_m3_vl_text"),
}


def publish(name: str, folder: Path) -> Path:
    """Write a folder as the publisher does, in two files with an index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(11)
    shapes = HUB[name].shapes()
    tensors = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    where = {key: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(tensors)}
    for file in sorted({*where.values()}):
        save_file({key: tensors[key] for key in tensors if where[key] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(HUB[name].config))
    return folder
