"""Exports in 8 bits: transformers' own arithmetic, bit for bit, whoever writes and however the source is cut."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import holdfast
from holdfast._core.store.local import LocalStore, open_store
from holdfast._models.huggingface.export import run_export
from holdfast._tools.cli import cli
from holdfast.errors import BadInput
from holdfast.huggingface import export
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights
from tests.support.threads import on_ranks

pytest.importorskip("transformers.integrations.finegrained_fp8")
E4M3 = torch.float8_e4m3fn
LAYER = "model.layers.0."


def cut(weight: torch.Tensor, low: int) -> Any:
    """Two shards; the second begins inside of a block."""
    if weight.ndim != 2 or len(weight) <= low:
        return weight
    parts = (weight[:low].clone(), 0), (weight[low:].clone(), low)
    return [holdfast.Shard(part, weight.shape, (first, 0)) for part, first in parts]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A published model with matrices of several blocks, and a checkpoint of it whose shards cut blocks."""
    home = tmp_path_factory.mktemp("quantizing")
    publish(TINY["qwen3_moe"], home / "model", hidden_size=256, moe_intermediate_size=128)
    holdfast.save({name: cut(value, 90) for name, value in weights(home / "model").items()}, home / "step")
    return home / "model", home / "step"


def by_transformers(
    weight: torch.Tensor, sides: tuple[int, int] = (128, 128)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales by transformers' converter. It takes whole blocks only: zeros fill them up."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    (rows, columns), (height, width) = weight.shape, sides
    filled = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    config = SimpleNamespace(weight_block_size=list(sides), scale_fmt=None)
    made = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"a.weight": filled})
    return made["a.weight"][:rows, :columns], made["a.weight_scale_inv"]


def is_linear(name: str) -> bool:
    return "_proj." in name


def check(out: Path, source: dict[str, torch.Tensor], sides: tuple[int, int] = (128, 128)) -> None:
    """Linear layers are those of transformers, all others are unchanged, and nothing else is there."""
    found = weights(out)
    for name, weight in source.items():
        mine = found.pop(name)
        if not is_linear(name):
            assert mine.dtype == weight.dtype, name
            assert torch.equal(mine, weight), name
            continue
        elements, scales = by_transformers(weight, sides)
        assert mine.dtype == E4M3, name
        assert torch.equal(mine.view(torch.uint8), elements.view(torch.uint8)), name
        assert torch.equal(found.pop(f"{name}_scale_inv"), scales), name
    assert not found


