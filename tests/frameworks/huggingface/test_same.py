"""The year's silent wrong weights, replayed: a checkpoint in eight ranks' layout beside a published folder in which
something went wrong. `same` names the tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast._models.equality.verdict import Same
from holdfast._tools.cli import cli
from holdfast.errors import BadInput
from holdfast.huggingface import import_
from holdfast.megatron import load_plain_tensors
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, WORDS, edit_config, publish, rewrite, weights
from tests.frameworks.megatron.models import Layout
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
QKV = "decoder.layers.self_attention.linear_qkv.weight"
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessWorld]:
    with ProcessWorld(8) as world:
        yield world


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, ranks: ProcessWorld) -> tuple[Path, Path]:
    """A published model, and a checkpoint of it that eight ranks have saved, with fingerprints."""
    home = tmp_path_factory.mktemp("same")
    publish(TINY["qwen3_moe"], home / "model")
    layout = Layout(tp=2, pp=2, ep=2)
    ranks.run(
        jobs.load_and_save, "qwen3_moe", str(home / "model"), layout, str(home / "step"), True, timeout=120
    )
    return home / "model", home / "step"


def exchange(tensors: Tensors, one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


def drop_an_expert(tensors: Tensors) -> None:
    for part in ("gate", "up", "down"):
        del tensors[EXPERT.format(2, 5, part)]


def exchange_experts(tensors: Tensors) -> None:
    for part in ("gate", "up", "down"):
        exchange(tensors, EXPERT.format(1, 2, part), EXPERT.format(1, 6, part))


def exchange_gate_and_up(tensors: Tensors) -> None:
    exchange(tensors, EXPERT.format(0, 7, "gate"), EXPERT.format(0, 7, "up"))


def lose_experts(tensors: Tensors) -> None:
    """All experts of a layer are the first one."""
    for expert in range(1, 8):
        for part in ("gate", "up", "down"):
            tensors[EXPERT.format(3, expert, part)] = tensors[EXPERT.format(3, 0, part)].clone()


def exchange_halves(tensors: Tensors) -> None:
    """The experts of two expert-parallel ranks stand in each other's place."""
    for layer in range(4):
        for expert in range(4):
            for part in ("gate", "up", "down"):
                exchange(tensors, EXPERT.format(layer, expert, part), EXPERT.format(layer, expert + 4, part))


def leave_out_an_adapter(tensors: Tensors) -> None:
    """The base model without what LoRA has learnt for the queries of a layer."""
    name = "model.layers.2.self_attn.q_proj.weight"
    rows, columns = tensors[name].shape
    random = torch.Generator().manual_seed(1)
    tensors[name] += torch.randn(rows, 2, generator=random) @ torch.randn(2, columns, generator=random)


def shift_words(tensors: Tensors) -> None:
    """The vocabulary cut at the wrong end."""
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name][1:], torch.zeros(1, tensors[name].shape[1])])


def cut_words(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][: WORDS - 4].clone()


def group_heads_otherwise(tensors: Tensors) -> None:
    """Heads of queries, of which each group has two, in the order of another layout."""
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(2, 2, -1, 32).transpose(0, 1).reshape(tensors[name].shape).contiguous()


def leave_it_random(tensors: Tensors) -> None:
    for expert in range(8):
        name = EXPERT.format(1, expert, "down")
        tensors[name] = torch.rand_like(tensors[name])


INCIDENTS: dict[str, tuple[Callable[[Tensors], None], set[str]]] = {
    "an expert is dropped": (drop_an_expert, {FC1, FC2}),
    "experts are exchanged": (exchange_experts, {FC1, FC2}),
    "gate and up are exchanged": (exchange_gate_and_up, {FC1}),
    "seven of eight experts are lost": (lose_experts, {FC1, FC2}),
    "expert-parallel ranks are exchanged": (exchange_halves, {FC1, FC2}),
    "an adapter is left out": (leave_out_an_adapter, {QKV}),
    "the vocabulary is cut at the wrong end": (shift_words, {"embedding.word_embeddings.weight"}),
    "the vocabulary is cut short": (cut_words, {"embedding.word_embeddings.weight"}),
    "heads are grouped otherwise": (group_heads_otherwise, {QKV}),
    "experts stay random": (leave_it_random, {FC2}),
}


def names(found: Same) -> set[str]:
    return {one.name for one in found.different} | set(found.only_a) | set(found.only_b)


