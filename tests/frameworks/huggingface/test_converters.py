"""Types whose models megatron-core alone can't build, or not on a CPU: every tensor is that of Megatron-Bridge's
own converter, and all that is published is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from tests.frameworks.huggingface import converter_jobs
from tests.frameworks.huggingface.models import EXPERTS, LATENT, ROUTED, WHOLE_ROPE, Published, Tiny
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
TIED = {"head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": True}
SANDWICH = {**TIED, "query_pre_attn_scalar": 8, "sliding_window": 16}
GEMMA4 = {
    **TIED,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 128,  # Megatron-Bridge does not pad that of dense ones
    "rope_parameters": None,
}
"""Dense, as Gemma 4 31B: global layers have another size, and no values but their keys."""
GEMMA4_MOE = {
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}
PER_LAYER = {
    **GEMMA4,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
}
"""Gemma 4 E2B and E4B, without layers that share keys and values."""
FALCON = {
    "head_dim": 8,
    "pad_token_id": 0,
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_norm_before_gate": False,
}
HUB_V4 = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.layers\.", "layers."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.compressor\.indexer\.(kv_proj|gate_proj|position_bias|kv_norm)", r".indexer.compressor.\1"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.", ".indexer."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.position_bias", ".ape"),
    (r"\.self_attn\.q_a_norm\.", ".attn.q_norm."),
    (r"\.self_attn\.sinks", ".attn.attn_sink"),
    (r"\.self_attn\.", ".attn."),
    (r"\.(q|o)_(a|b)_proj\.", r".w\1_\2."),
    (r"(\.attn\..*)\.?\bkv_proj\.", r"\1wkv."),
    (r"(\.attn\..*)\.?\bgate_proj\.", r"\1wgate."),
    (r"\.mlp\.", ".ffn."),
    (r"gate\.e_score_correction_bias", "gate.bias"),
    (r"shared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"shared_experts\.down_proj\.", "shared_experts.w2."),
    (r"shared_experts\.up_proj\.", "shared_experts.w3."),
)
"""Names of DeepSeek V4 on the hub, of which transformers 5.10 writes back some only."""
LING = (
    (r"embed_tokens", "word_embeddings"),
    (r"self_attn\.[qkv]_proj", "attention.query_key_value"),
    (r"self_attn\.o_proj", "attention.dense"),
    (r"self_attn\.q_norm", "attention.query_layernorm"),
    (r"self_attn\.k_norm", "attention.key_layernorm"),
    (r"e_score_correction_bias", "expert_bias"),
)
CONVERTED = {
    "exaone4": Tiny("Exaone4Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "exaone4_5": Tiny("Exaone4_5_Config", {"head_dim": 8, "vocab_size": 128}, text="exaone4"),
    "deepseek_v4": Tiny(
        "DeepseekV4Config",
        {
            "head_dim": 16,
            "q_lora_rank": 16,
            "num_key_value_heads": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "num_hash_layers": 1,
            "qk_rope_head_dim": 4,
            "hc_mult": 2,
            "rope_parameters": None,
            **EXPERTS,
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        },
        renamed=HUB_V4,
    ),
    "bailing_moe_v2": Tiny(
        "Glm4MoeConfig",
        {"head_dim": 8, "use_qk_norm": True, **EXPERTS, **ROUTED, **WHOLE_ROPE},
        renamed=LING,
        joined=tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
        kind="bailing_moe_v2",
    ),
    "gemma": Tiny("GemmaConfig", TIED),
    "gemma2": Tiny("Gemma2Config", SANDWICH),
    "gemma3_text": Tiny("Gemma3TextConfig", SANDWICH),
    "gemma3": Tiny("Gemma3Config", SANDWICH, text="gemma3_text"),
    "gemma4_text": Tiny("Gemma4TextConfig", GEMMA4_MOE),
    "gemma4_text dense": Tiny("Gemma4TextConfig", GEMMA4),
    "gemma4_text per layer": Tiny("Gemma4TextConfig", PER_LAYER),
    "gemma4": Tiny("Gemma4Config", GEMMA4_MOE, text="gemma4_text"),
    "gemma4 dense": Tiny("Gemma4Config", PER_LAYER, text="gemma4_text"),
    "nemotron": Tiny("NemotronConfig", {"head_dim": 8}),
    "ernie4_5_moe": Tiny(
        "Ernie4_5_MoeConfig",
        {
            "head_dim": 8,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 1,
        },
    ),
    "ernie4_5_vl_moe": Tiny(
        "Ernie4_5_VLMoeConfig",
        {
            "tie_word_embeddings": True,
            "vocab_size": 128,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [16, 8],
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        text="ernie4_5_vl_moe_text",
    ),
    "nemotron_h": Tiny(
        "NemotronHConfig",
        {
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        },
    ),
    "falcon_h1": Tiny("FalconH1Config", FALCON),
    "falcon_h1 norm": Tiny("FalconH1Config", {**FALCON, "mamba_rms_norm": True}),
    "glm_moe_dsa": Tiny(
        "GlmMoeDsaConfig",
        {
            **EXPERTS,
            **ROUTED,
            **LATENT,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
        },
    ),
}


CONVERTED["sarvam_moe"] = replace(CONVERTED["bailing_moe_v2"], kind="sarvam_moe")
DEEPSEEK = Tiny("DeepseekV3Config", {**EXPERTS, **ROUTED, **LATENT})
CONVERTED["sarvam_mla"] = replace(
    DEEPSEEK, published={**DEEPSEEK.published, "q_lora_rank": None}, kind="sarvam_mla"
)
CONVERTED["kimi_k25"] = replace(
    DEEPSEEK, kind="kimi_k25", text="kimi_k2", renamed=(("^", "language_model."),)
)
CONVERTED["nemotron_h latent"] = replace(
    CONVERTED["nemotron_h"], published={**CONVERTED["nemotron_h"].published, "moe_latent_size": 24}
)
"""Nemotron 3's experts work on fewer numbers than the model has."""


