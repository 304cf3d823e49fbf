"""megatron-core's tensors by Megatron-Bridge's own registries and functions; importable by spawned processes."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import holdfast
from tests.frameworks.huggingface.models import weights

BRIDGES = {
    "gemma": "gemma.gemma_bridge.GemmaBridge",
    "gemma2": "gemma.gemma2_bridge.Gemma2Bridge",
    "gemma3_text": "gemma.gemma3_bridge.Gemma3ModelBridge",
    "gemma3": "gemma_vl.gemma3_vl_bridge.Gemma3VLBridge",
    "nemotron": "nemotron.nemotron_bridge.NemotronBridge",
}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")
"""Beginnings of published names of parts that are not converted."""
SIZES = SimpleNamespace(
    num_attention_heads=4, num_query_groups=2, kv_channels=8, hidden_size=32, attention_output_gate=False
)


def compare(rank: int, name: str, folder: str) -> tuple[int, list[str], list[str]]:
    """Convert a folder, and load it; return how many tensors that makes, the names of those that differ, and
    published ones that the conversion has not used."""
    there = weights(Path(folder))
    converted, used = _by_bridge(name, there)
    state = {key: torch.zeros_like(value) for key, value in converted.items()}
    holdfast.load(state, folder, job=holdfast.Job(no_dist=True))
    unlike = [key for key, value in converted.items() if not torch.equal(value, state[key])]
    unused = {key for key in there if not key.startswith(OTHER_PARTS)} - used
    return len(converted), unlike, sorted(unused)


def _by_bridge(name: str, there: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    module, _, cls = BRIDGES[name].rpartition(".")
    bridge: Any = getattr(import_module(f"megatron.bridge.models.{module}"), cls)()
    kinds = import_module("megatron.bridge.models.conversion.param_mapping")
    converted: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for mapping in bridge.mapping_registry().mappings:
        names = mapping.hf_param if isinstance(mapping.hf_param, dict) else {"": mapping.hf_param}
        for layer in range(4) if "*" in mapping.megatron_param else (0,):
            sources = {part: given.replace("*", str(layer)) for part, given in names.items()}
            if not {*sources.values()} <= there.keys() or "".join(sources.values()).startswith(OTHER_PARTS):
                continue
            found = {part: there[source] for part, source in sources.items()}
            ours = mapping.megatron_param.replace("*", str(layer))
            used |= {*sources.values()}
            if isinstance(mapping, kinds.QKVMapping):
                merge = kinds.merge_qkv_weights if found["q"].ndim > 1 else kinds.merge_qkv_biases
                converted[ours] = merge(SIZES, found["q"], found["k"], found["v"])
            elif isinstance(mapping, kinds.GatedMLPMapping):
                converted[ours] = torch.cat([found["gate"], found["up"]])
            else:
                assert type(mapping) is kinds.AutoMapping, type(mapping)
                converted[ours] = found[""]
    return converted, used
