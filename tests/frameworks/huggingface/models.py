"""Tiny models of every family: published by transformers, built by megatron-core with the same sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.frameworks.megatron.models import Recipe

WORDS = 100
"""Of the vocabulary; megatron-core's is padded to 104."""
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
SIGMOID = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
}
DENSE = {"num_moe_experts": None, "moe_ffn_hidden_size": None}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
WHOLE_ROPE = {"rope_parameters": {**COMMON["rope_parameters"], "partial_rotary_factor": 1.0}}
_ROPE = WHOLE_ROPE["rope_parameters"]
THREE_ROPES = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
"""Of time, height and width, which are the same for text."""
UNSCALED = {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 64}}
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    **WHOLE_ROPE,
}
SHARED = {"shared_expert_intermediate_size": 16, "num_experts": 8, **EXPERTS}


def delta_net(**extra: Any) -> Recipe:
    """megatron-core's settings for gated delta nets in three layers of four."""
    sizes = {name: value for name, value in DELTA.items() if name.startswith("linear_")}
    named = {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "linear_conv_kernel_dim": 4,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "deterministic_mode": True,
    }
    return Recipe(extra={**named, **sizes, **extra}, delta=True, shared_expert="num_moe_experts" not in extra)


@dataclass(frozen=True)
class Tiny:
    """One model: transformers' configuration class, and what differs from COMMON; megatron-core's recipe."""

    config: str
    published: dict[str, Any]
    recipe: Recipe = field(default_factory=Recipe)
    rounding: float = 1e-5
    """What logits may differ by, of the largest."""
    text: str = ""
    """Of a model that contains a language model: the type of that."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns in names that transformers writes, and what they are where the model is published."""
    joined: tuple[str, ...] = ()
    """The ends of names, in the order in which `publish` puts their tensors one below the other, if `renamed` gives
    them one name."""
    kind: str = ""
    """The type, of a model that transformers does not have: it is published with another one's tensors."""

    def configuration(self, **more: Any) -> Any:
        import transformers

        sizes = {**COMMON, **self.published, **more}
        if self.text and not self.kind:
            tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
            inner = {**sizes, "model_type": self.text}
            sizes = {"text_config": inner, "vision_config": VISION[self.config], **tied}
            if self.config in EARS:
                sizes["audio_config"] = EARS[self.config]
        return getattr(transformers, self.config)(**sizes)

    @property
    def auto(self) -> Any:
        """transformers' class for such models."""
        import transformers

        return (
            transformers.AutoModelForImageTextToText
            if self.text and not self.kind
            else transformers.AutoModelForCausalLM
        )

    def as_published(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """These tensors of transformers by the names of the publisher."""
        found: dict[str, list[torch.Tensor]] = {}
        # Sorted by the names to join, which are in the order of their parts.
        order = {end: place for place, end in enumerate(self.joined)}
        for name in sorted(tensors, key=lambda name: order.get(name.split(".", 3)[-1], -1)):
            published = name
            for pattern, other in self.renamed:
                published = re.sub(pattern, other, published)
            found.setdefault(published, []).append(tensors[name])
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}

    def __hash__(self) -> int:
        return hash(repr(self))


