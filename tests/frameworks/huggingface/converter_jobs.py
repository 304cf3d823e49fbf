"""megatron-core's tensors by Megatron-Bridge's own registries and functions; importable by spawned processes."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import holdfast
from tests.frameworks.huggingface.models import edit_config, rewrite, weights

BRIDGES = {
    "gemma": "gemma.gemma_bridge.GemmaBridge",
    "gemma2": "gemma.gemma2_bridge.Gemma2Bridge",
    "gemma3_text": "gemma.gemma3_bridge.Gemma3ModelBridge",
    "gemma3": "gemma_vl.gemma3_vl_bridge.Gemma3VLBridge",
    "nemotron": "nemotron.nemotron_bridge.NemotronBridge",
    "ernie4_5_moe": "ernie.ernie_45_bridge.Ernie45Bridge",
    "nemotron_h": "nemotronh.nemotron_h_bridge.NemotronHBridge",
    "exaone4": "exaone.exaone4.exaone4_bridge.Exaone4Bridge",
    "deepseek_v4": "deepseek.deepseek_v4_bridge.DeepSeekV4Bridge",
    "bailing_moe_v2": "bailing.bailing_moe2_bridge.BailingMoeV2Bridge",
    "sarvam_moe": "sarvam.sarvam_moe_bridge.SarvamMoEBridge",
    "sarvam_mla": "sarvam.sarvam_mla_bridge.SarvamMLABridge",
    "kimi_k25": "kimi_vl.kimi_k25_vl_bridge.KimiK25VLBridge",
    "nemotron_h latent": "nemotronh.nemotron_h_bridge.NemotronHBridge",
    "glm_moe_dsa": "glm_moe_dsa.glm5_bridge.GLM5Bridge",
}
SAVED = {
    "experts.linear_fc1.weight*": "experts.experts.*.linear_fc1.weight",
    "experts.linear_fc2.weight*": "experts.experts.*.linear_fc2.weight",
    ".conv1d_": ".conv1d.",
}
"""How checkpoints name parameters that have other names in the modules."""
PUBLISHERS = {
    "backbone.embedding.weight": "backbone.embeddings.weight",
    ".attn.indexer.weights_proj.": ".attn.indexer.scorer.weights_proj.",
}
"""Parts of names for which the converters have others."""
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
"""Beginnings of published names of parts that are not converted."""
V4 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
KIMI = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 16,
                "symmetric": True,
            },
        }
    },
}
SIZES = SimpleNamespace(
    num_attention_heads=4, num_query_groups=2, kv_channels=8, hidden_size=32, attention_output_gate=False
)

INNER, STATE, HEADS = 32, 16, 4
MAMBA = {
    "in_proj": {"z": INNER, "x": INNER, "B": STATE, "C": STATE, "dt": HEADS},
    "conv1d": {"x": INNER, "B": STATE, "C": STATE},
}
"""What `MambaMixer.sharded_state_dict` makes of these layers' tensors, and the rows of each."""


def compare(rank: int, name: str, folder: str) -> tuple[int, list[str], list[str]] | None:
    """Convert a folder, and load it; return how many tensors that makes, the names of those that differ, and
    published ones that the conversion has not used. None if the installed version has no such converter."""
    module, _, cls = BRIDGES[name].rpartition(".")
    try:
        bridge: Any = getattr(import_module(f"megatron.bridge.models.{module}"), cls)()
    except ModuleNotFoundError:
        return None
    if "latent" in name and not hasattr(bridge, "_hf_mtp_config"):  # a version without them
        return None
    there = weights(Path(folder))
    for part, other in PUBLISHERS.items():
        there = {key.replace(part, other): value for key, value in there.items()}
    converted, used = _by_bridge(bridge, there)
    unlike = _unlike(converted, folder)
    unused = {key for key in there if not key.startswith(OTHER_PARTS)} - used
    return len(converted), unlike, sorted(unused)


def compare_quantized(rank: int, name: str, folder: str) -> tuple[int, list[str]] | None:
    """Quantize a folder by Megatron-Bridge's functions, convert it by its converter, and load it; return how many
    tensors are quantized, and the names of those that differ. None if the installed version has no such converter."""
    module, _, cls = BRIDGES[name].rpartition(".")
    try:
        utils = import_module("megatron.bridge.models.conversion.quantization_utils")
        bridge: Any = getattr(import_module(f"megatron.bridge.models.{module}"), cls)()
    except ModuleNotFoundError:
        return None
    there = weights(Path(folder))
    quantize, about = {"deepseek_v4": (_as_deepseek_v4, V4), "kimi_k25": (_as_kimi, KIMI)}[name]
    parts = {key: quantize(utils, key, value) for key, value in there.items()}
    rewrite(Path(folder), {key: value for made in parts.values() for key, value in made.items()})
    edit_config(Path(folder), quantization_config=about)
    stored = {key: value for made in parts.values() for key, value in made.items()}
    for part, other in PUBLISHERS.items():
        stored = {key.replace(part, other): value for key, value in stored.items()}
        there = {key.replace(part, other): value for key, value in there.items()}
    values = {key: bridge.maybe_modify_loaded_hf_weight(key, stored) for key in there}
    return sum(len(made) > 1 for made in parts.values()), _unlike(_by_bridge(bridge, values)[0], folder)


