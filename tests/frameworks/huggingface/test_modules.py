"""Types of which no form of megatron-core's is known: transformers' own modules are filled, and exported as published."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.errors import BadInput, MissingTensors
from holdfast.huggingface import export
from tests.frameworks.huggingface.models import (
    EXPERTS,
    TINY,
    Published,
    Tiny,
    rewrite,
    weights,
)

pytest.importorskip("transformers")
MIXED = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
SPARSE = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16}
FILLED = {
    "phimoe": Tiny("PhimoeConfig", {"head_dim": 8, **MIXED}),
    "minimax": Tiny("MiniMaxConfig", {"head_dim": 8, "block_size": 8, **MIXED}),
    "lfm2_moe": Tiny(
        "Lfm2MoeConfig",
        {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2, "num_experts": 8, **EXPERTS},
    ),
    "jamba": Tiny(
        "JambaConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "afmoe": Tiny(
        "AfmoeConfig",
        {
            "head_dim": 8,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "moe_intermediate_size": 16,
            **SPARSE,
        },
    ),
    "flex_olmo": Tiny("FlexOlmoConfig", {"pad_token_id": 0, **SPARSE}),
    "cohere2_moe": Tiny("Cohere2MoeConfig", {"head_dim": 8, **SPARSE}),
    "laguna": Tiny(
        "LagunaConfig",
        {
            "head_dim": 8,
            "num_experts": 8,
            "shared_expert_intermediate_size": 16,
            "rope_parameters": None,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_attention_heads_per_layer": [4] * 4,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            **EXPERTS,
        },
    ),
}
UNHEARD_OF = {
    "olmo3": Tiny("Olmo3Config", {"tie_word_embeddings": True}),
    "granitemoehybrid": Tiny(
        "GraniteMoeHybridConfig",
        {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 16,
            **MIXED,
        },
    ),
    # The output is tied to an embedding of another name.
    "gpt2": Tiny("GPT2Config", {"tie_word_embeddings": True}),
    "falcon": Tiny("FalconConfig", {"tie_word_embeddings": True}),
    "opt": Tiny("OPTConfig", {"word_embed_proj_dim": 32, "ffn_dim": 64, "tie_word_embeddings": True}),
    "mamba": Tiny("MambaConfig", {"tie_word_embeddings": True}),
}
"""Types without a table, of which transformers' names are the published ones."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Published(FILLED | UNHEARD_OF, tmp_path_factory.mktemp("published"))


def fill(tiny: Tiny, folder: Path) -> dict[str, torch.Tensor]:
    """The state of transformers' module, as `holdfast.load` fills it; it is that of `from_pretrained`."""
    ours = tiny.auto.from_config(tiny.configuration()).float().state_dict()
    holdfast.load(ours, folder, job=holdfast.Job(no_dist=True))
    stock = tiny.auto.from_pretrained(folder).state_dict()
    assert [key for key, value in stock.items() if not torch.equal(value, ours[key])] == []
    return ours


@pytest.mark.parametrize("name", FILLED | UNHEARD_OF)
def test_modules_are_filled_and_exported_as_published(
    name: str, published: dict[str, Path], tmp_path: Path
) -> None:
    state = fill((FILLED | UNHEARD_OF)[name], published[name])
    holdfast.save(state, tmp_path / "saved", job=holdfast.Job(no_dist=True))
    export(tmp_path / "saved", tmp_path / "out", like=published[name])
    before, after = weights(published[name]), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_a_weight_of_several_names_is_filled_by_the_one_that_is_published(name: str, tmp_path: Path) -> None:
    import transformers

    kind = getattr(transformers, name)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = kind.config_class(**sizes, intermediate_size=32, d_kv=8, d_ff=32, tie_word_embeddings=True)
    model, other = kind(config), kind(config)
    model.save_pretrained(tmp_path / "published")
    published, alone = tmp_path / "published", holdfast.Job(no_dist=True)
    assert weights(published).keys() < other.state_dict().keys()
    holdfast.load(other.state_dict(), published, job=alone)
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    # Nothing fills the other names in a state that has a tensor for each.
    for copy in (lambda value: value.clone(), lambda value: value.to("meta")):
        apart = {key: copy(value) for key, value in other.state_dict().items()}
        with pytest.raises((BadInput, MissingTensors), match=r"no table"):
            holdfast.load(apart, published, job=alone)