_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = {**_SIGLIP, "model_type": "clip_vision_model"}
VISION = {
    "Gemma3Config": _SIGLIP,
    "Gemma4Config": {
        "model_type": "gemma4_vision",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 16,
        "use_clipped_linears": True,
    },
    "Ernie4_5_VLMoeConfig": {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1},
    "Exaone4_5_Config": {
        **_EYES,
        "depth": 2,
        "num_heads": 4,
        "fullatt_block_indexes": [0],
        "num_key_value_heads": 4,
    },
    "LlavaConfig": _SIGLIP,
    "LlavaNextConfig": _SIGLIP,
    "LlavaNextVideoConfig": _SIGLIP,
    "LlavaOnevisionConfig": _SIGLIP,
    "VideoLlavaConfig": _CLIP,
    "VipLlavaConfig": _CLIP,
    "GotOcr2Config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "mlp_dim": 32,
        "global_attn_indexes": [0],
        "window_size": 2,
    },
    "InternVLConfig": {**_SIGLIP, "model_type": "internvl_vision"},
    "Mistral3Config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
    "Qwen2VLConfig": {"embed_dim": 32, "hidden_size": 32, "num_heads": 2, "depth": 1},
    "Qwen2_5_VLConfig": {**_EYES, "fullatt_block_indexes": [0]},
    "Qwen3VLConfig": {**_EYES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "Qwen3VLMoeConfig": {**_EYES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "Qwen3OmniMoeThinkerConfig": {**_EYES, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    "Qwen3_5Config": {**_EYES, "num_position_embeddings": 16},
    "Qwen3_5MoeConfig": {**_EYES, "num_position_embeddings": 16},
    "Llama4Config": {
        "model_type": "llama4_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "Glm4vMoeConfig": {**_EYES, "image_size": 28, "patch_size": 14},
}
"""What each model that contains a language model sees with."""
EARS = {
    "Gemma4Config": {
        "model_type": "gemma4_audio",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": [8, 4],
        "output_proj_dims": 32,
    },
    "Qwen3OmniMoeThinkerConfig": {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "output_dim": 32,
        "num_mel_bins": 16,
        "downsample_hidden_size": 8,
        "max_source_positions": 16,
    },
}
"""What each of those that hear hears with."""


def _squared_relu(values: torch.Tensor) -> torch.Tensor:
    return torch.relu(values) ** 2


def dense(**extra: Any) -> dict[str, Any]:
    return {**DENSE, **extra}


TINY = {
    "llama": Tiny("LlamaConfig", {}, Recipe(extra=dense(qk_layernorm=False))),
    "qwen2": Tiny("Qwen2Config", {}, Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True))),
    "qwen3": Tiny("Qwen3Config", {"head_dim": 8}, Recipe(extra=DENSE)),
    "qwen3 tied": Tiny(
        "Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}, Recipe(extra=DENSE, tied=True)
    ),
    "starcoder2": Tiny(
        "Starcoder2Config",
        {"tie_word_embeddings": True, "use_bias": True},
        Recipe(
            extra=dense(
                qk_layernorm=False,
                normalization="LayerNorm",
                add_bias_linear=True,
                gated_linear_unit=False,
                activation_func=partial(torch.nn.functional.gelu, approximate="tanh"),
            ),
            tied=True,
        ),
    ),
    "qwen3_moe": Tiny("Qwen3MoeConfig", {"head_dim": 8, "num_experts": 8, **EXPERTS}),
    "mixtral": Tiny(
        "MixtralConfig",
        {"intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        Recipe(extra={"qk_layernorm": False}),
    ),
    "glm4_moe": Tiny(
        "Glm4MoeConfig",
        {"head_dim": 8, "use_qk_norm": True, **EXPERTS, **ROUTED, **WHOLE_ROPE},
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True),
    ),
    "qwen2_moe": Tiny(
        "Qwen2MoeConfig",
        {**SHARED, "norm_topk_prob": True},
        Recipe(
            extra={"qk_layernorm": False, "add_qkv_bias": True, "moe_shared_expert_gate": True},
            shared_expert=True,
        ),
    ),
    # The last bit of the weights moves logits of these by as much.
    "qwen3_next": Tiny("Qwen3NextConfig", {**DELTA, **SHARED}, delta_net(moe_shared_expert_gate=True), 1e-4),
    "qwen3_5_text": Tiny("Qwen3_5TextConfig", DELTA, delta_net(**DENSE)),
    "qwen3_5_moe_text": Tiny(
        "Qwen3_5MoeTextConfig", {**DELTA, **SHARED}, delta_net(moe_shared_expert_gate=True), 1e-4
    ),
    "minimax_m2": Tiny(
        "MiniMaxM2Config",
        {
            "intermediate_size": 16,
            "head_dim": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **WHOLE_ROPE,
        },
        Recipe(extra=SIGMOID, norm_of_all_heads=True),
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3Config",
        {**EXPERTS, **ROUTED, **LATENT},
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True, latent=True),
    ),
}