def test_a_checkpoint_is_its_published_model(model: tuple[Path, Path]) -> None:
    folder, step = model
    found = holdfast.same(step, folder)
    assert found.same, found
    assert holdfast.same(folder, step).equal == found.equal
    # What the checkpoint has is told by its fingerprints; only the folder is read, padding apart.
    size = sum(tensor.nbytes for tensor in weights(folder).values())
    words = WORDS * 32 * 4
    assert found.bytes_read == size + 2 * words, "both sides of embedding and output, one of the rest"


@pytest.mark.parametrize("what", INCIDENTS)
def test_what_went_wrong_is_named(what: str, model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    spoil, expected = INCIDENTS[what]
    tensors = weights(folder)
    spoil(tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    rewrite(tmp_path, tensors)
    assert names(holdfast.same(step, tmp_path)) == expected
    assert names(holdfast.same(tmp_path, step, where=True)) == expected


def test_which_experts_were_exchanged_is_told(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    tensors = weights(folder)
    exchange_experts(tensors)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    rewrite(tmp_path, tensors)
    for one in holdfast.same(step, tmp_path, where=True).different:
        assert one.first is not None
        assert one.first[:2] == (1, 2)


def test_what_the_checkpoint_lacks_is_named(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    tensors = load_plain_tensors(step)
    del tensors["decoder.final_layernorm.weight"]
    holdfast.save(tensors, tmp_path / "less", job=holdfast.Job(no_dist=True))
    assert names(holdfast.same(tmp_path / "less", folder)) == {"model.norm.weight"}
    # What is left out of the comparison is left out on both sides.
    assert holdfast.same(step, folder, exclude=["decoder.final_layernorm"]).same
    assert holdfast.same(step, folder, include=["decoder.layers"]).same
    with pytest.raises(BadInput, match="Neither place has a weight"):
        holdfast.same(step, folder, include=["decoder.layers"], exclude=["decoder", "model"])


def test_an_output_that_is_not_the_embedding_is_named(tmp_path: Path) -> None:
    """Of a model whose configuration says that it is."""
    publish(TINY["qwen3 tied"], tmp_path / "a")
    tensors = weights(tmp_path / "a")
    for kind, output in (
        ("tied", tensors["model.embed_tokens.weight"].clone()),
        ("broken", torch.rand(WORDS, 32)),
    ):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
        rewrite(tmp_path / kind, {**tensors, "lm_head.weight": output})
    assert holdfast.same(tmp_path / "a", tmp_path / "tied").same
    assert names(holdfast.same(tmp_path / "a", tmp_path / "broken")) == {"lm_head.weight"}


def quantised(folder: Path, bits: int, scale: float) -> Path:
    """A folder of one matrix with scales."""
    folder.mkdir()
    random = torch.Generator().manual_seed(bits)
    if bits == 8:
        tensors = {
            "model.layers.0.self_attn.q_proj.weight": torch.randn(16, 16, generator=random).to(
                torch.float8_e4m3fn
            ),
            "model.layers.0.self_attn.q_proj.weight_scale_inv": torch.full((1, 1), scale),
        }
        config = {"model_type": "llama"}
    else:
        blocks = torch.randint(0, 255, (2, 8, 1, 16), dtype=torch.uint8, generator=random)
        name = "model.layers.0.mlp.experts.down_proj"
        scales = torch.full((2, 8, 1), int(127 * scale), dtype=torch.uint8)
        tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        config = {"model_type": "gpt_oss"}
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, tensors)
    return folder


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_of_the_same_elements_are_compared(bits: int, tmp_path: Path) -> None:
    a, b = quantised(tmp_path / "a", bits, 1.0), quantised(tmp_path / "b", bits, 0.5)
    noted = holdfast.Options(fingerprint=True)
    for folder in (a, b):
        import_(folder, tmp_path / f"{folder.name} noted", job=holdfast.Job(no_dist=True, options=noted))
        import_(folder, tmp_path / f"{folder.name} plain", job=holdfast.Job(no_dist=True))
    for other in ("a", "a noted", "a plain"):
        assert holdfast.same(a, tmp_path / other).same
        assert holdfast.same(tmp_path / "a noted", tmp_path / other).same
    for other in ("b", "b noted", "b plain"):
        assert not holdfast.same(a, tmp_path / other).same
        assert not holdfast.same(tmp_path / "a noted", tmp_path / other).same


def test_parts_of_several_dtypes_are_each_compared_in_theirs(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(2)
    down = torch.randn(2, 8, 16, generator=random)
    down[0] = down[0].bfloat16().float()
    name = "model.layers.{}.mlp.down_proj.weight"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    rewrite(tmp_path / "a", {name.format(0): down[0].bfloat16(), name.format(1): down[1]})
    holdfast.save(
        {"decoder.layers.mlp.linear_fc2.weight": down}, tmp_path / "b", job=holdfast.Job(no_dist=True)
    )
    assert holdfast.same(tmp_path / "a", tmp_path / "b").same
    # A live state in the less exact of them: what its cast lost in the other part is seen.
    live = holdfast.fingerprint(
        {"decoder.layers.mlp.linear_fc2.weight": down.bfloat16()}, job=holdfast.Job(no_dist=True)
    )
    assert holdfast.same(live, tmp_path / "a").same
    rewrite(
        tmp_path / "a",
        {name.format(0): down[0].bfloat16(), name.format(1): down[1].where(down[1] < 1, 3.4e38)},
    )
    large = torch.stack([down[0], down[1].where(down[1] < 1, 3.4e38)]).bfloat16()
    live = holdfast.fingerprint(
        {"decoder.layers.mlp.linear_fc2.weight": large}, job=holdfast.Job(no_dist=True)
    )
    (one,) = holdfast.same(live, tmp_path / "a").different
    assert "become infinite" in one.a
    rewrite(tmp_path / "a", {name.format(0): down[0].bfloat16(), name.format(1): down[1]})
    down[1, 3, 3] *= 1.0001
    holdfast.save(
        {"decoder.layers.mlp.linear_fc2.weight": down}, tmp_path / "c", job=holdfast.Job(no_dist=True)
    )
    assert names(holdfast.same(tmp_path / "a", tmp_path / "c")) == {"decoder.layers.mlp.linear_fc2.weight"}


def test_a_model_that_no_table_knows_is_not_called_different(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    shutil.copytree(folder, tmp_path / "unknown")
    edit_config(tmp_path / "unknown", model_type="new_moe")
    for one, other in ((step, tmp_path / "unknown"), (tmp_path / "unknown", step)):
        with pytest.raises(BadInput, match=r"can't be told: no table knows its model_type 'new_moe'"):
            holdfast.same(one, other)
    # Under its own names it needs no table.
    holdfast.save(dict(weights(folder)), tmp_path / "own", job=holdfast.Job(no_dist=True))
    assert holdfast.same(tmp_path / "own", tmp_path / "unknown").same
    assert holdfast.same(folder, tmp_path / "unknown").same


def test_quantized_weights_that_are_not_read_are_not_called_different(tmp_path: Path) -> None:
    weight = "model.layers.0.self_attn.o_proj.weight"
    tensors = {weight: torch.ones(16, 16), "model.norm.weight": torch.ones(16)}
    packed = {weight.replace("weight", "qweight"): torch.ones(2, 16, dtype=torch.int32)}
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4)
    config = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 16, **sizes}
    for kind, some in (("plain", tensors), ("gptq", {"model.norm.weight": torch.ones(16), **packed})):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        rewrite(tmp_path / kind, some)
    edit_config(tmp_path / "gptq", quantization_config={"quant_method": "gptq"})
    fused = {"decoder.layers.0.self_attention.linear_proj.weight": torch.ones(16, 16)}
    for kind, some in (("step", tensors), ("fused", fused)):
        holdfast.save(some, tmp_path / kind, job=holdfast.Job(no_dist=True))
    for one in ("plain", "step", "fused"):
        for pair in ((one, "gptq"), ("gptq", one)):
            with pytest.raises(BadInput, match="qweight' quantized by gptq, which Holdfast does not read"):
                holdfast.same(*(tmp_path / each for each in pair))
    left = holdfast.same(tmp_path / "step", tmp_path / "gptq", include=["model.norm"])
    assert (left.same, left.equal) == (True, 1)


def test_patterns_of_published_names_do_not_leave_out_what_they_name(tmp_path: Path) -> None:
    """The names that are compared are those of the checkpoint, where these are others."""
    tensors = {
        "model.layers.0.self_attn.o_proj.weight": torch.ones(16, 16),
        "model.norm.weight": torch.ones(16),
    }
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4)
    config = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 8, "hidden_size": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rewrite(tmp_path, tensors)
    linear, norm = "decoder.layers.0.self_attention.linear_proj.weight", "decoder.final_layernorm.weight"
    state = {linear: torch.zeros(16, 16), norm: torch.ones(16)}
    holdfast.save(state, tmp_path / "step", job=holdfast.Job(no_dist=True))
    for patterns in (["model.layers"], ["model.layers", norm]):
        for pair in ((tmp_path, tmp_path / "step"), (tmp_path / "step", tmp_path)):
            with pytest.raises(
                BadInput, match=rf"o_proj.weight' of .* is compared as '{linear}' of .*step, which"
            ):
                holdfast.same(*pair, include=patterns)
    assert names(holdfast.same(tmp_path / "step", tmp_path, include=["decoder.layers"])) == {linear}
    assert holdfast.same(tmp_path / "step", tmp_path, exclude=["decoder.layers"]).equal == 1
    with pytest.raises(BadInput, match="Neither place has a weight"):
        holdfast.same(tmp_path / "step", tmp_path, exclude=["decoder"])


def test_a_broken_tie_is_named(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    tensors = weights(folder)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    rewrite(tmp_path, {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    edit_config(tmp_path, tie_word_embeddings=True)
    assert names(holdfast.same(step, tmp_path)) == {"output_layer.weight"}


def test_forgotten_scales_are_named(tmp_path: Path) -> None:
    publish(TINY["qwen3_moe"], tmp_path / "exact")
    tensors = weights(tmp_path / "exact")
    eight: Tensors = {}
    for name, value in tensors.items():
        if ".experts." in name:
            scale = value.abs().amax().reshape(1, 1) / 448
            eight |= {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
            tensors[name] = eight[name].float() * scale
        else:
            eight[name] = value
    rewrite(tmp_path / "exact", tensors)
    for kind in ("scaled", "forgotten"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_bytes((tmp_path / "exact" / "config.json").read_bytes())
        rewrite(tmp_path / kind, eight)
        eight |= {
            name: torch.ones_like(value) for name, value in eight.items() if name.endswith("_scale_inv")
        }
    assert holdfast.same(tmp_path / "exact", tmp_path / "scaled").same
    wrong = names(holdfast.same(tmp_path / "forgotten", tmp_path / "exact"))
    assert wrong == {name for name in tensors if ".experts." in name}


def test_steps_that_did_not_train_are_seen_without_reading(tmp_path: Path) -> None:
    checkpoints = holdfast.Checkpoints(
        tmp_path, job=holdfast.Job(options=holdfast.Options(fingerprint=True), no_dist=True)
    )
    model = torch.nn.Linear(8, 8)
    for step in range(3):
        if step == 2:
            with torch.no_grad():
                model.bias[3] += 1e-6
        checkpoints.save(step, {"model": model})
    checkpoints.close()
    steps = [tmp_path / f"step-{step:08d}" for step in range(3)]
    found = holdfast.same(steps[0], steps[1])
    assert found.same
    assert found.bytes_read == 0
    assert names(holdfast.same(steps[1], steps[2])) == {"model.bias"}


def test_a_model_on_its_ranks_is_the_published_one(model: tuple[Path, Path], ranks: ProcessWorld) -> None:
    """Fingerprints of eight ranks, added up without a gather, beside the folder, and a checkpoint."""
    folder, step = model
    layout = Layout(pp=2, ep=4)
    told = ranks.run(jobs.fingerprints, "qwen3_moe", str(folder), layout, timeout=120)
    assert all(one == told[0] for one in told)
    assert holdfast.same(told[0], folder).same
    found = holdfast.same(told[0], step)
    assert found.same
    assert found.bytes_read == 0


def test_a_float32_model_on_its_ranks_and_its_export_in_bfloat16(
    model: tuple[Path, Path], ranks: ProcessWorld, tmp_path: Path
) -> None:
    """Rounded on each rank, before the sums; of experts under the trainer's names beside the published ones."""
    folder, step = model
    out = tmp_path / "export"
    said = CliRunner().invoke(
        cli, ["export", "hf", str(step), str(out), "--like", str(folder), "--dtype", "bfloat16"]
    )
    assert said.exit_code == 0, said.output
    told = ranks.run(jobs.fingerprints, "qwen3_moe", str(folder), Layout(tp=2, pp=2, ep=2), timeout=120)
    for found in (holdfast.same(told[0], out), holdfast.same(step, out)):
        assert found.same, found
        assert set(found.converted.values()) == {"bfloat16"}
        assert found.rounded.keys() >= {FC1, FC2, QKV}
    tensors = weights(out)
    name = EXPERT.format(3, 7, "down")
    tensors[name].view(torch.int16)[-1, -1] ^= 1
    rewrite(out, tensors)
    assert names(holdfast.same(told[0], out)) == {FC2}


@pytest.mark.parametrize("stale", [1, 6])
def test_one_stale_copy_of_a_data_parallel_rank_is_told(
    stale: int, model: tuple[Path, Path], ranks: ProcessWorld
) -> None:
    how = "qwen3_moe", str(model[0]), Layout(pp=2, ep=4), stale
    for said in ranks.run(jobs.fingerprints_with_a_stale_copy, *how, timeout=120):
        assert said.startswith("ReplicaMismatch: Ranks "), said
        assert f" and {stale} hold different elements of " in said or f"Ranks {stale} and " in said
        assert "self_attention.linear_proj" in said
