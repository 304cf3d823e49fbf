"""Elements of less than a byte: e2m1 as DeepSeek V4 publishes its experts, whole numbers of compressed-tensors as
Kimi K2 does. What is expected is written as the definitions are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import huggingface
from holdfast._core.layout.grid import Grid
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._models.views.family import view_of
from holdfast._models.views.needs import of_published, sizes_published, together
from holdfast._models.views.rank_share import share_of, stages_of
from holdfast.errors import BadInput, HoldfastError, ShapeMismatch
from tests.frameworks.huggingface.models import rewrite

ROWS, COLUMNS = 48, 96
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
V4 = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
Tensors = dict[str, torch.Tensor]


def kimi(**more: Any) -> dict[str, Any]:
    """What the configuration of Kimi K2 Thinking says."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, **more}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def in_e2m1(name: str, rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensors, torch.Tensor]:
    """A tensor with random bits, and its values."""
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    exponents = torch.randint(120, 134, (rows, columns // 32), dtype=torch.uint8)
    values = torch.empty(rows, columns)
    for column in range(columns):
        bits = packed[:, column // 2] >> 4 * (column % 2) & 15
        sizes = torch.tensor([E2M1[bit & 7] * (-1 if bit & 8 else 1) for bit in bits.tolist()])
        values[:, column] = sizes * 2.0 ** (exponents[:, column // 32].float() - 127)
    scales = exponents.view(torch.float8_e8m0fnu)
    return {f"{name}.weight": packed.view(torch.int8), f"{name}.scale": scales}, values


def in_whole_numbers(
    name: str, bits: int = 4, group: int = 32, rows: int = ROWS, columns: int = COLUMNS
) -> tuple[Tensors, torch.Tensor]:
    per, half = 32 // bits, 1 << (bits - 1)
    numbers = torch.randint(-half, half, (rows, columns))
    scales = (torch.rand(rows, columns // group) + 0.5).bfloat16()
    packed = torch.zeros(rows, columns // per, dtype=torch.int64)
    for column in range(columns):
        packed[:, column // per] |= (numbers[:, column] + half) << bits * (column % per)
    values = numbers.float() * scales.float()[:, torch.arange(columns) // group]
    shape = torch.tensor([rows, columns])
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}
    return {f"{name}.{part}": value for part, value in parts.items()}, values


WAYS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "e2m1": (in_e2m1, V4, {}),
    "int4": (in_whole_numbers, kimi(), {}),
    "int4, a scale for a row": (
        in_whole_numbers,
        kimi(strategy="channel", group_size=None),
        {"group": COLUMNS},
    ),
    "int8, groups of 16": (in_whole_numbers, kimi(num_bits=8, group_size=16), {"bits": 8, "group": 16}),
}


def publish(folder: Path, about: dict[str, Any] | None, tensors: Tensors, **more: Any) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    rewrite(folder, tensors)
    said = {"model_type": "qwen3", **more}
    (folder / "config.json").write_text(
        json.dumps(said if about is None else said | {"quantization_config": about})
    )


@pytest.mark.parametrize("way", WAYS)
def test_elements_are_unpacked_and_multiplied_whole_and_cut(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, about, how = WAYS[way]
    tensors, expected = make("w", **how)
    plain = {"n.weight": torch.randn(4), "n.scale": torch.randn(4)}  # scales of nothing: two weights
    publish(tmp_path, about, tensors | plain)
    for dtype in (torch.float32, torch.bfloat16):
        state = {"w.weight": torch.zeros(ROWS, COLUMNS, dtype=dtype)}
        report = holdfast.load(state | {"n.weight": torch.zeros(4)}, tmp_path)
        assert torch.equal(state["w.weight"], expected.to(dtype))
        assert report.unasked == ("n.scale",)
    for rows, columns in (((0, 48), (0, 1)), ((5, 30), (7, 51)), ((47, 48), (95, 96)), ((3, 4), (32, 64))):
        part = holdfast.Shard(
            torch.zeros(rows[1] - rows[0], columns[1] - columns[0]),
            (ROWS, COLUMNS),
            (rows[0], columns[0]),
        )
        holdfast.load({"w.weight": part}, tmp_path, strict=False)
        assert torch.equal(part.tensor, expected[slice(*rows), slice(*columns)])


def test_elements_in_8_bits_whose_scales_are_called_as_in_deepseek_v4(tmp_path: Path) -> None:
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.25, 2.0], [1.0, 8.0], [0.5, 4.0]])
    publish(tmp_path, V4, {"w.weight": weight, "w.scale": scales.to(torch.float8_e8m0fnu)})
    state = {"w.weight": torch.zeros(300, 200)}
    assert holdfast.load(state, tmp_path).unasked == ()
    rows, columns = torch.arange(300) // 128, torch.arange(200) // 128
    assert torch.equal(state["w.weight"], weight.float() * scales[rows][:, columns])


def test_bytes_stay_bytes_for_a_state_of_bytes(tmp_path: Path) -> None:
    tensors, _ = in_e2m1("w")
    publish(tmp_path, V4, tensors)
    state = {name: torch.zeros_like(value) for name, value in tensors.items()}
    holdfast.load(state, tmp_path)
    assert all(torch.equal(state[name].view(torch.int8), tensors[name].view(torch.int8)) for name in state)


@pytest.mark.parametrize("way", WAYS)
def test_folders_and_checkpoints_are_the_same_if_they_load_the_same(way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, about, how = WAYS[way]
    tensors, values = make("w", **how)
    publish(tmp_path / "packed", about, tensors)
    publish(tmp_path / "values", None, {"w.weight": values})
    changed = values.clone()
    changed[5, 6] += 1
    publish(tmp_path / "changed", None, {"w.weight": changed})
    huggingface.import_(tmp_path / "packed", tmp_path / "imported", strict=False)
    holdfast.save({"w.weight": values}, tmp_path / "saved")
    places = [tmp_path / name for name in ("packed", "values", "imported", "saved")]
    for a in places:
        for b in places:
            assert holdfast.same(a, b).same, (a, b)
    assert holdfast.same(places[0], holdfast.fingerprint({"w.weight": values})).same
    for a, b in ((places[0], tmp_path / "changed"), (tmp_path / "changed", places[2])):
        (one,) = holdfast.same(a, b, where=True).different
        assert (one.name, one.elements, one.first) == ("w.weight", 1, (5, 6))
    back = {"w.weight": torch.zeros(ROWS, COLUMNS)}
    holdfast.load(back, places[2])
    assert torch.equal(back["w.weight"], values)


def test_the_same_values_in_two_packed_forms_are_the_same(tmp_path: Path) -> None:
    tensors, values = in_whole_numbers("w", group=32)
    half = {**tensors, "w.weight_scale": tensors["w.weight_scale"].repeat_interleave(2, 1)}
    publish(tmp_path / "32", kimi(), tensors)
    publish(tmp_path / "16", kimi(group_size=16), half)
    assert holdfast.same(tmp_path / "32", tmp_path / "16").same
    half["w.weight_scale"] = half["w.weight_scale"].clone()
    half["w.weight_scale"][3, 2] *= 2
    publish(tmp_path / "16", kimi(group_size=16), half)
    (one,) = holdfast.same(tmp_path / "32", tmp_path / "16", where=True).different
    assert one.elements == int((values[3, 32:48] != 0).sum())


REFUSED: dict[str, tuple[dict[str, Any] | None, Tensors, type[HoldfastError], str]] = {
    "another format": (
        {**kimi(), "format": "int-quantized"},
        {},
        BadInput,
        "quantized by compressed-tensors",
    ),
    "not symmetric": (kimi(symmetric=False), {}, BadInput, "quantized by compressed-tensors"),
    "another number of bits": (kimi(num_bits=3), {}, BadInput, "quantized by compressed-tensors"),
    "bits that are no whole number": (kimi(num_bits=4.0), {}, BadInput, "quantized by compressed-tensors"),
    "groups beyond all columns": (
        kimi(group_size=10**30),
        {"scale": torch.ones(ROWS, 1)},
        BadInput,
        "quantized by compressed-tensors",
    ),
    "other groups": (kimi(group_size=16), {}, BadInput, "quantized by compressed-tensors"),
    "no configuration": (None, {}, BadInput, "quantized by GPTQ or AWQ"),
    "an order of its own": (kimi(), {"g_idx": torch.zeros(COLUMNS)}, BadInput, "by compressed-tensors"),
    "zeros": (kimi(), {"zero_point": torch.zeros(ROWS, 3)}, BadInput, "by compressed-tensors"),
    "another shape": (kimi(), {"packed": torch.zeros(ROWS, 8, dtype=torch.int32)}, BadInput, "quantized by"),
    "a scale that is no number": (
        kimi(),
        {"scale": torch.full((ROWS, 3), float("nan"))},
        BadInput,
        "NaN or infinity in the scales 'w.weight_scale'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_and_nothing_is_read(name: str, tmp_path: Path) -> None:
    about, changed, error, sentence = REFUSED[name]
    tensors = in_whole_numbers("w")[0] | {f"w.weight_{part}": value for part, value in changed.items()}
    publish(tmp_path, about, tensors)
    state = {"w.weight": torch.full((ROWS, COLUMNS), 7.0)}
    with pytest.raises(error, match=sentence):
        holdfast.load(state, tmp_path)
    assert (state["w.weight"] == 7).all()


def test_scales_that_are_no_numbers_are_not_imported(tmp_path: Path) -> None:
    for way, part in (("int4", "weight_scale"), ("e2m1", "scale")):
        make, about, how = WAYS[way]
        tensors, _ = make("w", **how)
        publish(tmp_path / way, about, tensors)
        huggingface.import_(tmp_path / way, tmp_path / f"{way} imported", strict=False)
        scales = tensors[f"w.{part}"].float()
        scales[3, 1] = float("nan")
        publish(tmp_path / way, about, {**tensors, f"w.{part}": scales.to(tensors[f"w.{part}"].dtype)})
        with pytest.raises(BadInput, match=f"NaN or infinity in the scales 'w.{part}'"):
            huggingface.import_(tmp_path / way, tmp_path / f"{way} refused", strict=False)


def test_a_state_of_another_shape_or_dtype_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, kimi(), in_whole_numbers("w")[0])
    for state in (
        torch.zeros(ROWS, COLUMNS + 8),
        torch.zeros(ROWS, COLUMNS // 8),
        torch.zeros(ROWS, COLUMNS).int(),
    ):
        with pytest.raises(HoldfastError, match=r"'w.weight'"):
            holdfast.load({"w.weight": state}, tmp_path)
    with pytest.raises(
        ShapeMismatch, match=r"with shape \[48, 96\] in 4 bits, of which 'w.weight' with global"
    ):
        holdfast.load({"w.weight": torch.zeros(ROWS, COLUMNS + 8)}, tmp_path)


def test_bytes_without_such_scales_are_not_taken_for_packed_elements(tmp_path: Path) -> None:
    for scale in (torch.ones(ROWS, 3), torch.ones(ROWS, 1).to(torch.float8_e8m0fnu)):
        publish(tmp_path, None, in_e2m1("w")[0] | {"w.scale": scale})
        with pytest.raises(ShapeMismatch, match="Holdfast does not convert between these"):
            holdfast.load({"w.weight": torch.zeros(ROWS, COLUMNS)}, tmp_path)


LAYER, SIZES = "model.layers.{}.mlp.experts", {"num_hidden_layers": 2, "num_experts": 4, "vocab_size": 16}
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **SIZES,
}


def experts() -> tuple[Tensors, Tensors]:
    """Experts of two layers as they are published, and their values."""
    packed, values = Tensors(), Tensors()
    for layer in range(2):
        for expert in range(4):
            for part, (rows, columns) in {"gate": (64, 32), "up": (64, 32), "down": (32, 64)}.items():
                name = f"{LAYER.format(layer)}.{expert}.{part}_proj"
                some, value = in_whole_numbers(name, rows=rows, columns=columns)
                packed |= some
                values[f"{name}.weight"] = value.bfloat16()
    return packed, values


def test_a_model_that_says_it_for_its_language_model_is_loaded_and_exported(tmp_path: Path) -> None:
    """As Kimi K2.5; the export is in floating point, and its configuration says nothing of whole numbers."""
    packed, values = experts()
    inner = {**MODEL, "quantization_config": kimi()}
    publish(tmp_path / "published", None, packed, model_type="glm4v_moe", text_config=inner)
    plain = MODEL | {"quantization_config": kimi()}
    publish(tmp_path / "plain", None, packed, **plain)
    state = {name: torch.zeros_like(value) for name, value in values.items()}
    for folder in ("published", "plain"):
        for value in state.values():
            value.zero_()
        holdfast.load(state, tmp_path / folder)
        assert all(torch.equal(state[name], value) for name, value in values.items())
    ours = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    part = holdfast.Shard(torch.zeros(1, 1, 40, 20).bfloat16(), (2, 4, 128, 32), (1, 3, 50, 9))
    holdfast.load({ours: part}, tmp_path / "plain", strict=False)
    name = f"{LAYER.format(1)}.3.{{}}_proj.weight"
    both = torch.cat([values[name.format("gate")], values[name.format("up")]])
    assert torch.equal(part.tensor[0, 0], both[50:90, 9:29])
    holdfast.save(values, tmp_path / "saved")
    huggingface.export(tmp_path / "saved", tmp_path / "out", like=tmp_path / "plain")
    assert holdfast.same(tmp_path / "out", tmp_path / "plain").same
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("blocks", [False, True])
def test_all_ranks_together_need_all_that_is_published(blocks: bool) -> None:
    if blocks:  # gpt-oss
        names = {
            f"model.layers.{layer}.mlp.experts.{part}_proj_{kind}"
            for layer in range(2)
            for part in ("gate_up", "down")
            for kind in ("blocks", "scales")
        }
        specs = {name: TensorSpec(name, CODE_OF["uint8"], (4, 64, 2)) for name in names}
        config: dict[str, Any] = {**MODEL, **SIZES, "model_type": "gpt_oss", "num_local_experts": 4}
    else:
        specs = {
            name: TensorSpec(name, CODE_OF[str(value.dtype).removeprefix("torch.")], tuple(value.shape))
            for name, value in experts()[0].items()
        }
        config = MODEL
    view, grid = view_of(config, "config.json"), Grid(4, pp=2, ep=2)
    sizes = sizes_published(view, specs, 16)
    stages = stages_of(grid, sizes.layers, None)
    needs = [of_published(view, specs, share_of(grid, rank, sizes, stages)) for rank in range(4)]
    assert together(needs).boxes.keys() == specs.keys()
    if not blocks:
        assert not together(needs).unknown
        assert all(len(need.boxes) == len(specs) / 4 for need in needs), "of one layer, two experts of four"


def test_what_one_rank_fetches_is_loaded(tmp_path: Path) -> None:
    packed, values = experts()
    publish(tmp_path / "published", kimi(), packed, **MODEL)
    huggingface.fetch(tmp_path / "published", "0", "world=4,pp=2,ep=2", tmp_path / "out")
    ours = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    part = holdfast.Shard(torch.zeros(1, 1, 128, 32).bfloat16(), (2, 4, 128, 32), (0, 1, 0, 0))
    holdfast.load({ours: part}, tmp_path / "out", job=holdfast.Job(no_dist=True))
    name = f"{LAYER.format(0)}.1.{{}}_proj.weight"
    both = torch.cat([values[name.format("gate")], values[name.format("up")]])
    assert torch.equal(part.tensor[0, 0], both)