QUANTIZED = {
    "deepseek_v4": replace(
        CONVERTED["deepseek_v4"],
        published={**CONVERTED["deepseek_v4"].published, "moe_intermediate_size": 32},
    ),
    "kimi_k25": CONVERTED["kimi_k25"],
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Published(CONVERTED, tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize("name", [name for name, tiny in CONVERTED.items() if not tiny.kind])
def test_transformers_own_modules_are_filled(name: str, published: dict[str, Path]) -> None:
    stock = CONVERTED[name].auto.from_pretrained(published[name])
    ours = CONVERTED[name].auto.from_config(CONVERTED[name].configuration()).float()
    holdfast.load(ours.state_dict(), published[name])
    for key, value in stock.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key


@pytest.fixture(scope="module")
def alone() -> Iterator[ProcessWorld]:
    with ProcessWorld(1, preload="bridges") as world:
        yield world


OWN_MODELS = ("gemma4", "ernie4_5_vl", "exaone4_5", "falcon_h1")
"""Beginnings of types of which Megatron-Bridge converts the whole model: test_gemma4.py, test_hub_models.py."""


@pytest.mark.parametrize("name", [name for name in CONVERTED if not name.startswith(OWN_MODELS)])
def test_every_tensor_is_that_of_megatron_bridges_converter(
    name: str, published: dict[str, Path], alone: ProcessWorld
) -> None:
    if (
        importlib.util.find_spec("megatron.bridge") is None
    ):  # its import needs what the world's processes have
        pytest.skip("needs Megatron-Bridge")
    compared = alone.run(converter_jobs.compare, name, str(published[name]), timeout=100)[0]
    if compared is None:
        pytest.skip(f"this Megatron-Bridge has no converter for {name}; a newer one has")
    made, unlike, unused = compared
    assert made > 4 * 6
    assert unlike == []
    assert unused == []


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_tensor_is_that_of_megatron_bridges_converter(
    name: str, alone: ProcessWorld, tmp_path: Path
) -> None:
    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip("needs Megatron-Bridge")
    folder = Published(QUANTIZED, tmp_path)[name]
    compared = alone.run(converter_jobs.compare_quantized, name, str(folder), timeout=100)[0]
    if compared is None:
        pytest.skip(f"this Megatron-Bridge has no converter for {name}; a newer one has")
    quantized, unlike = compared
    assert quantized >= 3 * 8 * 3, "three matrices of each expert of three layers"
    assert unlike == []
