"""Published models through megatron-core's names, in any layout, and back: against transformers' own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from holdfast.huggingface import export, families, mapping_of
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, Published, rewrite, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld
from tests.support.wide import wide

pytest.importorskip("transformers")
LAYOUTS = [
    ("qwen3_moe", Layout(pp=2, vpp=2, ep=4)),
    ("deepseek_v3", Layout(tp=2, pp=2, ep=2)),
    *wide(
        (
            ("qwen3 tied", Layout(tp=2, pp=2)),
            ("qwen3_next", Layout(tp=2, pp=2, ep=2)),
            ("qwen3_moe", Layout(tp=2, pp=2, ep=2)),
            ("glm4_moe", Layout(tp=2, ep=4, etp=1)),
            ("starcoder2", Layout(tp=2, pp=2)),
            ("minimax_m2", Layout(pp=2, ep=4)),
            ("qwen3_5_moe_text", Layout(tp=2, pp=2, ep=2)),
        )
    ),
]
IN_SUITE = (
    "llama",
    "qwen3 tied",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "llama4_text",
    "qwen3_vl",
)
"""One of each kind of table: dense, tied, experts, a dense layer first, latent attention, linear attention, experts in one tensor,
and inside a multimodal model."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Published(TINY, tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def alone() -> ProcessWorld:
    with ProcessWorld(1) as world:
        yield world


CONTAINERS = [name for name, tiny in TINY.items() if tiny.text]


@pytest.mark.parametrize("name", wide(TINY, suite=IN_SUITE))
def test_logits_are_those_of_transformers(
    name: str, published: dict[str, Path], alone: ProcessWorld, tmp_path: Path
) -> None:
    """And what megatron-core's model holds then goes back as it was published."""
    saved, out = tmp_path / "saved", tmp_path / "out"
    difference, largest = alone.run(jobs.logits, name, str(published[name]), str(saved), timeout=120)[0]
    assert largest > 1
    assert difference < TINY[name].rounding * largest
    contains = bool(TINY[name].text)  # a language model, and other parts, which megatron-core's has not
    report = export(saved, out, like=published[name], strict=not contains)
    before, after = weights(published[name]), weights(out)
    left = before.keys() - after.keys()
    assert {*report.missing} == left
    assert all(
        any(part in key for part in ("visual", "vision", "projector", "audio", "image_", "video_"))
        and contains
        for key in left
    )
    assert [key for key, value in after.items() if not torch.equal(value, before[key])] == []


