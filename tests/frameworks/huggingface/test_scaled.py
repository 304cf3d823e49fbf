"""Experts in 4 bits (mxfp4): every cut of them has the bits that transformers makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, MissingTensors, ShapeMismatch
from tests.frameworks.huggingface.models import rewrite, weights

EXPERTS, INPUTS, OUTPUTS = 3, 96, 14
LAYER = "model.layers.0.mlp.experts."
FC1 = "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.experts.experts.linear_fc2.weight"
SHAPE1, SHAPE2 = (EXPERTS, OUTPUTS, INPUTS), (EXPERTS, OUTPUTS, INPUTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(4)

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    tensors = {}
    for name in ("gate_up_proj", "down_proj"):
        tensors[f"{LAYER}{name}_blocks"] = some(EXPERTS, OUTPUTS, INPUTS // 32, 16)
        tensors[f"{LAYER}{name}_scales"] = some(EXPERTS, OUTPUTS, INPUTS // 32)
        # What is too small for a normal number, too large for any, and none.
        tensors[f"{LAYER}{name}_scales"][0, :2] = torch.tensor([[0, 1, 127], [253, 254, 255]])
    rewrite(tmp_path, tensors)
    sizes = {"num_hidden_layers": 1, "num_local_experts": EXPERTS}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **sizes}))
    return tmp_path


def expected(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = weights(folder)
    blocks, scales = (tensors[f"{LAYER}{name}_{part}"] for part in ("blocks", "scales"))
    whole: torch.Tensor = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return whole


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, the sign of zero and what is no number included."""
    kind = {2: torch.int16, 4: torch.int32}[one.element_size()]
    real = one.isnan() & other.isnan()
    bits = one.contiguous().view(kind) == other.contiguous().view(kind)
    return one.dtype == other.dtype and bool((real | bits).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_in_4_bits_are_those_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    names = ["gate_up_proj", "down_proj"]
    state = {LAYER + name: torch.zeros(EXPERTS, INPUTS, OUTPUTS, dtype=dtype) for name in names}
    holdfast.load(state, folder)
    for name in names:
        assert same_bits(state[LAYER + name], expected(folder, name, dtype))


def test_they_are_turned_and_unmixed_for_megatron(folder: Path) -> None:
    state = {name: torch.zeros(SHAPE1, dtype=torch.bfloat16) for name in (FC1, FC2)}
    holdfast.load(state, folder)
    both = expected(folder, "gate_up_proj").mT
    assert same_bits(state[FC1], torch.cat([both[:, ::2], both[:, 1::2]], 1))
    assert same_bits(state[FC2], expected(folder, "down_proj").mT)


@pytest.mark.parametrize("rows", [(0, 14), (3, 9), (8, 5), (6, 1)])
@pytest.mark.parametrize("inputs", [(0, 96), (31, 2), (33, 40), (5, 1), (64, 32), (17, 79)])
def test_a_cut_inside_of_blocks_gets_its_part(
    folder: Path, rows: tuple[int, int], inputs: tuple[int, int]
) -> None:
    """In megatron-core's names, rows of gate and of up, and in transformers'."""
    whole = {name: torch.zeros(SHAPE1, dtype=torch.bfloat16) for name in (FC1, FC2)}
    holdfast.load(whole, folder)
    box = (slice(1, 3), slice(rows[0], sum(rows)), slice(inputs[0], sum(inputs)))
    place = (1, rows[0], inputs[0])
    parts = {
        name: holdfast.Shard(torch.zeros(2, rows[1], inputs[1], dtype=torch.bfloat16), SHAPE1, place)
        for name in (FC1, FC2)
    }
    holdfast.load(parts, folder)
    for name, part in parts.items():
        assert same_bits(part.tensor, whole[name][box])
    ours = torch.zeros(2, inputs[1], rows[1], dtype=torch.bfloat16)
    shard = holdfast.Shard(ours, (EXPERTS, INPUTS, OUTPUTS), (1, inputs[0], rows[0]))
    holdfast.load({f"{LAYER}down_proj": shard}, folder)
    assert same_bits(ours, expected(folder, "down_proj")[box[0], box[2], box[1]])


def test_only_bytes_of_the_rows_that_a_rank_has_are_read(tmp_path: Path) -> None:
    """One expert of eight, of tensors that are larger than what is read at once; and rows that lie in several
    such pieces."""
    experts, rows, inputs = 8, 2048, 4096
    blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (experts, rows, inputs // 32), dtype=torch.uint8)
    rewrite(tmp_path, {f"{LAYER}down_proj_blocks": blocks, f"{LAYER}down_proj_scales": scales})
    shape = (experts, inputs, rows)
    one = holdfast.Shard(torch.zeros(1, inputs, rows, dtype=torch.bfloat16), shape, (3, 0, 0))
    report = holdfast.load({f"{LAYER}down_proj": one}, tmp_path)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    whole = mxfp4.convert_moe_packed_tensors(blocks[2:5], scales[2:5])
    assert same_bits(one.tensor, whole[1:2])
    packed = rows * inputs // 2
    assert packed < report.bytes_read < 1.2 * packed
    some = holdfast.Shard(torch.zeros(2, 500, 1500, dtype=torch.bfloat16), shape, (3, 777, 501))
    holdfast.load({f"{LAYER}down_proj": some}, tmp_path)
    assert same_bits(some.tensor, whole[1:3, 777:1277, 501:2001])


def without(ending: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{LAYER}down_proj{ending}"]

    return spoil


def other(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}down_proj{ending}"] = change(tensors[f"{LAYER}down_proj{ending}"])

    return spoil


SPOILED: dict[str, tuple[Callable[..., None], type[HoldfastError], str]] = {
    "no scales": (without("_scales"), MissingTensors, "in 4 bits, and no '.*down_proj_scales'"),
    "no blocks": (without("_blocks"), MissingTensors, "does not hold 'model.*down_proj', of which"),
    "fewer scales": (
        other("_scales", lambda scales: scales[:, :7]),
        ShapeMismatch,
        r"scales of shape \[3, 7",
    ),
    "scales as numbers": (other("_scales", torch.Tensor.float), ShapeMismatch, "in float32; .* in uint8"),
    "fewer rows": (other("_blocks", lambda blocks: blocks[:, :7]), ShapeMismatch, r"needs \[3, 14, 3, 16\]"),
    "other groups": (
        other("_blocks", lambda blocks: blocks.reshape(3, 14, 6, 8)),
        ShapeMismatch,
        r"shape \[3, 14, 6, 8\]",
    ),
    "8 bits": (other("_blocks", lambda blocks: blocks.view(torch.int8)), ShapeMismatch, "in int8 and"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_experts_in_4_bits_that_do_not_fit_are_refused(what: str, folder: Path) -> None:
    spoil, kind, words = SPOILED[what]
    tensors = weights(folder)
    spoil(tensors)
    rewrite(folder, tensors)
    with pytest.raises(kind, match=words):
        holdfast.load({FC2: torch.zeros(SHAPE2, dtype=torch.bfloat16)}, folder)


def test_4_bits_become_floating_point_only(folder: Path) -> None:
    with pytest.raises(ShapeMismatch, match="4 bits become floating point only"):
        holdfast.load({FC2: torch.zeros(SHAPE2, dtype=torch.int8)}, folder)
    with pytest.raises(ShapeMismatch, match=r"needs \[3, 14, 3, 16\]"):
        holdfast.load({FC2: torch.zeros((EXPERTS, OUTPUTS, INPUTS - 2), dtype=torch.bfloat16)}, folder)
