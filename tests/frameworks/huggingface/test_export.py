"""Checkpoints as folders that transformers loads: what must not be left out, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
import tests.frameworks.megatron.preload  # noqa: F401 (imports megatron-core without its warnings)
from holdfast._core.io.index_file import open_index
from holdfast._core.protocol.call import begin_call
from holdfast._core.store.local import open_store
from holdfast._models.huggingface.export import run_export
from holdfast._tools.cli import cli
from holdfast.errors import BadInput, CoverageError, HoldfastError, MissingTensors
from holdfast.huggingface import export
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights
from tests.frameworks.huggingface.test_quantizing import check as check_quantized
from tests.support.object_servers import BUCKET, moto, s3_environment
from tests.support.processes import ProcessWorld, Result
from tests.support.threads import on_ranks

pytest.importorskip("transformers")
FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A published model, and a checkpoint of it."""
    home = tmp_path_factory.mktemp("export")
    publish(TINY["qwen3_moe"], home / "model")
    (home / "model" / "tokenizer.json").write_text('{"words": []}')
    with ProcessWorld(1) as world:
        world.run(jobs.save_some, "qwen3_moe", str(home / "model"), str(home / "step"), timeout=120)
    return home / "model", home / "step"


def tensors_of(step: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds."""
    from holdfast.megatron import load_plain_tensors

    return load_plain_tensors(step)


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    holdfast.save(tensors, folder)
    return folder


SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, Any]], type[HoldfastError], str]] = {
    "experts are missing": (
        lambda tensors: {**tensors, FC1: tensors[FC1][:, :7].contiguous()},
        HoldfastError,
        "has 7 experts, and the published model 8",
    ),
    "a layer is missing": (
        lambda tensors: {
            name: value[:3].contiguous() if "layers" in name else value for name, value in tensors.items()
        },
        HoldfastError,
        "has 3 layers, and the published model 4",
    ),
    "an adapter is not merged": (
        lambda tensors: {
            **tensors,
            "decoder.layers.mlp.experts.experts.linear_fc1.adapter.a.weight": torch.ones(2),
        },
        BadInput,
        "An adapter must be merged",
    ),
    "the output is missing": (
        lambda tensors: {name: value for name, value in tensors.items() if name != "output_layer.weight"},
        MissingTensors,
        "has nothing for 1 tensor .*'lm_head.weight'",
    ),
    "half of the experts": (
        lambda tensors: {**tensors, FC1: tensors[FC1][:, :, :16].contiguous()},
        BadInput,
        r"has shape \[16, 32\] in .*, and the checkpoint's weights make \[8, 32\]",
    ),
    "too few words": (
        lambda tensors: {**tensors, "output_layer.weight": tensors["output_layer.weight"][:96].contiguous()},
        BadInput,
        "has 100 rows, and the model has only 96",
    ),
}


@pytest.mark.parametrize("what", SPOILED)
def test_weights_that_are_not_all_there_are_not_exported(
    what: str, model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    spoil, kind, words = SPOILED[what]
    other = saved(spoil(tensors_of(step)), tmp_path / "step")
    with pytest.raises(kind, match=words):
        export(other, tmp_path / "out", like=folder)
    assert not list(tmp_path.glob("out/*"))


def test_of_a_step_on_objects_that_names_data_of_removed_ones(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    tensors = tensors_of(model[1])
    norm = "decoder.final_layernorm.weight"
    alone = holdfast.Job(no_dist=True, options=holdfast.Options(link_unchanged=True))
    with moto() as port:
        for name, value in s3_environment(port).items():
            monkeypatch.setenv(name, value)
        run = f"s3://{BUCKET}/run"
        with holdfast.Checkpoints(run, keep=1, asynchronous=False, job=alone) as checkpoints:
            for step in (2, 1, 0):  # the last one is the published model
                checkpoints.save(3 - step, {**tensors, norm: tensors[norm] + step})
            last = f"{run}/step-00000003"
            assert open_store(run).stat("step-00000001/index.safetensors") is None
            with open_index(open_store(last)) as index:
                assert any(name.startswith("../step-00000001/") for name in index.file_names())
            export(last, tmp_path / "out", like=model[0])
            assert holdfast.same(tmp_path / "out", model[0])
            assert holdfast.same(last, model[0])
        grid = ("--ranks", "0-1", "--grid", "world=2,pp=2")
        for written in (True, False):
            done = CliRunner().invoke(cli, ["fetch", last, *grid, "--to", str(tmp_path / "part"), "--json"])
            assert done.exit_code == 0, done.output
            assert (json.loads(done.output)["bytes_written"] > 0) == written
    back = {name: torch.zeros_like(value) for name, value in tensors.items()}
    holdfast.load(back, tmp_path / "part", job=holdfast.Job(no_dist=True))  # without the bucket
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


def test_an_expert_under_a_number_of_its_own_is_missed(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Of a checkpoint with a name for each layer and expert."""
    folder, step = model
    tensors = tensors_of(step)
    each = {
        name.replace("layers.", f"layers.{layer}.").replace(
            "experts.experts.", f"experts.experts.{expert}."
        ): value[layer, expert].clone()
        for name, value in tensors.items()
        if ".experts." in name
        for layer in range(4)
        for expert in range(8)
    }
    others = {
        name.replace("layers.", f"layers.{layer}."): value[layer].clone()
        for name, value in tensors.items()
        if "layers." in name and ".experts." not in name
        for layer in range(4)
    }
    plain = {name: value for name, value in tensors.items() if "layers." not in name}
    whole = saved({**each, **others, **plain}, tmp_path / "whole")
    export(whole, tmp_path / "out", like=folder)
    before, after = weights(folder), weights(tmp_path / "out")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    gone = "decoder.layers.2.mlp.experts.experts.5.linear_fc2.weight"
    each.pop(gone)
    with pytest.raises(MissingTensors, match=r"'model.layers.2.mlp.experts.5.down_proj.weight'"):
        export(saved({**each, **others, **plain}, tmp_path / "less"), tmp_path / "less out", like=folder)


def test_an_element_from_two_places_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    tensors = tensors_of(step)
    twice = {**tensors, "decoder.layers.1.self_attention.linear_proj.weight": torch.ones(32, 32)}
    with pytest.raises(CoverageError, match=r"'model.layers.1.self_attn.o_proj.weight'.*overlap"):
        export(saved(twice, tmp_path / "step"), tmp_path / "out", like=folder)


def test_what_is_carried_along_and_how_it_is_shaped(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    report = export(step, tmp_path / "out", like=folder, dtype="bfloat16")
    assert report.files == 1
    assert sorted(os.listdir(tmp_path / "out")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    before = weights(folder)
    for name, value in weights(tmp_path / "out").items():
        assert torch.equal(value, before[name].bfloat16())
    with pytest.raises(BadInput, match=r"holds model.safetensors, which is not of this export"):
        export(step, tmp_path / "out", like=folder)


def test_an_export_that_was_killed_goes_on_and_is_no_model_before(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder, step = model

    def run(limit: int) -> Result:
        with ProcessWorld(1) as world:
            world.start(jobs.export_until, str(step), str(tmp_path / "out"), str(folder), limit)
            (result,) = world.collect(120)
        return result

    for limit in (1, 2, 3, 4):
        assert run(limit).died == -signal.SIGKILL
        shutil.copytree(tmp_path / "out", tmp_path / f"left {limit}")
        with pytest.raises(OSError, match="no file named"):
            AutoModelForCausalLM.from_pretrained(
                tmp_path / f"left {limit}", config=TINY["qwen3_moe"].configuration()
            )
    files, written = run(0).get()
    assert files > 4
    assert written < 40_000  # nothing that was whole is written again
    before, after = weights(folder), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(before)
    assert not list((tmp_path / "out").glob(".*"))


def test_the_command(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    command = ["export", "hf", str(step), str(tmp_path / "out")]
    refused = CliRunner().invoke(cli, command)
    assert refused.exit_code == 2
    assert "hf needs --like" in refused.output
    done = CliRunner().invoke(cli, [*command, "--like", str(folder), "--json"])
    assert json.loads(done.stdout)["tensors"] == len(weights(folder))
    assert CliRunner().invoke(cli, ["export", "torch_dist", "a", "b", "--partial"]).exit_code == 2


def test_a_folder_of_another_model_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    other = tmp_path / "other"
    publish(TINY["mixtral"], other)
    with pytest.raises(BadInput, match=r"tensors that .*other does not have: .*q_norm"):
        export(step, tmp_path / "out", like=other)
    shutil.copytree(folder, tmp_path / "smaller")
    edit_config(tmp_path / "smaller", num_key_value_heads=1)
    with pytest.raises(BadInput, match="does not fit its tensors"):
        export(step, tmp_path / "out", like=tmp_path / "smaller")
    with pytest.raises(BadInput, match=r"has no config.json"):
        export(step, tmp_path / "out", like=tmp_path)


def test_all_ranks_write_files_and_none_enters_a_collective(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    before = weights(folder)
    with ProcessWorld(4) as world:
        how = (str(step), str(tmp_path / "out"), str(folder))
        said = world.run(jobs.export_together, *how, -1, [], timeout=100)
        nbytes = [int(sentence.split()[0]) for sentence in said]
        assert sum(nbytes) == sum(value.nbytes for value in before.values())
        assert min(nbytes) > 0
        after = weights(tmp_path / "out")
        assert before.keys() == after.keys()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert (tmp_path / "out" / "model.safetensors.index.json").exists()

        how = (str(step), str(tmp_path / "less"), str(folder))
        for rank, sentence in enumerate(world.run(jobs.export_together, *how, 2, [], timeout=100)):
            assert rank == 2 or ("RankFailed" in sentence and "rank 2" in sentence), sentence
        assert not (tmp_path / "less" / "model.safetensors.index.json").exists()

        steps = [str(step)] * 3 + [str(tmp_path / "nothing")]
        how = (str(step), str(tmp_path / "other"), str(folder))
        for sentence in world.run(jobs.export_together, *how, -1, steps, timeout=100):
            assert "failed on rank 3" in sentence, sentence
            assert "it does not exist" in sentence, sentence


def test_weights_of_megatron_cores_names_are_exported_in_8_bits(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    export(step, tmp_path / "out", like=folder, quantize="fp8")
    check_quantized(tmp_path / "out", weights(folder))
    verdict = holdfast.same(step, tmp_path / "out")
    rounded = [one.name for one in verdict.different if "rounded there to float8_e4m3fn" in one.b]
    assert len(rounded) == len(verdict.different) == 4
    assert FC1 in rounded


def test_a_folder_without_weights_can_tell_nothing_of_what_is_missing(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    only_config = tmp_path / "config"
    only_config.mkdir()
    shutil.copy(folder / "config.json", only_config)
    with pytest.raises(BadInput, match="holds no weights"):
        export(step, tmp_path / "out", like=only_config)
    export(step, tmp_path / "out", like=only_config, strict=False)
    assert weights(tmp_path / "out").keys() == weights(folder).keys()


def test_a_folder_without_weights_tells_how_many_layers_there_are(tmp_path: Path) -> None:
    """Of names as published, which otherwise nothing compares with the configuration."""
    tensors = {f"model.layers.{layer}.input_layernorm.weight": torch.ones(8) for layer in (0, 1)}
    step, like = saved(tensors, tmp_path / "step"), tmp_path / "like"
    like.mkdir()
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"), 2)
    for layers in (2, 3):
        config = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": 8, **sizes}
        (like / "config.json").write_text(json.dumps(config))
        if layers == 2:
            assert export(step, tmp_path / "out", like=like, strict=False).tensors == 2
            continue
        with pytest.raises(MissingTensors, match=r"nothing for layer 2, and .*config.json says .* 3 layers"):
            export(step, tmp_path / "no", like=like, strict=False)


def test_an_output_beside_a_tied_embedding_is_not_dropped(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    shutil.copytree(folder, tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(BadInput, match=r"the published model's output is its embedding"):
        export(step, tmp_path / "out", like=tmp_path / "tied")


@pytest.mark.parametrize("name", ["qwen3 tied", "starcoder2"])
@pytest.mark.parametrize("how", ["tied", "a copy", "cut otherwise", "another"])
def test_a_tied_model_that_saved_its_state_dict_is_exported(name: str, how: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    publish(TINY[name], tmp_path / "model")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    output = state["lm_head.weight"]
    assert output.data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    if how != "tied":
        state["lm_head.weight"] = output.clone()
    if how == "cut otherwise":  # no digest tells that the elements are the same

        def part(rank: int) -> holdfast.Shard:
            rows = len(output) // 2
            return holdfast.Shard(output[rank * rows :][:rows].clone(), tuple(output.shape), (rank * rows, 0))

        def save(roster: Any) -> None:
            mine = {**state, "lm_head.weight": part(roster.rank)}
            holdfast.save(mine, tmp_path / "step", job=holdfast.Job(roster=roster, timeout=30))

        on_ranks(2, save)
    else:
        if how == "another":
            state["lm_head.weight"][3, 1] += 1
        saved(state, tmp_path / "step")
    if how == "another":
        with pytest.raises(
            BadInput,
            match=r"holds .lm_head\.weight. and .model\.embed_tokens\.weight., which are not equal bit for bit",
        ):
            export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model")
        return
    export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model")
    before, after = weights(tmp_path / "model"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_an_output_that_equals_the_embedding_is_left_out(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    tensors = tensors_of(step)
    tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"].clone()
    shutil.copytree(folder, tmp_path / "tied")
    rewrite(tmp_path / "tied", {k: v for k, v in weights(folder).items() if k != "lm_head.weight"})
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=tmp_path / "tied")
    assert weights(tmp_path / "out").keys() == weights(tmp_path / "tied").keys()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "float64"])
def test_weights_are_converted_to_what_models_are_published_in(
    dtype: str, model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    with pytest.raises(BadInput, match="is none of bfloat16, float16, float32"):
        export(step, tmp_path / "out", like=folder, dtype=dtype)


def dtypes_of(folder: Path) -> set[torch.dtype]:
    return {value.dtype for value in weights(folder).values()}


def in_dtype(folder: Path, out: Path, dtype: torch.dtype) -> Path:
    """The model, published in another dtype."""
    shutil.copytree(folder, out)
    rewrite(out, {name: value.to(dtype) for name, value in weights(folder).items()})
    edit_config(out, dtype=str(dtype).removeprefix("torch."))
    return out


def test_a_configuration_says_the_dtype_that_is_written(model: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, step = model
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    export(step, tmp_path / "out", like=folder, dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    shutil.copytree(folder, tmp_path / "old")
    edit_config(tmp_path / "old", dtype=None, torch_dtype="float32")
    export(step, tmp_path / "old out", like=tmp_path / "old", dtype="float16")
    said = json.loads((tmp_path / "old out" / "config.json").read_text())
    assert (said["dtype"], said["torch_dtype"]) == (None, "float16")


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_checkpoint_that_is_more_exact_is_exported_as_the_model_was_published(
    with_weights: bool, model: tuple[Path, Path], tmp_path: Path
) -> None:
    """Not in files of twice the size."""
    folder, step = model
    like = in_dtype(folder, tmp_path / "like", torch.bfloat16)
    if not with_weights:
        (like / "model.safetensors").unlink()
    report = export(step, tmp_path / "out", like=like, strict=with_weights)
    assert report.bytes_written == sum(value.nbytes for value in weights(folder).values()) // 2
    assert dtypes_of(tmp_path / "out") == {torch.bfloat16}
    assert (tmp_path / "out" / "config.json").read_bytes() == (like / "config.json").read_bytes()
    export(step, tmp_path / "as asked", like=like, dtype="float32", strict=with_weights)
    assert dtypes_of(tmp_path / "as asked") == {torch.float32}
    assert json.loads((tmp_path / "as asked" / "config.json").read_text())["dtype"] == "float32"


def test_a_checkpoint_that_is_less_exact_stays_as_it_is(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    less = {name: value.bfloat16() for name, value in tensors_of(step).items()}
    export(saved(less, tmp_path / "step"), tmp_path / "out", like=folder)
    assert dtypes_of(tmp_path / "out") == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["float16", None])
def test_values_that_a_cast_would_make_infinite_are_refused(
    dtype: str | None, model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    like = in_dtype(folder, tmp_path / "like", torch.float16)
    tensors = tensors_of(step)
    tensors["decoder.final_layernorm.weight"][3] = 1e6
    with pytest.raises(
        BadInput, match=r"'model\.norm\.weight', which is stored in float32, .* infinite in float16"
    ):
        export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=like, dtype=dtype)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_values_that_were_infinite_before_a_cast_are_not_laid_to_it(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    tensors = tensors_of(step)
    tensors["decoder.final_layernorm.weight"][3] = float("-inf")
    with pytest.raises(BadInput, match="infinite as they are stored, in float32: the cast to float16 is not"):
        export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=folder, dtype="float16")


@pytest.mark.parametrize(("stored", "value"), [(torch.bfloat16, 1e6), (torch.float32, 1e6)])
def test_a_cast_to_fewer_exponents_is_looked_at_whichever_is_more_exact(
    stored: torch.dtype, value: float, model: tuple[Path, Path], tmp_path: Path
) -> None:
    """bfloat16 has fewer digits than float16, and holds larger values."""
    folder, step = model
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(step).items()}
    tensors["decoder.final_layernorm.weight"][3] = value
    with pytest.raises(BadInput, match="has values that are infinite in float16"):
        export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=folder, dtype="float16")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
def test_a_weight_of_which_a_cast_leaves_only_zeros_is_refused(
    stored: torch.dtype, model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(step).items()}
    tensors["output_layer.weight"] *= 1e-9
    out, other = tmp_path / "out", saved(tensors, tmp_path / "step")
    with pytest.raises(BadInput, match=r"'lm_head\.weight', .* would have only zeros in float16: \d+ of its"):
        export(other, out, like=in_dtype(folder, tmp_path / "like", torch.float16), dtype="float16")
    assert not (out / "model.safetensors").exists()
    export(other, tmp_path / "as asked", like=folder, dtype="bfloat16")


def test_a_large_weight_is_judged_whole(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the slab: some rows of an embedding may be of words that no text has."""
    folder, step = model
    monkeypatch.setattr("holdfast._models.huggingface.export.SLAB", 256)
    tensors = tensors_of(step)
    tensors["output_layer.weight"][8:] *= 1e-9
    export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=folder, dtype="float16")
    assert not weights(tmp_path / "out")["lm_head.weight"][8:].any()
    tensors["output_layer.weight"][:8] *= 1e-9
    with pytest.raises(BadInput, match="would have only zeros in float16"):
        export(saved(tensors, tmp_path / "next"), tmp_path / "next out", like=folder, dtype="float16")


def test_a_healthy_model_with_tiny_values_is_exported(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Subnormal values, zeros, tensors of zeros with one tiny value, and tensors of zeros alone."""
    folder, step = model
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(step).items()}
    tensors["output_layer.weight"][::2] = 1e-10
    tensors["output_layer.weight"][1, 0] = 1e-39
    tensors["embedding.word_embeddings.weight"].mul_(0)
    norm = tensors["decoder.final_layernorm.weight"]
    norm.zero_()
    norm[0] = 1e-12
    export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=folder, dtype="float16")
    assert dtypes_of(tmp_path / "out") == {torch.float16}


def test_a_norm_that_becomes_zero_by_its_way_has_lost_nothing(tmp_path: Path) -> None:
    """The model keeps the difference to one, which is -1 for a published zero."""
    publish(TINY["qwen3_5_text"], tmp_path / "like")
    name, ours = "model.layers.0.linear_attn.norm.weight", "decoder.layers.0.self_attention.out_norm.weight"
    tensors = weights(tmp_path / "like")
    lowered = {ours: torch.full_like(tensors.pop(name), -1.0)}
    export(saved({**tensors, **lowered}, tmp_path / "step"), tmp_path / "out", like=tmp_path / "like")
    assert not weights(tmp_path / "out")[name].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_of_which_the_model_keeps_the_difference_to_one_comes_back(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """With its bits, if the model's dtype can hold the difference; a model in 16 bits can't, below one half."""
    publish(TINY["qwen3_5_text"], tmp_path / "whole")
    tensors = weights(tmp_path / "whole")
    name, ours = "model.layers.0.linear_attn.norm.weight", "decoder.layers.0.self_attention.out_norm.weight"
    values = torch.tensor([1.0, 0.5, 0.75, 2.5, 1.0078125, 0.50390625, 3.015625, 0.9, 0.001, 0.1, 0.3, 0.49])
    tensors[name][: len(values)] = values
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    rewrite(like, {key: value.bfloat16() for key, value in tensors.items()})
    published = weights(like)
    lowered = {ours: torch.zeros(len(tensors[name]), dtype=dtype)}
    holdfast.load(lowered, like, job=holdfast.Job(no_dist=True))
    rest = {key: value for key, value in published.items() if key != name}
    export(saved({**rest, **lowered}, tmp_path / "step"), tmp_path / "out", like=like)
    back = weights(tmp_path / "out")[name]
    assert back.dtype == torch.bfloat16
    kept = published[name].float() >= 0.5
    assert torch.equal(back[kept], published[name][kept])
    assert torch.equal(back, published[name]) == (dtype == torch.float32)
    expected = ((published[name].float() - 1).to(dtype).float() + 1).bfloat16()
    assert torch.equal(back, expected)
    # And the comparison says which of these it is.
    found = holdfast.same(tmp_path / "step", like)
    assert found.same
    assert (ours in found.rounded) == (dtype != torch.float32)


def test_a_configuration_says_nothing_of_scales_that_are_not_written(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    shutil.copytree(folder, tmp_path / "like")
    edit_config(tmp_path / "like", quantization_config={"quant_method": "fp8"})
    export(step, tmp_path / "out", like=tmp_path / "like")
    before = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == before


def test_what_is_carried_along_neither_leaves_its_folder_nor_goes_elsewhere(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    shutil.copytree(folder, tmp_path / "like")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "like" / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(HoldfastError, match="a link that leaves its folder"):
        export(step, tmp_path / "out", like=tmp_path / "like")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").symlink_to(tmp_path / "victim")
    with pytest.raises(HoldfastError, match="a link that leaves its folder"):
        export(step, tmp_path / "other", like=folder)
    assert not (tmp_path / "victim").exists()


def test_files_of_another_configuration_are_not_gone_on_with(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, step = model
    export(step, tmp_path / "out", like=folder, file_bytes=40_000)
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    tensors = tensors_of(step)
    again = saved({**tensors, FC1: tensors[FC1] + 1}, tmp_path / "step")
    with pytest.raises(BadInput, match="which is not of this export"):
        export(again, tmp_path / "out", like=folder, file_bytes=40_000)


def test_a_finished_file_that_somebody_takes_away_is_missed(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    out = tmp_path / "out"

    def take_away(done: int, total: int) -> None:
        if done == total:
            min(out.glob("model-*.safetensors")).unlink()

    with pytest.raises(BadInput, match="was changed or removed by somebody else"):
        export(step, out, like=folder, file_bytes=30_000, progress=take_away)
    assert not (out / "model.safetensors.index.json").exists()
    export(step, out, like=folder, file_bytes=30_000)
    assert weights(out).keys() == weights(folder).keys()


def test_in_a_framework_only_layers_that_predict_further_tokens_may_be_missing(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    published, step = model

    def export_beside(name: str) -> tuple[str, ...]:
        like, out = tmp_path / name, tmp_path / f"{name}-out"
        shutil.copytree(published, like)
        rewrite(like, {**weights(published), name: torch.ones(2)})
        call = begin_call(holdfast.Job(no_dist=True, timeout=60, stall_timeout=30))
        stores = open_store(step), open_store(like), open_store(out)
        return run_export(*stores, call, in_framework=True).missing

    for name in ("model.layers.4.enorm.weight", "mtp.layers.0.enorm.weight"):
        assert export_beside(name) == (name,)
    with pytest.raises(MissingTensors, match=r"has nothing for 1 tensor .*layers\.3\.enorm"):
        export_beside("model.layers.3.enorm.weight")