BIASED = {"normalization": "LayerNorm", "gated_linear_unit": True}
PLAIN = Recipe(extra=dense(qk_layernorm=False))
WITH_BIAS = Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True))
TURNED = Recipe(extra=dense(qk_layernorm=False, rotary_interleaved=True))
LLAMA4 = {
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 16,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "no_rope_layers": [1, 1, 1, 1],
}
ONE_EXPERT = Recipe(
    extra={
        "qk_layernorm": False,
        "rotary_interleaved": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 1,
        "moe_apply_probs_on_input": True,
    },
    shared_expert=True,
)
TINY |= {
    "smollm3": Tiny("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 1], "pad_token_id": 0}, PLAIN),
    "cwm": Tiny("CwmConfig", {"head_dim": 8}, PLAIN),
    "granite": Tiny("GraniteConfig", {"attention_multiplier": 8**-0.5}, PLAIN),
    "helium": Tiny("HeliumConfig", {"head_dim": 8}, TURNED),
    "ernie4_5": Tiny("Ernie4_5Config", {"head_dim": 8}, TURNED),
    "ministral": Tiny("MinistralConfig", {"head_dim": 8}, PLAIN),
    "ministral3": Tiny("Ministral3Config", {"head_dim": 8, **UNSCALED}, PLAIN),
    "phi3": Tiny("Phi3Config", {"pad_token_id": 0}, PLAIN),
    "glm": Tiny(
        "GlmConfig",
        {"head_dim": 8, "attention_bias": True, "pad_token_id": 0, **WHOLE_ROPE},
        Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True, rotary_interleaved=True)),
    ),
    "stablelm": Tiny("StableLmConfig", WHOLE_ROPE, Recipe(extra=dense(qk_layernorm=False, **BIASED))),
    "jais2": Tiny(
        "Jais2Config",
        {"head_dim": 8},
        Recipe(
            extra=dense(
                qk_layernorm=False,
                normalization="LayerNorm",
                add_bias_linear=True,
                gated_linear_unit=False,
                activation_func=_squared_relu,
            )
        ),
    ),
    "olmoe": Tiny(
        "OlmoeConfig",
        {"intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        Recipe(norm_of_all_heads=True),
    ),
    "granitemoe": Tiny(
        "GraniteMoeConfig",
        {
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_multiplier": 8**-0.5,
        },
        Recipe(extra={"qk_layernorm": False}),
    ),
    "granitemoeshared": Tiny(
        "GraniteMoeSharedConfig",
        {
            "intermediate_size": 16,
            "shared_intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_multiplier": 8**-0.5,
        },
        Recipe(extra={"qk_layernorm": False}, shared_expert=True),
    ),
    "dots1": Tiny(
        "Dots1Config",
        {"head_dim": 8, **EXPERTS, **ROUTED},
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True),
    ),
    "solar_open": Tiny(
        "SolarOpenConfig",
        {"head_dim": 8, **EXPERTS, **ROUTED, **WHOLE_ROPE},
        Recipe(extra={**SIGMOID, "qk_layernorm": False}, shared_expert=True),
    ),
    "glm4_moe_lite": Tiny(
        "Glm4MoeLiteConfig",
        {**EXPERTS, **ROUTED, **LATENT},
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True, latent=True),
    ),
    "youtu": Tiny("YoutuConfig", LATENT, Recipe(extra=DENSE, per_layer=True, latent=True)),
    "deepseek_v2": Tiny(
        "DeepseekV2Config",
        {**EXPERTS, **ROUTED, **LATENT, "topk_method": "greedy", "norm_topk_prob": False},
        Recipe(extra={"moe_router_pre_softmax": True}, per_layer=True, shared_expert=True, latent=True),
        1e-4,
    ),
    "mistral": Tiny("MistralConfig", {"head_dim": 8}, PLAIN),
    "hunyuan_v1_dense": Tiny("HunYuanDenseV1Config", {"head_dim": 8, "pad_token_id": 0}, Recipe(extra=DENSE)),
    "hunyuan_v1_moe": Tiny(
        "HunYuanMoEV1Config",
        {"head_dim": 8, "pad_token_id": 0, "intermediate_size": 16, "num_experts": 8, "moe_topk": 2},
        Recipe(shared_expert=True),
    ),
    "llama4_text": Tiny("Llama4TextConfig", LLAMA4, ONE_EXPERT),
    "llama4": Tiny("Llama4Config", LLAMA4, ONE_EXPERT, text="llama4_text"),
    "qwen2_vl": Tiny(
        "Qwen2VLConfig",
        THREE_ROPES,
        Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True)),
        text="qwen2_vl_text",
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2_5_VLConfig",
        THREE_ROPES,
        Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True)),
        text="qwen2_5_vl_text",
    ),
    "qwen3_vl": Tiny("Qwen3VLConfig", {"head_dim": 8}, Recipe(extra=DENSE), text="qwen3_vl_text"),
    "qwen3_5": Tiny("Qwen3_5Config", DELTA, delta_net(**DENSE), 1e-4, text="qwen3_5_text"),
    "qwen3_5_moe": Tiny(
        "Qwen3_5MoeConfig",
        {**DELTA, **SHARED},
        delta_net(moe_shared_expert_gate=True),
        1e-4,
        text="qwen3_5_moe_text",
    ),
    "glm4v_moe": Tiny(
        "Glm4vMoeConfig",
        {"head_dim": 8, **EXPERTS, **ROUTED, **THREE_ROPES},
        Recipe(
            extra={**SIGMOID, "qk_layernorm": False, "add_qkv_bias": True},
            per_layer=True,
            shared_expert=True,
        ),
        text="glm4v_moe_text",
    ),
    "mistral3": Tiny("Mistral3Config", {"head_dim": 8}, PLAIN, text="mistral"),
    "internvl": Tiny("InternVLConfig", {}, WITH_BIAS, text="qwen2"),
    "llava": Tiny("LlavaConfig", {}, PLAIN, text="llama"),
    "llava_next": Tiny("LlavaNextConfig", {}, PLAIN, text="llama"),
    "llava_next_video": Tiny("LlavaNextVideoConfig", {}, PLAIN, text="llama"),
    "llava_onevision": Tiny("LlavaOnevisionConfig", {}, WITH_BIAS, text="qwen2"),
    "video_llava": Tiny("VideoLlavaConfig", {}, PLAIN, text="llama"),
    "vipllava": Tiny("VipLlavaConfig", {}, PLAIN, text="llama"),
    "got_ocr2": Tiny("GotOcr2Config", {}, WITH_BIAS, text="qwen2"),
}