def _unlike(converted: dict[str, torch.Tensor], folder: str) -> list[str]:
    state = {key: torch.zeros_like(value) for key, value in converted.items()}
    holdfast.load(state, folder, job=holdfast.Job(no_dist=True))
    return [key for key, value in converted.items() if not torch.equal(value, state[key])]


def _as_deepseek_v4(utils: Any, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Routed experts in 4 bits, other linear layers in 8, as DeepSeek V4 Flash is published."""
    if not re.search(r"\.(w[1-3]|w[qo]_[ab]|wkv)\.weight", key) or "compressor" in key:
        return {key: value}
    e8m0 = torch.float8_e8m0fnu
    if ".experts." in key:
        scales = torch.ones(len(value), value.shape[1] // 32).to(e8m0)
        elements, scales = utils.quantize_mxfp4_e2m1_like_scale(value, scales)
    else:
        elements, scales = utils.quantize_fp8_e4m3fn_like_scale(value, torch.ones(1, 1).to(e8m0))
    return {key: elements, key.removesuffix("weight") + "scale": scales}


def _as_kimi(utils: Any, key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Routed experts in whole numbers of 4 bits, as Kimi K2.5 is published."""
    if ".experts." not in key:
        return {key: value}
    packed, scales, shape = utils.quantize_to_int4(value, group_size=16)
    return {f"{key}_packed": packed, f"{key}_scale": scales, f"{key}_shape": torch.as_tensor(shape)}


def _by_bridge(bridge: Any, there: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    kinds = import_module("megatron.bridge.models.conversion.param_mapping")
    bridge.hf_config = SimpleNamespace(num_hidden_layers=4, num_nextn_predict_layers=0)
    converted: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for mapping in bridge.mapping_registry().mappings:
        names = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        ours = mapping.megatron_param
        for parameter, saved in SAVED.items():
            ours = ours.replace(parameter, saved)
        if "local_experts" in ours:
            continue
        for numbers in product(*[range(4), range(8)][: ours.count("*")]):
            sources = {part: _numbered(given, numbers) for part, given in names.items()}
            if not {*sources.values()} <= there.keys() or "".join(sources.values()).startswith(OTHER_PARTS):
                continue
            used |= {*sources.values()}
            found = {part: there[source] for part, source in sources.items()}
            name = _numbered(ours, numbers)
            converted |= _as_saved(name, _convert(kinds, mapping, found))
    return converted, used


def _as_saved(name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that megatron-core makes of one in a checkpoint: of some of a Mamba layer, several."""
    parts = next((parts for part, parts in MAMBA.items() if f".mixer.{part}." in name), {})
    if not parts or "norm" in name:
        return {name: whole}
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory

    tensor = ShardedTensor.from_rank_offsets(name, whole)
    made = _split_tensor_factory(tensor, [*parts.values()], [*parts], 0).build()
    return {one.key: one.data for one in made}


def _numbered(name: str, numbers: tuple[int, ...]) -> str:
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def _convert(kinds: Any, mapping: Any, found: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(mapping, kinds.QKVMapping):
        merge = kinds.merge_qkv_weights if found["q"].ndim > 1 else kinds.merge_qkv_biases
        merged: torch.Tensor = merge(SIZES, found["q"], found["k"], found["v"])
        return merged
    if isinstance(mapping, kinds.GatedMLPMapping):
        return torch.cat([found["gate"], found["up"]])
    if isinstance(mapping, kinds.MambaInProjMapping | kinds.MambaConv1dMapping):
        # Of one tensor-parallel rank, it puts the same parts together in the same order.
        return found[""]
    if isinstance(mapping, kinds.ColumnParallelMapping | kinds.RowParallelMapping):
        return found[""]
    if isinstance(mapping, kinds.ReplicatedMapping):
        whole: torch.Tensor = mapping.hf_to_megatron(found[""], torch.nn.Linear(1, 1))
        return whole
    if isinstance(mapping, kinds.ConcatenatedQKVMapping):
        heads, groups, size = SIZES.num_attention_heads, SIZES.num_query_groups, SIZES.kv_channels
        parts = found[""].split([heads * size, groups * size, groups * size])
        return kinds.merge_qkv_weights(SIZES, *parts)
    if type(mapping).__name__.startswith("_HCAlpha"):  # one scalar of three
        one = torch.zeros(1)
        module = SimpleNamespace(alpha_pre=one, alpha_post=one, alpha_res=one)
        return mapping.hf_to_megatron(found[""], module)
    assert isinstance(mapping, kinds.AutoMapping), type(mapping)
    assert type(mapping).hf_to_megatron is kinds.AutoMapping.hf_to_megatron, type(mapping)
    return found[""]
