"""Gemma 4 under the names of Megatron-Bridge's checkpoints: tensors of the layers of one type, keys that are values,
layers that share keys and values with others."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import MissingTensors
from holdfast.huggingface import export
from tests.frameworks.huggingface import gemma4_jobs as jobs
from tests.frameworks.huggingface.models import Published, publish, rewrite, weights
from tests.frameworks.huggingface.test_converters import CONVERTED
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
ALONE = holdfast.Job(no_dist=True)
LAYER = {
    "layer_scalar": (1,),
    "pre_mlp_layernorm.weight": (32,),
    "pre_shared_expert_layernorm.weight": (32,),
    "post_ffn_layernorm.weight": (32,),
    "mlp.post_moe_layernorm.weight": (32,),
    "mlp.post_shared_expert_layernorm.weight": (32,),
    "mlp.router.weight": (8, 32),
    "mlp.router.scale": (32,),
    "mlp.router.per_expert_scale": (8,),
    "mlp.shared_experts.linear_fc1.weight": (128, 32),
    "mlp.shared_experts.linear_fc2.weight": (32, 64),
    "mlp.experts.experts.linear_fc1.weight": (8, 32, 32),
    "mlp.experts.experts.linear_fc2.weight": (8, 32, 16),
}


def attention(size: int, groups: int) -> dict[str, tuple[int, ...]]:
    return {
        "linear_qkv.layer_norm_weight": (32,),
        "linear_qkv.weight": ((4 + 2 * groups) * size, 32),
        "linear_proj.weight": (32, 4 * size),
        "linear_proj.post_layernorm.weight": (32,),
        "q_layernorm.weight": (size,),
        "k_layernorm.weight": (size,),
    }


SHAPES = {
    "embedding.word_embeddings.weight": (128, 32),
    "decoder.final_layernorm.weight": (32,),
    **{f"decoder.layers.{name}": (4, *shape) for name, shape in LAYER.items()},
    **{
        f"decoder.layers.self_attention_sliding.{name}": (2, *shape)
        for name, shape in attention(8, 2).items()
    },
    **{
        f"decoder.layers.self_attention_global.{name}": (2, *shape)
        for name, shape in attention(16, 1).items()
    },
}
"""Of a checkpoint of `gemma4_text`, of which two layers are global."""
GLOBAL = "decoder.layers.self_attention_global.linear_qkv.weight"
KEYS, VALUES = slice(64, 80), slice(80, 96)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Published(CONVERTED, tmp_path_factory.mktemp("published"))


@pytest.mark.parametrize(("name", "prefix"), [("gemma4_text", ""), ("gemma4", "language_model.")])
def test_keys_that_are_values_are_loaded_twice_and_exported_once(
    name: str, prefix: str, published: dict[str, Path], tmp_path: Path
) -> None:
    """After training, too: the model has no use for the rows of values, which get no gradient."""
    folder = published[name]
    there = weights(folder)
    state = {prefix + key: torch.zeros(shape) for key, shape in SHAPES.items()}
    state |= {
        key.removeprefix("model."): torch.zeros_like(value)
        for key, value in there.items()
        if key.startswith(
            ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
        )
    }
    holdfast.load(state, folder, job=ALONE)
    layers = "model.language_model.layers" if prefix else "model.layers"
    qkv = state[prefix + GLOBAL]
    for place, layer in enumerate((1, 3)):
        assert torch.equal(qkv[place, :64], there[f"{layers}.{layer}.self_attn.q_proj.weight"])
        for rows in (KEYS, VALUES):
            assert torch.equal(qkv[place, rows], there[f"{layers}.{layer}.self_attn.k_proj.weight"])
    qkv[:, KEYS] += 1
    holdfast.save(state, tmp_path / "saved", job=ALONE)
    export(tmp_path / "saved", tmp_path / "out", like=folder)
    after = weights(tmp_path / "out")
    assert after.keys() == there.keys()
    for key, value in there.items():
        trained = key in [f"{layers}.{layer}.self_attn.k_proj.weight" for layer in (1, 3)]
        assert torch.equal(after[key], value + 1 if trained else value), key
    found = holdfast.same(tmp_path / "saved", tmp_path / "out")
    assert found.same, found
    assert not holdfast.same(tmp_path / "saved", folder).same


def test_fingerprints_under_published_names_are_those_of_the_export(
    published: dict[str, Path],
) -> None:
    folder = published["gemma4_text"]
    state = {key: torch.zeros(shape) for key, shape in SHAPES.items()}
    holdfast.load(state, folder, job=ALONE)
    state[GLOBAL][:, VALUES] = 0
    expected = holdfast.fingerprint(weights(folder), job=ALONE)
    found = holdfast.fingerprint(state, published=folder, job=ALONE)
    assert found == expected
    [unlike] = holdfast.same(holdfast.fingerprint(state, job=ALONE), folder).different
    assert unlike.name == GLOBAL


def on_the_hub(folder: Path) -> Path:
    """E2B in the form that Megatron-Bridge reads: layers that share keys and values have some, which nothing uses."""
    tiny = CONVERTED["gemma4_text per layer"]
    shared = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    publish(replace(tiny, published={**tiny.published, **shared}), folder)
    there = weights(folder)
    more = {
        name.replace(f"layers.{layer}.", f"layers.{layer + 2}."): value + 1
        for name, value in there.items()
        for layer in range(2)
        if name.startswith(f"model.layers.{layer}.self_attn.")
        and name[-13:-7] in ("k_proj", "v_proj", "k_norm")
    }
    rewrite(folder, there | more)
    return folder


def test_layers_that_share_keys_and_values_are_refused_without_any(tmp_path: Path) -> None:
    """What transformers writes of E2B and E4B lacks them."""
    whole, name = on_the_hub(tmp_path / "hub"), "decoder.layers.2.self_attention_sliding.linear_qkv.weight"
    state = {name: torch.zeros(64, 32)}
    holdfast.load(state, whole, job=ALONE)
    there = weights(whole)
    assert torch.equal(state[name][16:24], there["model.layers.2.self_attn.k_proj.weight"][:8])
    rewrite(whole, {key: value for key, value in there.items() if ".layers.2.self_attn.k_proj." not in key})
    with pytest.raises(MissingTensors, match=r"not hold 'model.layers.2.self_attn.k_proj.weight', of which"):
        holdfast.load(state, whole, job=ALONE)


def lacks_bridge() -> str:
    """Why Megatron-Bridge can't build these models here; "" if it can."""
    found = importlib.util.find_spec("megatron.bridge")
    folders = found.submodule_search_locations if found is not None else None
    if any(Path(folder, "models/gemma/gemma4_bridge.py").is_file() for folder in folders or ()):
        return ""
    return "needs a Megatron-Bridge that has Gemma 4, such as 0.6.2, which is for Python 3.12"