TINY |= {
    "seed_oss": Tiny(
        "SeedOssConfig", {"head_dim": 8}, Recipe(extra=dense(qk_layernorm=False, add_qkv_bias=True))
    ),
    "mellum": Tiny(
        "MellumConfig",
        {
            "head_dim": 8,
            "num_experts": 8,
            **EXPERTS,
            "layer_types": ["full_attention"] * 4,
            "pad_token_id": 0,
            "rope_parameters": {"full_attention": COMMON["rope_parameters"]},
        },
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3VLMoeConfig", {"head_dim": 8, "num_experts": 8, **EXPERTS}, text="qwen3_vl_moe_text"
    ),
    "qwen3_omni_moe_thinker": Tiny(
        "Qwen3OmniMoeThinkerConfig",
        {"head_dim": 8, "num_experts": 8, **EXPERTS, **THREE_ROPES},
        text="qwen3_omni_moe_text",
    ),
    "exaone_moe": Tiny(
        "ExaoneMoeConfig",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"] * 4,
            **EXPERTS,
        },
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True),
    ),
    "hy_v3": Tiny(
        "HYV3Config",
        {
            "head_dim": 8,
            "num_experts": 8,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "router_scaling_factor": 1.0,
            **EXPERTS,
        },
        Recipe(extra=SIGMOID, per_layer=True, shared_expert=True),
    ),
}


def publish(tiny: Tiny, folder: Path, change: Callable[[Any], None] | None = None, **more: Any) -> Any:
    """Have transformers write a model of random weights, in several files; returns the model."""
    torch.manual_seed(5)
    model = tiny.auto.from_config(tiny.configuration(**more)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.uniform_(0, 0.1)
        for name, parameter in model.named_parameters():
            # Hunyuan turns queries and keys before these norms, megatron-core after them: that is the same
            # if what is turned together has one weight.
            if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
                parameter.copy_(parameter[: len(parameter) // 2].repeat(2))
    model.save_pretrained(folder, max_shard_size="80KB")
    if tiny.renamed:
        rewrite(folder, tiny.as_published(weights(folder)))
    if tiny.kind and tiny.text:
        inner = {**json.loads((folder / "config.json").read_text()), "model_type": tiny.text}
        (folder / "config.json").write_text(json.dumps({"model_type": tiny.kind, "text_config": inner}))
    elif tiny.kind:
        edit_config(folder, model_type=tiny.kind)
    return model


class Published(dict[str, Path]):
    """Folders of tiny models, each of which is written when a test first asks for it."""

    def __init__(self, tiny: Mapping[str, Tiny], root: Path) -> None:
        super().__init__()
        self._tiny, self._root = tiny, root

    def __missing__(self, name: str) -> Path:
        self[name] = folder = self._root / name.replace(" ", "-")
        publish(self._tiny[name], folder)
        return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a published folder, by the safetensors library."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One file with these tensors in the place of all weights of a folder."""
    from safetensors.torch import save_file

    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink(missing_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
