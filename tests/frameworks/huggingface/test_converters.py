"""Types whose models megatron-core alone can't build, or not on a CPU: every tensor is that of Megatron-Bridge's
own converter, and all that is published is used."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from tests.frameworks.huggingface import converter_jobs
from tests.frameworks.huggingface.models import EXPERTS, LATENT, ROUTED, Tiny, publish
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
TIED = {"head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": True}
SANDWICH = {**TIED, "query_pre_attn_scalar": 8, "sliding_window": 16}
CONVERTED = {
    "gemma": Tiny("GemmaConfig", TIED),
    "gemma2": Tiny("Gemma2Config", SANDWICH),
    "gemma3_text": Tiny("Gemma3TextConfig", SANDWICH),
    "gemma3": Tiny("Gemma3Config", SANDWICH, text="gemma3_text"),
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


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp("published") / name for name in CONVERTED}
    for name, tiny in CONVERTED.items():
        publish(tiny, folders[name])
    return folders


@pytest.mark.parametrize("name", CONVERTED)
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


@pytest.mark.parametrize("name", CONVERTED)
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