BRIDGE = pytest.mark.skipif(bool(lacks_bridge()), reason=lacks_bridge())


@BRIDGE
@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("gemma4_text", Layout(tp=2, pp=2, ep=2), 4),
        ("gemma4_text dense", Layout(tp=2), 2),
        ("gemma4_text per layer", Layout(tp=2), 2),
        ("on the hub", Layout(), 1),
        ("gemma4", Layout(tp=2, ep=2), 2),
        ("gemma4 dense", Layout(), 1),
    ],
)
def test_megatron_bridges_own_model_is_filled_as_by_itself_and_comes_back(
    name: str, layout: Layout, ranks: int, published: dict[str, Path], tmp_path: Path
) -> None:
    folder = on_the_hub(tmp_path / "hub") if name == "on the hub" else published[name]
    with ProcessWorld(ranks, preload="bridges") as world:
        found = world.run(jobs.convert, str(folder), layout, str(tmp_path / "saved"), timeout=200)
    for many, differ, otherwise in found:
        assert many > 40
        assert differ == []
        assert otherwise == []
    export(tmp_path / "saved", tmp_path / "out", like=folder, job=ALONE)
    before, after = weights(folder), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@BRIDGE
def test_megatron_bridges_own_model_has_no_use_for_values_that_are_keys(published: dict[str, Path]) -> None:
    """So an export may leave them out. Of a sliding layer, the rows of the last value are others."""
    folder = str(published["gemma4_text dense"])
    with ProcessWorld(1, preload="bridges") as world:
        assert world.run(jobs.used_rows, folder, 1, [KEYS, VALUES], timeout=100) == [[True, False]]
        assert world.run(jobs.used_rows, folder, 0, [slice(48, 56), slice(56, 64)], timeout=100) == [
            [True, True]
        ]
