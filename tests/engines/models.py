"""Tiny published models of random numbers, for vLLM's own loader; run by the Python of `.venv-engines`."""

from __future__ import annotations

from pathlib import Path

import torch

ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
COMMON = {
    **ATTENTION,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 100,  # which vLLM pads to 128
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_group": 1}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "intermediate_size": 96,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}

SETTINGS: dict[str, dict[str, object]] = {
    "llama": COMMON,
    "mistral": COMMON,
    "qwen3": COMMON,
    "qwen3_moe": {**COMMON, **EXPERTS, "num_experts": 8},
    "deepseek_v3": COMMON
    | EXPERTS
    | SHARED
    | LATENT
    | {"num_key_value_heads": 4, "head_dim": 8, "n_group": 2, "topk_method": "noaux_tc"},
    "glm4_moe": COMMON | EXPERTS | SHARED | {"n_group": 1, "use_qk_norm": True, "attention_bias": True},
    # Of this one, vLLM 0.32 builds no model with fewer keys than ranks.
    "gpt_oss": COMMON | {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": COMMON
    | EXPERTS
    | DELTA_NET
    | {"num_hidden_layers": 4, "num_experts": 8, "shared_expert_intermediate_size": 32},
    "qwen3_vl": {
        "text_config": {**COMMON, "rope_parameters": ROPE},
        "vision_config": VISION,
        "tie_word_embeddings": False,
    },
}
LAYOUTS = {"TP2": (2, False), "TP2+EP": (2, True), "TP4": (4, False)}
"""Number of ranks, and whether each has whole experts. On four ranks, two hold each key and value."""


def stand_in_for_operators() -> None:
    """Declare the operators of torchvision, whose package on PyPI is for CUDA. No test calls them."""
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")


def publish(kind: str, folder: Path) -> None:
    """Have transformers write a tiny model in bfloat16."""
    import transformers

    torch.manual_seed(1)
    configuration = transformers.AutoConfig.for_model(kind, **SETTINGS[kind])
    of = transformers.AutoModelForImageTextToText if "vl" in kind else transformers.AutoModelForCausalLM
    model = of.from_config(configuration).float()
    for tensor in model.state_dict().values():
        if tensor.ndim > 1:
            torch.nn.init.normal_(tensor, std=0.3)
        else:
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    model.bfloat16().save_pretrained(folder)
