"""Weights in 8 bits: each published way to scale them is read as its definition says, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import huggingface
from holdfast._core.layout.grid import Grid
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._models.views.family import view_of
from holdfast._models.views.needs import of_published, sizes_published
from holdfast._models.views.rank_share import share_of, stages_of
from holdfast.errors import BadInput, HoldfastError, ShapeMismatch
from tests.frameworks.huggingface.models import rewrite

ROWS, COLUMNS, EXPERTS = 300, 200, 3
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.5


WAYS: dict[str, tuple[dict[str, Any] | None, str, torch.Tensor]] = {
    "deepseek": (None, "_scale_inv", random(3, 2)),
    "blocks of another size": (
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        "_scale_inv",
        random(5, 7),
    ),
    "blocks in e8m0": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        "_scale_inv",
        torch.tensor([[0.25, 2.0], [1.0, 8.0], [0.5, 1024.0]]).to(E8M0),
    ),
    "fp8, one scale": (
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "_scale_inv",
        torch.tensor(0.75),
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "_scale", torch.tensor(0.75)),
    "modelopt, said elsewhere": (None, "_scale", torch.tensor([0.75])),
    "compressed-tensors, rows": (compressed("channel"), "_scale", random(ROWS, 1).bfloat16()),
    "compressed-tensors, tensor": (compressed("tensor"), "_scale", torch.tensor([0.3125]).bfloat16()),
    "compressed-tensors, blocks": (
        compressed("block", block_structure=[128, 128]),
        "_scale",
        random(3, 2).bfloat16(),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "_scale", random(ROWS, 1)),
    "one row after another": (None, "_scale", random(ROWS)),
}


def publish(folder: Path, about: dict[str, Any] | None, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    rewrite(folder, tensors)
    config: dict[str, Any] = {"model_type": "qwen3"}
    (folder / "config.json").write_text(
        json.dumps(config if about is None else config | {"quantization_config": about})
    )


def spread(scales: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    """A scale for each element, written as the definition is."""
    grid = scales.float().reshape(
        (-1, 1) if scales.ndim == 1 and scales.numel() > 1 else (*scales.shape[:2],)
    )
    rows = torch.arange(ROWS) // sides[0]
    columns = torch.arange(COLUMNS) // sides[1]
    if grid.numel() == 1:
        return grid.reshape(1, 1).expand(ROWS, COLUMNS)
    return grid[rows][:, columns]


def sides(name: str, scales: torch.Tensor) -> tuple[int, int]:
    if scales.numel() == ROWS:
        return 1, COLUMNS
    return (64, 32) if name == "blocks of another size" else (128, 128)


@pytest.mark.parametrize("name", WAYS)
def test_elements_are_multiplied_by_their_scales_whole_and_cut(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    about, suffix, scales = WAYS[name]
    weight = torch.randn(ROWS, COLUMNS).to(E4M3)
    beside = {"w.input_scale": torch.tensor(0.5), "w.activation_scale": torch.tensor(0.5)}
    publish(tmp_path, about, {"w.weight": weight, f"w.weight{suffix}": scales, **beside})
    expected = weight.float() * spread(scales, sides(name, scales))
    state = {"w.weight": torch.zeros(ROWS, COLUMNS)}
    report = holdfast.load(state, tmp_path)
    assert torch.equal(state["w.weight"], expected)
    assert report.unasked == ()
    rounded = {"w.weight": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)}
    holdfast.load(rounded, tmp_path)
    assert torch.equal(rounded["w.weight"], expected.bfloat16())
    part = holdfast.Shard(torch.zeros(100, 60), (ROWS, COLUMNS), (150, 120))
    holdfast.load({"w.weight": part}, tmp_path)
    assert torch.equal(part.tensor, expected[150:250, 120:180])
    as_it_is = {"w.weight": torch.zeros(ROWS, COLUMNS, dtype=E4M3)}
    holdfast.load(as_it_is, tmp_path)
    assert torch.equal(as_it_is["w.weight"].float(), weight.float())


def test_two_folders_in_8_bits_are_the_same_if_they_load_the_same(tmp_path: Path) -> None:
    """Of any form of scales, with fingerprints and without; scales of activations on one side are no weights."""
    torch.manual_seed(0)
    weight, half = torch.randn(ROWS, COLUMNS).to(E4M3), torch.full((3, 2), 0.5)
    blocks = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    twice = (weight.float() * 2).to(E4M3)
    noted = holdfast.Job(no_dist=True, options=holdfast.Options(fingerprint=True))
    for name, about, tensors in (
        ("blocks", None, {"w.weight_scale_inv": blocks}),
        ("suffix", None, {"w.weight_scale": blocks}),
        ("activations", None, {"w.weight_scale_inv": blocks, "w.input_scale": torch.tensor(0.5)}),
        ("sides", {"quant_method": "fp8", "weight_block_size": [100, 120]}, {"w.weight_scale_inv": blocks}),
        ("other", None, {"w.weight_scale_inv": blocks * 2}),
        ("halves", None, {"w.weight_scale_inv": half}),
        ("one half", None, {"w.weight_scale_inv": torch.tensor(0.5)}),
        ("twice", None, {"w.weight": twice, "w.weight_scale_inv": half / 2}),
    ):
        publish(tmp_path / name, about, {"w.weight": weight, "b.weight": torch.ones(2), **tensors})
        if name in ("blocks", "sides"):
            huggingface.import_(tmp_path / name, tmp_path / f"{name}, noted", strict=False, job=noted)
    read = {}
    for like, others in (
        ("blocks", ("blocks", "suffix", "activations", "blocks, noted")),
        ("halves", ("halves", "one half", "twice")),
        ("blocks, noted", ("blocks, noted", "activations")),
    ):
        for other in others:
            for a, b in ((like, other), (other, like)):
                verdict = holdfast.same(tmp_path / a, tmp_path / b)
                assert verdict.same, (a, b, str(verdict))
                read[a, b] = verdict.bytes_read
    assert read["blocks, noted", "blocks, noted"] == 0
    for a, b in (("blocks", "sides"), ("blocks", "other"), ("blocks, noted", "sides, noted")):
        (one,) = holdfast.same(tmp_path / a, tmp_path / b, where=True).different
        x, y = ({"w.weight": torch.zeros(ROWS, COLUMNS)} for _ in "ab")
        holdfast.load(x, tmp_path / a)
        holdfast.load(y, tmp_path / b)
        assert (one.name, one.elements) == ("w.weight", int((x["w.weight"] != y["w.weight"]).sum()))


@pytest.mark.parametrize("name", ["blocks in e8m0", "fp8, one scale"])
def test_transformers_makes_the_same_of_them(name: str, tmp_path: Path) -> None:
    """Where it reads them; its blocks divide the tensor."""
    dequantize = pytest.importorskip("transformers.integrations.finegrained_fp8").Fp8Dequantize(None)
    about, suffix, scales = WAYS[name]
    weight = torch.randn(384, 256).to(E4M3)
    publish(tmp_path, about, {"w.weight": weight, f"w.weight{suffix}": scales})
    state = {"w.weight": torch.zeros(384, 256)}
    holdfast.load(state, tmp_path)
    found = dequantize.convert({"weight$": weight, "weight_scale_inv": scales.reshape(-1, *scales.shape[1:])})
    (theirs,) = found.values()
    assert torch.equal(state["w.weight"].to(theirs.dtype), theirs)


@pytest.mark.parametrize(
    "shape", [(EXPERTS,), (EXPERTS, 1, 1), (EXPERTS, ROWS), (EXPERTS, ROWS, 1), (EXPERTS, 3, 2)]
)
def test_all_experts_in_one_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight, scales = torch.randn(EXPERTS, ROWS, COLUMNS).to(E4M3), random(*shape)
    publish(tmp_path, None, {"experts.up_proj": weight, "experts.up_proj_scale": scales})
    each = [spread(scales[at].reshape(-1, *shape[2:]), sides("", scales[at])) for at in range(EXPERTS)]
    expected = weight.float() * torch.stack(each)
    part = holdfast.Shard(torch.zeros(2, 40, COLUMNS), (EXPERTS, ROWS, COLUMNS), (1, 120, 0))
    holdfast.load({"experts.up_proj": part}, tmp_path)
    assert torch.equal(part.tensor, expected[1:, 120:160])


REFUSED: dict[str, tuple[dict[str, Any] | None, dict[str, torch.Tensor], type[HoldfastError], str]] = {
    "rows of which some are missing": (None, {"_scale": random(ROWS - 1, 1)}, ShapeMismatch, r"\[299, 1\]"),
    "a scale for each column": (None, {"_scale": random(1, COLUMNS)}, ShapeMismatch, r"\[1, 200\]"),
    "one scale where blocks are named": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"_scale_inv": torch.tensor(1.0)},
        ShapeMismatch,
        r"blocks of \[128, 128\]",
    ),
    "whole numbers": (None, {"_scale": torch.ones(ROWS, 1, dtype=torch.int32)}, ShapeMismatch, "int32"),
    "compressed-tensors in whole numbers": (
        compressed("channel", type="int"),
        {"_scale": random(ROWS, 1)},
        BadInput,
        "quantized by compressed-tensors",
    ),
    "not symmetric": (
        compressed("channel", symmetric=False),
        {"_scale": random(ROWS, 1)},
        BadInput,
        "quantized by compressed-tensors",
    ),
    "another algorithm of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"_scale": torch.tensor(1.0)},
        BadInput,
        "quantized by modelopt",
    ),
    "another method": ({"quant_method": "quark"}, {"_scale": torch.tensor(1.0)}, BadInput, "by quark"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_of_other_ways_are_refused_and_nothing_is_read(name: str, tmp_path: Path) -> None:
    about, scales, error, sentence = REFUSED[name]
    weight = torch.randn(ROWS, COLUMNS).to(E4M3)
    publish(tmp_path, about, {"w.weight": weight} | {f"w.weight{end}": one for end, one in scales.items()})
    state = {"w.weight": torch.full((ROWS, COLUMNS), 7.0)}
    with pytest.raises(error, match=sentence):
        holdfast.load(state, tmp_path)
    assert (state["w.weight"] == 7).all()


def test_two_ways_to_write_a_model_are_compared_by_their_values(tmp_path: Path) -> None:
    """Equal elements with unlike scales are no equal weights, whatever the scales are called."""
    weight = torch.randn(256, 128).to(E4M3)
    publish(tmp_path / "blocks", None, {"w.weight": weight, "w.weight_scale_inv": random(2, 1)})
    scale = {"w.weight_scale": torch.tensor(0.5), "w.input_scale": torch.tensor(2.0)}
    publish(tmp_path / "whole", None, {"w.weight": weight, **scale})
    publish(tmp_path / "values", None, {"w.weight": weight.float() * 0.5})
    assert not holdfast.same(tmp_path / "blocks", tmp_path / "whole").same
    assert not holdfast.same(tmp_path / "whole", tmp_path / "blocks").same
    assert not holdfast.same(tmp_path / "blocks", tmp_path / "values").same
    assert not holdfast.same(tmp_path / "values", tmp_path / "blocks").same
    assert holdfast.same(tmp_path / "whole", tmp_path / "values").same
    assert holdfast.same(tmp_path / "values", tmp_path / "whole").same
    assert holdfast.same(tmp_path / "whole", tmp_path / "whole").same


def test_experts_one_by_one_are_those_in_one_tensor_if_they_load_the_same(tmp_path: Path) -> None:
    """In either order, with scales of another form, and beside a model in floating point."""
    torch.manual_seed(0)
    side, layer = 128, "model.layers.0.mlp.experts"
    about = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "hidden_size": side}
    about |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8,
        "tie_word_embeddings": False,
    }

    def folder(name: str, tensors: dict[str, torch.Tensor], **more: Any) -> Path:
        (tmp_path / name).mkdir()
        save_file(tensors | {"model.norm.weight": torch.ones(side)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({**about, **more}))
        return tmp_path / name

    blocks = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [side, side]}}
    one, scale = {}, {}
    for expert in range(2):
        for part in ("gate", "up", "down"):
            name = f"{layer}.{expert}.{part}_proj.weight"
            one[name], scale[name] = torch.randint(1, 8, (side, side)).to(E4M3), random(1, 1)
    scales = {f"{name}_scale_inv": value for name, value in scale.items()}

    def joined(tensors: dict[str, torch.Tensor], end: str = "") -> dict[str, torch.Tensor]:
        of = [
            [tensors[f"{layer}.{at}.{part}_proj.weight"] for part in ("gate", "up", "down")]
            for at in range(2)
        ]
        return {
            f"{layer}.gate_up_proj{end}": torch.stack([torch.cat(three[:2]) for three in of]),
            f"{layer}.down_proj{end}": torch.stack([three[2] for three in of]),
        }

    values = {name: tensor.float() * scale[name] for name, tensor in one.items()}
    first = f"{layer}.0.up_proj.weight"
    other = {name: value * (3 if name == first else 1) for name, value in scale.items()}
    halved = {name: (tensor.float() / 2).to(E4M3) for name, tensor in one.items()}
    doubled = {name: value * 2 for name, value in scale.items()}
    same = [
        folder("parts", one | scales, **blocks),
        folder("joined", joined(one) | joined(scale, "_scale_inv"), **blocks),
        folder("other scales", joined(halved) | joined(doubled, "_scale_inv"), **blocks),
        folder("values", values),
        folder("joined values", joined(values)),
    ]
    wrong = folder("wrong", joined(one) | joined(other, "_scale_inv"), **blocks)
    for a in same:
        for b in same:
            verdict = holdfast.same(a, b)
            assert verdict.same, (a.name, b.name, str(verdict))
        for found in (holdfast.same(a, wrong, where=True), holdfast.same(wrong, a, where=True)):
            assert found.only_a == found.only_b == ()
            (unlike,) = found.different
            assert (unlike.name, unlike.elements) == (f"{layer}.gate_up_proj", side * side)


def test_an_imported_model_keeps_elements_and_scales(tmp_path: Path) -> None:
    weight = torch.randn(64, 32).to(E4M3)
    about = {"quant_method": "modelopt", "quant_algo": "FP8"}
    scale = {"w.weight_scale": torch.tensor(0.5), "w.input_scale": torch.tensor(2.0)}
    publish(tmp_path / "published", about, {"w.weight": weight, **scale})
    huggingface.import_(tmp_path / "published", tmp_path / "imported", strict=False)
    state = {"w.weight": torch.zeros(64, 32)}
    holdfast.load(state, tmp_path / "imported")
    assert torch.equal(state["w.weight"], weight.float() * 0.5)
    assert holdfast.same(tmp_path / "published", tmp_path / "imported").same


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("files", [1, 2])
def test_scales_that_are_not_finite_are_refused(bad: float, files: int, tmp_path: Path) -> None:
    weight, scales = torch.randn(256, 128).to(E4M3), random(2, 1)
    publish(tmp_path / "right", None, {"w.weight": weight, "w.weight_scale_inv": scales})
    scales[1] = bad
    place = tmp_path / "published"
    publish(place, None, {"w.weight": weight, "w.weight_scale_inv": scales})
    told = r"published/model.safetensors holds NaN or infinity in the scales 'w.weight_scale_inv':"
    if files == 2:
        (place / "model.safetensors").unlink()
        save_file({"w.weight": weight}, place / "a.safetensors")
        save_file({"w.weight_scale_inv": scales}, place / "b.safetensors")
        names = {"w.weight": "a.safetensors", "w.weight_scale_inv": "b.safetensors"}
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        told = r"published.* holds NaN or infinity in the scales 'w.weight_scale_inv', in b.safetensors:"
    state = {"w.weight": torch.zeros(256, 128)}
    with pytest.raises(BadInput, match=told):
        holdfast.load(state, place)
    with pytest.raises(BadInput, match=told):
        huggingface.import_(place, tmp_path / "imported", strict=False)
    with pytest.raises(BadInput, match=told):
        holdfast.same(place, holdfast.fingerprint(state))
    (found,) = holdfast.same(tmp_path / "right", place).different
    assert re.search(told, found.b)


def test_what_is_only_called_like_scales_is_a_weight(tmp_path: Path) -> None:
    """Beside tensors that are not in 8 bits: it is told if nothing asks for it, compared, and fetched."""
    base, learned = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.k_scale"
    weight = torch.randn(4, 4)
    publish(tmp_path / "one", None, {base: weight, learned: torch.ones(4)})
    publish(tmp_path / "other", None, {base: weight.bfloat16()})
    report = holdfast.load({base: torch.zeros(4, 4)}, tmp_path / "one")
    assert report.unasked == (learned,)
    assert not holdfast.same(tmp_path / "one", tmp_path / "other").same
    assert not holdfast.same(tmp_path / "other", tmp_path / "one").same
    specs = {name: TensorSpec(name, CODE_OF["bfloat16"], (4, 4)) for name in (base, learned)}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8}
    view = view_of({"model_type": "qwen3", **sizes}, "config.json")
    share = share_of(Grid(1), 0, sizes_published(view, specs, 8), stages_of(Grid(1), 1, None))
    assert learned in of_published(view, specs, share).boxes


def test_what_is_computed_in_another_way_is_not_read_from_8_bits(tmp_path: Path) -> None:
    """Gate and up in turns, of gpt-oss."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite_in = {name: torch.zeros(EXPERTS, 8, 4).to(E4M3), f"{name}_scale": torch.ones(())}
    publish(tmp_path, None, rewrite_in)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": EXPERTS})
    )
    state = {"decoder.layers.0.mlp.experts.experts.linear_fc1.weight": torch.full((EXPERTS, 4, 8), 7.0)}
    with pytest.raises(BadInput, match=r"in 8 bits, of which 'decoder.*' can't be made"):
        holdfast.load(state, tmp_path)
    assert (next(iter(state.values())) == 7).all()