def test_without_a_table_an_embedding_of_an_unknown_name_is_not_called_a_missing_file(tmp_path: Path) -> None:
    config = {"model_type": "unheard_of", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"shared.weight": torch.ones(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(
        MissingTensors, match=r"'lm_head.weight' is made. Holdfast has no table .*docs/model.md"
    ):
        holdfast.load({"lm_head.weight": torch.zeros(8, 4)}, tmp_path, job=holdfast.Job(no_dist=True))


def test_without_a_table_other_names_than_the_published_are_refused(
    published: dict[str, Path], tmp_path: Path
) -> None:
    state = {"decoder.final_layernorm.weight": torch.ones(32)}
    holdfast.save(state, tmp_path / "saved", job=holdfast.Job(no_dist=True))
    with pytest.raises(BadInput, match=r"no table for the model type 'olmo3'.*docs/model.md"):
        export(tmp_path / "saved", tmp_path / "out", like=published["olmo3"], strict=False)


def test_experts_of_qwen3_vl_are_read_in_both_layouts(tmp_path: Path) -> None:
    """transformers 5 writes them as its module has them; the hub has them with inputs along rows."""
    sizes = {**TINY["qwen3_vl_moe"].published, "moe_intermediate_size": 24}
    tiny = replace(TINY["qwen3_vl_moe"], published=sizes)
    written = Published({"tiny": tiny}, tmp_path)["tiny"]
    stock = weights(written)
    ours = fill(tiny, written)
    hub = {key: value.mT if ".mlp.experts." in key else value for key, value in stock.items()}
    rewrite(written, hub)
    again = fill(tiny, written)
    assert [key for key, value in ours.items() if not torch.equal(value, again[key])] == []
    layer = "decoder.layers.1.mlp.experts.experts"
    mcore = {
        f"{layer}.3.linear_fc1.weight": torch.zeros(48, 32),
        f"{layer}.linear_fc2.weight": torch.zeros(8, 32, 24),
    }
    holdfast.load(mcore, written, job=holdfast.Job(no_dist=True))
    module = "model.language_model.layers.1.mlp.experts"
    assert torch.equal(mcore[f"{layer}.linear_fc2.weight"], ours[f"{module}.down_proj"])
    holdfast.save(ours, tmp_path / "saved", job=holdfast.Job(no_dist=True))
    export(tmp_path / "saved", tmp_path / "out", like=written)
    exported = weights(tmp_path / "out")
    assert exported.keys() == hub.keys()
    assert [key for key, value in hub.items() if not torch.equal(value, exported[key])] == []


def test_the_thinker_of_qwen3_omni_is_found_in_the_whole_model(tmp_path: Path) -> None:
    name = "qwen3_omni_moe_thinker"
    folder = Published(TINY, tmp_path)[name]
    state = {
        "decoder.layers.2.self_attention.linear_qkv.weight": torch.zeros(64, 32),
        "output_layer.weight": torch.zeros(104, 32),
    }
    alone = {key: value.clone() for key, value in state.items()}
    holdfast.load(alone, folder, job=holdfast.Job(no_dist=True))
    thinker = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker})
    )
    parts = {f"thinker.{key}": value for key, value in weights(folder).items()}
    rewrite(folder, {**parts, "talker.model.norm.weight": torch.ones(4)})
    whole = {f"thinker.language_model.{key}": value for key, value in state.items()}
    holdfast.load(whole, folder, job=holdfast.Job(no_dist=True))
    assert all(
        torch.equal(whole[f"thinker.language_model.{key}"], value) and value.any()
        for key, value in alone.items()
    )
    by_transformers = {"thinker.model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 32, 32)}
    holdfast.load(by_transformers, folder, job=holdfast.Job(no_dist=True))
    expected = torch.cat(
        [parts[f"thinker.model.layers.0.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up")]
    )
    assert torch.equal(by_transformers["thinker.model.layers.0.mlp.experts.gate_up_proj"][3], expected)