def test_it_is_what_transformers_makes_and_reads(model: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, step = model
    source = weights(folder)
    ran = CliRunner().invoke(
        cli, ["export", "hf", str(step), str(tmp_path / "out"), "--like", str(folder), "--quantize", "fp8"]
    )
    assert ran.exit_code == 0, ran.output
    check(tmp_path / "out", source)
    about = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert about == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            *(f"model.layers.{layer}.mlp.gate" for layer in range(4)),
        ],
    }
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    ours = {name: torch.zeros_like(value) for name, value in read.items()}
    holdfast.load(ours, tmp_path / "out")
    assert all(torch.equal(value, ours[name]) for name, value in read.items())
    name = f"{LAYER}self_attn.o_proj.weight"
    elements, scales = by_transformers(source[name])
    rows, columns = (torch.arange(side) // 128 for side in elements.shape)
    assert torch.equal(ours[name], elements.float() * scales[rows][:, columns])

    verdict = holdfast.same(step, tmp_path / "out")
    assert {one.name for one in verdict.different} == set(filter(is_linear, source))
    assert all(one.b.endswith("rounded there to float8_e4m3fn with scales") for one in verdict.different)
    assert not any("8_e4m3" in one.a for one in verdict.different)
    assert verdict.equal == len(source) - len(verdict.different)


def test_ranks_write_what_one_process_does(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Elements and scales lie in one file, so a rank needs nothing of another."""
    folder, step = model
    export(step, tmp_path / "alone", like=folder, quantize="fp8", file_bytes=400_000)

    def job(roster: Any) -> int:
        from holdfast._core.protocol.call import begin_call

        report = run_export(
            open_store(step),
            LocalStore(folder),
            LocalStore(tmp_path / "together"),
            begin_call(holdfast.Job(roster=roster, timeout=60.0)),
            quantize="fp8",
            file_bytes=400_000,
        )
        return report.bytes_written

    written = on_ranks(3, job)
    files = sorted(path.name for path in (tmp_path / "alone").glob("*.safetensors"))
    assert len(files) > 3
    assert min(written) > 0
    for name in files:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "together" / name).read_bytes()
    check(tmp_path / "together", weights(folder))
    assert holdfast.same(tmp_path / "alone", tmp_path / "together").same


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_at_the_ends_and_of_zeros(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(3)
    name = f"{LAYER}mlp.up_proj.weight"
    weight = (torch.randn(300, 200) * 0.02).to(dtype)
    weight[:128, :128] = 0
    weight[128:256, :128] = -(2.0**-24)
    (tmp_path / "model").mkdir()
    rewrite(tmp_path / "model", {name: weight})
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    holdfast.save({name: cut(weight, 131)}, tmp_path / "step")
    export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model", quantize="fp8")
    check(tmp_path / "out", {name: weight})


QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_size": 200,
    "intermediate_size": 300,
    "vocab_size": 100,
}


def test_a_model_in_8_bits_is_exported_as_it_was_published(model: tuple[Path, Path], tmp_path: Path) -> None:
    folder, step = model
    source = weights(folder)
    shutil.copytree(folder, tmp_path / "model")
    (kept,) = [name for name in source if name == f"{LAYER}self_attn.o_proj.weight"]
    published = dict(source)
    for name in filter(is_linear, source):
        if name != kept:
            published[name], published[f"{name}_scale_inv"] = by_transformers(source[name], (64, 32))
    rewrite(tmp_path / "model", published)
    edit_config(
        tmp_path / "model", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 32]}
    )
    export(step, tmp_path / "out", like=tmp_path / "model", quantize="fp8")
    found = weights(tmp_path / "out")
    assert found.keys() == published.keys()
    assert all(torch.equal(value.float(), found[name].float()) for name, value in published.items())
    about = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert about["weight_block_size"] == [64, 32]
    assert kept.removesuffix(".weight") in about["modules_to_not_convert"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-37])
def test_a_block_that_has_no_scale_is_refused(value: float, tmp_path: Path) -> None:
    name = f"{LAYER}self_attn.q_proj.weight"
    weight = torch.zeros(200, 200)
    weight[150, 150] = value
    (tmp_path / "model").mkdir()
    rewrite(tmp_path / "model", {name: weight})
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    holdfast.save({name: weight}, tmp_path / "step")
    with pytest.raises(BadInput, match=rf"'{name}' has a block of 128 by 128 elements with no scale"):
        export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model", quantize="fp8")
    assert not list(tmp_path.glob("out/*.safetensors"))


REFUSED = {
    "experts in one tensor": (
        "mlp.experts.gate_up_proj",
        torch.ones(2, 8, 8),
        "all experts of a layer in one",
    ),
    "whole numbers": (
        "mlp.up_proj.weight",
        torch.ones(8, 8, dtype=torch.int32),
        "in int32, can't be written",
    ),
    "nothing linear": ("input_layernorm.weight", torch.ones(8), "No tensor of the export is known"),
    "one in the name of another": (
        "mlp.up_proj.weight",
        torch.ones(8, 8),
        f"'{LAYER}mlp.up_proj' would be in 8 bits and '{LAYER}mlp.up' not",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_such_form_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    name, weight, words = REFUSED[what]
    tensors = {LAYER + name: weight, f"{LAYER}mlp.up.weight": torch.ones(8, 8)}
    (tmp_path / "model").mkdir()
    rewrite(tmp_path / "model", tensors)
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN3))
    holdfast.save(tensors, tmp_path / "step")
    with pytest.raises(BadInput, match=words):
        export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model", quantize="fp8")
    assert not list(tmp_path.glob("out/*"))
    with pytest.raises(BadInput, match="quantize='int4' is none of fp8"):
        export(tmp_path / "step", tmp_path / "out", like=tmp_path / "model", quantize="int4")