@pytest.mark.parametrize("name", wide(CONTAINERS, suite=CONTAINERS[::2]))
def test_a_model_that_contains_a_language_model_comes_back_whole(
    name: str, published: dict[str, Path], tmp_path: Path
) -> None:
    """By transformers' own names, some of which differ from the published ones."""
    module = TINY[name].auto.from_pretrained(published[name])
    holdfast.save(module.state_dict(), tmp_path / "saved", job=holdfast.Job(no_dist=True))
    export(tmp_path / "saved", tmp_path / "out", like=published[name])
    before, after = weights(published[name]), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_every_layout_has_the_published_bits(
    name: str, layout: Layout, published: dict[str, Path], mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    """From the folder into eight ranks, into a checkpoint, and out again: as it was, and transformers loads
    it."""
    from transformers import AutoModelForCausalLM

    folder = published[name]
    mcore_world.run(jobs.load_and_save, name, str(folder), layout, str(tmp_path / "step"), timeout=120)
    report = export(tmp_path / "step", tmp_path / "out", like=folder, file_bytes=60_000)
    before, after = weights(folder), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert report.tensors == len(before)
    assert report.files > 1
    again, missing = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(missing.values())
    assert again.config.model_type == AutoModelForCausalLM.from_pretrained(folder).config.model_type


@pytest.mark.wide
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_was_trained_on_is_exported_and_transformers_agrees(
    name: str, published: dict[str, Path], alone: ProcessWorld, mcore_world: ProcessWorld, tmp_path: Path
) -> None:
    """From the folder through steps of training in eight ranks to a folder again."""
    layout, out = Layout(tp=2, pp=2, vpp=2, ep=2), tmp_path / "out"
    told = mcore_world.run(
        jobs.train_and_export,
        name,
        str(published[name]),
        layout,
        str(tmp_path / "run"),
        str(out),
        timeout=180,
    )
    size = sum(value.nbytes for value in weights(out).values())
    assert sum(exported for _, exported in told) == size  # each file by one rank
    assert holdfast.same(tmp_path / "run", out).same
    trained = {one.name for one in holdfast.same(out, published[name]).different}
    assert len(trained) > len(weights(out)) / 2
    difference, largest = alone.run(jobs.logits, name, str(out), timeout=120)[0]
    assert difference < 1e-5 * largest


@pytest.mark.parametrize("name", wide(TINY, suite=IN_SUITE))
def test_transformers_own_modules_are_filled(name: str, published: dict[str, Path]) -> None:
    """Experts that transformers keeps in one tensor, and an output that is the embedding."""
    stock = TINY[name].auto.from_pretrained(published[name])
    ours = TINY[name].auto.from_config(TINY[name].configuration()).float()
    holdfast.load(ours.state_dict(), published[name])
    for key, value in stock.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key


def test_a_language_model_inside_of_another_is_read(published: dict[str, Path], tmp_path: Path) -> None:
    """As the hub has Qwen 3.5: further names before its own, experts of a layer in one tensor."""
    import holdfast

    name, layer = "qwen3_5_moe_text", "model.language_model.layers.2.mlp.experts."
    alone = weights(published[name])
    inside = {key.replace("model.", "model.language_model.", 1): value for key, value in alone.items()}
    parts = {
        part: torch.stack([inside[f"{layer}{expert}.{part}_proj.weight"] for expert in range(8)])
        for part in ("gate", "up", "down")
    }
    kept = {key: value for key, value in inside.items() if not key.startswith(layer)}
    kept[f"{layer}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
    kept[f"{layer}down_proj"] = parts["down"]
    rewrite(tmp_path, kept)
    text = json.loads((published[name] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    prefix = "decoder.layers.2."
    shapes = {
        f"{prefix}mlp.experts.experts.3.linear_fc1.weight": (32, 32),
        f"{prefix}mlp.experts.experts.linear_fc2.weight": (8, 32, 16),
        f"{prefix}self_attention.in_proj.weight.key": (16, 32),
        f"{prefix}self_attention.conv1d.weight.value": (64, 1, 4),
        f"{prefix}self_attention.out_norm.weight": (16,),
        "embedding.word_embeddings.weight": (104, 32),
        "output_layer.weight": (104, 32),
    }
    loaded = [{key: torch.zeros(shape) for key, shape in shapes.items()} for _ in range(2)]
    for state, folder in zip(loaded, (published[name], tmp_path), strict=True):
        holdfast.load(state, folder)
    assert all(torch.equal(value, loaded[1][key]) and value.any() for key, value in loaded[0].items())


@pytest.mark.parametrize(("outer", "inner"), [(True, None), (True, True), (False, True), (None, True)])
def test_the_tied_output_of_a_multimodal_model_is_read(
    outer: bool | None, inner: bool | None, tmp_path: Path
) -> None:
    """Qwen 3.5 says so of the multimodal model, of the one inside, or of both."""
    import transformers

    import holdfast

    config = transformers.Qwen3_5Config(
        text_config=TINY["qwen3_5_text"].configuration(tie_word_embeddings=True).to_dict(),
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
        tie_word_embeddings=True,
    )
    transformers.Qwen3_5ForConditionalGeneration(config).float().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for where, tied in ((said, outer), (said["text_config"], inner)):
        where.pop("tie_word_embeddings", None)
        where |= {} if tied is None else {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(said))
    auto = transformers.AutoModelForImageTextToText if outer else transformers.AutoModelForCausalLM
    stock = auto.from_pretrained(tmp_path)
    assert stock.lm_head.weight is stock.get_input_embeddings().weight
    for name in ("lm_head.weight", "output_layer.weight"):
        state = {name: torch.zeros_like(stock.lm_head.weight)}
        holdfast.load(state, tmp_path, job=holdfast.Job(no_dist=True))
        assert torch.equal(state[name], stock.lm_head.weight)


def test_what_a_tensor_is_made_of_is_explained() -> None:
    said = mapping_of("qwen3_moe", "decoder.layers.0.mlp.experts.experts.5.linear_fc1.weight")
    assert (
        "model.layers.0.mlp.experts.5.gate_proj.weight, model.layers.0.mlp.experts.5.up_proj.weight" in said
    )
    assert "one below the other" in said
    assert "if the model has no such tensor" in mapping_of("qwen3", "output_layer.weight")
    assert mapping_of("mixtral", "decoder.layers.mlp.router.weight").endswith(
        "is model.layers.{layer}.block_sparse_moe.gate.weight"
    )


def test_what_no_table_has_is_told_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"no table for the model type 'qwen3_mo'. The nearest .* 'qwen3_moe'"):
        mapping_of("qwen3_mo", "output_layer.weight")
    with pytest.raises(
        BadInput, match=r"has no 'output_layer.weights'. The nearest of its names is 'output_layer.weight'"
    ):
        mapping_of("qwen3", "output_layer.weights")
    for name, near in (
        ("decoder.layers.3.mlp.router.weigt", "decoder.layers.3.mlp.router.weight"),
        ("decoder.layers.mlp.router.weigt", "decoder.layers.mlp.router.weight"),
        (
            "decoder.layers.3.mlp.experts.experts.5.linear_fc1",
            "decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight",
        ),
    ):
        with pytest.raises(BadInput, match=f"nearest of its names is '{re.escape(near)}'"):
            mapping_of("qwen3_moe", name)
        assert near in mapping_of("qwen3_moe", near)
    assert len(families()) >= 12
    said = mapping_of("qwen3_5_moe_text", "decoder.layers.mlp.experts.experts.linear_fc2.weight")
    assert "(or model.layers.{layer}.mlp.experts.down_proj, if the model has no such tensor)" in said
    assert said.endswith("of_experts: One expert's part of all experts' in one tensor.")


def test_experts_of_gpt_oss_are_turned_and_unmixed(tmp_path: Path) -> None:
    """megatron-core computes x @ W.T + b with gate above up; transformers x @ W + b with the two taking
    turns."""
    import transformers

    import holdfast

    config = transformers.GptOssConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=100,
        num_local_experts=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path)
    name = "decoder.layers.mlp.experts.experts.linear_fc"
    shapes = {
        f"{name}1.weight": (2, 4, 32, 32),
        f"{name}1.bias": (2, 4, 32),
        f"{name}2.weight": (2, 4, 32, 16),
        f"{name}2.bias": (2, 4, 32),
        "decoder.layers.self_attention.core_attention.softmax_offset": (2, 4),
        "decoder.layers.mlp.router.bias": (2, 4),
    }
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    holdfast.load(state, tmp_path)
    inputs = torch.randn(5, 32)
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for expert in range(4):
            both = inputs @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
            ours = (
                inputs @ state[f"{name}1.weight"][number, expert].T + state[f"{name}1.bias"][number, expert]
            )
            assert torch.allclose(ours[:, :16], both[:, ::2], atol=1e-4)
            assert torch.allclose(ours[:, 16:], both[:, 1::2], atol=1e-4)
            assert torch.equal(state[f"{name}2.weight"][number, expert], experts.down_proj[expert].T)
            assert torch.equal(state[f"{name}2.bias"][number, expert], experts.down_proj_bias[expert])
        assert torch.equal(
            state["decoder.layers.self_attention.core_attention.softmax_offset"][number],
            layer.self_attn.sinks,
        )
    part = holdfast.Shard(torch.zeros(1, 2, 7, 9), (2, 4, 32, 32), (1, 1, 12, 20))  # gate and up
    holdfast.load({f"{name}1.weight": part}, tmp_path)
    assert torch.equal(part.tensor, state[f"{name}1.weight"][1:2, 1:3, 12:19, 20:29])
