"""Which tensors of a checkpoint take the place of a published one: by kind of dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from holdfast.huggingface import export
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights

pytest.importorskip("transformers")
WEIGHT = "model.layers.1.mlp.up_proj.weight"
NOT_FLOATS = [torch.int8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    publish(TINY["llama"], tmp_path / "model")
    return tmp_path / "model"


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    holdfast.save(tensors, folder)
    return folder


@pytest.mark.parametrize("dtype", NOT_FLOATS)
def test_other_elements_do_not_take_the_place_of_floating_point(
    dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    tensors = weights(model)
    tensors[WEIGHT] = (tensors[WEIGHT] * 100).to(dtype)
    step, name = saved(tensors, tmp_path / "step"), str(dtype).removeprefix("torch.")
    for asked in (None, "bfloat16"):
        with pytest.raises(BadInput, match=rf"holds '{WEIGHT}' in {name}, and .* published in float32 in"):
            export(step, tmp_path / "out", like=model, dtype=asked)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_nor_those_of_weights_that_only_a_table_names(
    dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    tensors = weights(model)
    rewrite(model, tensors)
    (model / "model.safetensors").unlink()
    tensors[WEIGHT] = (tensors[WEIGHT] * 100).to(dtype)
    with pytest.raises(
        BadInput, match="published as floating point without weights there that say otherwise"
    ):
        export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=model, strict=False)


@pytest.mark.parametrize("dtype", NOT_FLOATS)
def test_a_tensor_that_is_published_in_its_dtype_is_written_in_it(
    dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    tensors = weights(model)
    tensors[WEIGHT] = (tensors[WEIGHT] * 100).to(dtype)
    rewrite(model, tensors)
    export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=model, dtype="bfloat16")
    after = weights(tmp_path / "out")
    assert after[WEIGHT].dtype == dtype
    assert torch.equal(after[WEIGHT].view(torch.uint8), tensors[WEIGHT].view(torch.uint8))


def test_floating_point_does_not_take_the_place_of_whole_numbers(model: Path, tmp_path: Path) -> None:
    """It was rounded to the dtype that the configuration says."""
    tensors = weights(model)
    rewrite(model, {**tensors, WEIGHT: (tensors[WEIGHT] * 100).long()})
    with pytest.raises(
        BadInput, match=r"in float32, and .* published in int64 .* convert floating point to wh"
    ):
        export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=model)


def test_a_mask_of_booleans_takes_the_place_of_one_of_bytes(model: Path, tmp_path: Path) -> None:
    tensors = weights(model)
    rewrite(model, {**tensors, WEIGHT: (tensors[WEIGHT] > 0).byte()})
    tensors[WEIGHT] = tensors[WEIGHT] > 0
    export(saved(tensors, tmp_path / "step"), tmp_path / "out", like=model)
    assert weights(tmp_path / "out")[WEIGHT].dtype == torch.bool


def test_of_a_quantized_model_indices_are_exported_and_no_quantized_elements(
    model: Path, tmp_path: Path
) -> None:
    """With and without a configuration that says so: scales lie beside the weight."""
    tensors = weights(model)
    indices = (tensors[WEIGHT] * 100).long()
    other = WEIGHT.replace("up_proj", "gate_proj")
    in_8_bits = tensors[other].to(torch.float8_e4m3fn)
    scales = {other + "_scale_inv": torch.ones(1, 1)}
    rewrite(model, {**tensors, WEIGHT: indices, other: in_8_bits, **scales})
    step = saved({**tensors, WEIGHT: indices}, tmp_path / "step")
    spoiled = saved({**tensors, WEIGHT: indices, other: in_8_bits}, tmp_path / "spoiled")
    for quantization in (None, {"quant_method": "fp8"}):
        edit_config(model, quantization_config=quantization)
        out = tmp_path / str(quantization is None)
        export(step, out, like=model)
        assert weights(out)[other].dtype == torch.float32
        with pytest.raises(BadInput, match="is quantized: such weights are not exported"):
            export(spoiled, tmp_path / "out", like=model)
