"""Published folders that are not what they say: one sentence, and nothing is taken for what it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError, NotCommitted, StorageError
from tests.frameworks.huggingface import jobs
from tests.frameworks.huggingface.models import TINY, edit_config, publish, rewrite, weights
from tests.support.processes import ProcessWorld

pytest.importorskip("transformers")
INDEX = "model.safetensors.index.json"
FC1 = "model.layers.2.mlp.experts.5.gate_proj.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "model"
    publish(TINY["qwen3_moe"], folder)
    return folder


def drop_an_expert(folder: Path) -> None:
    tensors = weights(folder)
    rewrite(folder, {name: value for name, value in tensors.items() if ".experts.5." not in name})


def cut_a_tensor(folder: Path) -> None:
    tensors = weights(folder)
    rewrite(folder, {**tensors, FC1: tensors[FC1][:8]})


def forget_scales(folder: Path) -> None:
    tensors = weights(folder)
    rewrite(folder, {**tensors, FC1: tensors[FC1].to(torch.float8_e4m3fn)})


def break_a_tie(folder: Path) -> None:
    tensors = weights(folder)
    rewrite(folder, {name: value for name, value in tensors.items() if name != "lm_head.weight"})
    edit_config(folder, tie_word_embeddings=False)


def in_another_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = weights(folder)
        rewrite(folder, {**tensors, FC1: tensors[FC1].to(dtype)})

    return spoil


def with_scales(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = weights(folder)
        scales = {f"{FC1}_scale_inv": torch.ones(shape).to(dtype)}
        rewrite(folder, {**tensors, FC1: tensors[FC1].to(torch.float8_e4m3fn), **scales})

    return spoil


def quantized(method: str | None, *forms: tuple[str, torch.dtype]) -> Callable[[Path], None]:
    """As a quantizer leaves a folder: in the place of a weight, tensors with these endings."""

    def spoil(folder: Path) -> None:
        tensors = weights(folder)
        del tensors[FC1]
        made = {FC1.removesuffix("weight") + ending: torch.zeros(16, 32).to(dtype) for ending, dtype in forms}
        rewrite(folder, {**tensors, **made})
        if method is not None:
            edit_config(folder, quantization_config={"quant_method": method})

    return spoil


GPTQ = [("qweight", torch.int32), ("qzeros", torch.int32), ("scales", torch.float16), ("g_idx", torch.int32)]
PACKED = [("weight_packed", torch.int32), ("weight_scale", torch.bfloat16), ("weight_shape", torch.int64)]
QUANTIZED = {
    "GPTQ": (quantized("gptq", *GPTQ), "qweight' quantized by gptq, which Holdfast does not read"),
    "AWQ": (quantized("awq", *GPTQ[:3]), "qweight' quantized by awq, which"),
    "GPTQ of old": (quantized(None, *GPTQ), "qweight' quantized by GPTQ or AWQ, which"),
    "compressed-tensors": (quantized("compressed-tensors", *PACKED), "_packed' quantized by compressed-tens"),
    "compressed-tensors in e4m3": (
        quantized("compressed-tensors", ("weight", torch.float8_e4m3fn), ("weight_scale", torch.float32)),
        "gate_proj.weight' quantized by compressed-tensors",
    ),
    "compressed-tensors in int8": (
        quantized("compressed-tensors", ("weight", torch.int8), ("weight_scale", torch.float32)),
        "gate_proj.weight' quantized by compressed-tensors",
    ),
    "bitsandbytes": (
        quantized("bitsandbytes", ("weight", torch.uint8), ("weight.absmax", torch.float32)),
        "gate_proj.weight' quantized by bitsandbytes",
    ),
}
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "whole numbers": (in_another_dtype(torch.int8), "Holdfast does not convert between these"),
    "other 8 bits": (in_another_dtype(torch.float8_e5m2), "Holdfast does not convert between these"),
    "scales of fewer rows": (with_scales((15, 1)), "holds scales of shape [15, 1]"),
    "two scales": (with_scales((2,)), "holds scales of shape [2]"),
    "scales that are no numbers": (with_scales((1, 1), torch.uint8), "in uint8"),
    "no words": (lambda folder: edit_config(folder, vocab_size=0), "says vocab_size=0, which no model has"),
    "no groups": (lambda folder: edit_config(folder, num_key_value_heads=0), "num_key_value_heads=0"),
    "a type that is a list": (lambda folder: edit_config(folder, model_type=["qwen3"]), "which model_type"),
    "a config in another code": (
        lambda folder: (folder / "config.json").write_bytes(b'{"a": "\xff"}'),
        "config.json can't be read",
    ),
    "the output is missing": (break_a_tie, "does not hold 'lm_head.weight', of which 'output_layer.weight'"),
    "an expert is missing": (drop_an_expert, "does not hold 'model.layers.0.mlp.experts.5.gate_proj.weight'"),
    "a tensor is cut": (cut_a_tensor, "'model.layers.2.mlp.experts.5.gate_proj.weight' with shape [8, 32]"),
    "scales are missing": (
        forget_scales,
        "in 8 bits, and no 'model.layers.2.mlp.experts.5.gate_proj.weight_",
    ),
    "more layers": (
        lambda folder: edit_config(folder, num_hidden_layers=6),
        "has 4 layers, and the published",
    ),
    "more experts": (lambda folder: edit_config(folder, num_experts=16), "has 8 experts, and the published"),
    "more words": (
        lambda folder: edit_config(folder, vocab_size=120),
        "has 120 rows, and the model has only",
    ),
    "fewer words": (lambda folder: edit_config(folder, vocab_size=90), "with shape [100, 32]"),
    "another family": (
        lambda folder: edit_config(folder, model_type="qwen3_mo"),
        "nearest that it has is 'qwen",
    ),
    "another type": (lambda folder: edit_config(folder, model_type="mixtral"), "block_sparse_moe"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "of the names in the state"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), "config.json can't be read"),
    **QUANTIZED,
}


def test_a_spoiled_folder_is_refused_with_one_sentence(good: Path, tmp_path: Path) -> None:
    folders = []
    for number, (spoil, _) in enumerate(SPOILED.values()):
        folders.append(tmp_path / str(number))
        shutil.copytree(good, folders[-1])
        spoil(folders[-1])
    with ProcessWorld(1) as world:
        said = world.run(jobs.try_to_load, "qwen3_moe", [str(good), *map(str, folders)], timeout=120)[0]
    assert said[0] == "loaded"
    for (what, (_, expected)), sentence in zip(SPOILED.items(), said[1:], strict=True):
        assert expected in sentence, (what, sentence)


@pytest.mark.parametrize("what", QUANTIZED)
def test_a_quantized_weight_is_named_to_those_who_use_published_names(
    what: str, good: Path, tmp_path: Path
) -> None:
    spoil, expected = QUANTIZED[what]
    shutil.copytree(good, tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(BadInput, match=expected):
        holdfast.load({FC1: torch.zeros(16, 32)}, tmp_path / "model", job=holdfast.Job(no_dist=True))
    # What was not quantized is read.
    norm = {"model.norm.weight": torch.zeros(32)}
    holdfast.load(norm, tmp_path / "model", job=holdfast.Job(no_dist=True))
    assert norm["model.norm.weight"].any()


def change_map(folder: Path, file: str) -> None:
    path = folder / INDEX
    value = json.loads(path.read_text())
    value["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(value))


def truncate(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


HOSTILE: dict[str, tuple[Callable[[Path], object], type[HoldfastError], str]] = {
    "a way out": (
        lambda folder: change_map(folder, "../x.safetensors"),
        CorruptCheckpoint,
        "no safetensors file",
    ),
    "a folder": (
        lambda folder: change_map(folder, "a/x.safetensors"),
        CorruptCheckpoint,
        "no safetensors file",
    ),
    "another file": (
        lambda folder: change_map(folder, sorted(p.name for p in folder.glob("*.safetensors"))[0]),
        CorruptCheckpoint,
        "which .* says is in model-00001-of-",
    ),
    "a file that is not there": (
        lambda folder: min(folder.glob("*.safetensors")).unlink(),
        CorruptCheckpoint,
        "is missing",
    ),
    "a truncated file": (truncate, CorruptCheckpoint, "truncated"),
    "an index of nothing": (
        lambda folder: (folder / INDEX).write_text("[]"),
        CorruptCheckpoint,
        "can't be read",
    ),
    "no weights": (lambda folder: (folder / INDEX).unlink(), NotCommitted, "no committed checkpoint"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_folder_is_damage(what: str, good: Path, tmp_path: Path) -> None:
    spoil, kind, words = HOSTILE[what]
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil(folder)
    state = {name: torch.empty_like(value) for name, value in weights(good).items()}
    with pytest.raises(kind, match=words):
        holdfast.load(state, folder)


def test_files_of_the_cache_are_links_to_its_blobs_and_no_others_are_followed(
    good: Path, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1f3a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in good.iterdir():
        shutil.copy(path, blobs / f"{path.name}-hash")
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}-hash")
    expected = weights(good)
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    holdfast.load(state, snapshot)
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    first = min(snapshot.glob("*.safetensors"))
    shutil.copy(first, tmp_path / "elsewhere")
    first.unlink()
    first.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="a link that leaves its folder"):
        holdfast.load(state, snapshot)


def test_elements_in_8_bits_are_multiplied_by_the_scales_of_their_blocks(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2) + 0.5
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    expected = weight.float() * scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    state = {"w": {"weight": torch.zeros(300, 200)}}
    holdfast.load(state, tmp_path)
    assert torch.equal(state["w"]["weight"], expected)
    part = holdfast.Shard(torch.zeros(100, 60), (300, 200), (150, 120))
    holdfast.load({"w.weight": part}, tmp_path)
    assert torch.equal(part.tensor, expected[150:250, 120:180])
    as_it_is = {"w.weight": torch.zeros(300, 200, dtype=torch.float8_e4m3fn)}
    holdfast.load(as_it_is, tmp_path)
    assert torch.equal(as_it_is["w.weight"].float(), weight.float())


@pytest.mark.parametrize("sides", [[0, 128], [128, -1], [128, "128"], [1.5, 2], "128", {}])
def test_blocks_of_scales_that_are_no_shape_are_refused(sides: object, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"w.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, tmp_path / "model.safetensors")
    about = {"quant_method": "fp8", "weight_block_size": sides}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "quantization_config": about})
    )
    with pytest.raises(BadInput, match=r"weight_block_size=.* in config\.json is no shape"):
        holdfast.load({"w.weight": torch.zeros(8, 8)}, tmp_path)


def test_scales_of_a_sparse_file_are_not_read_into_memory(tmp_path: Path) -> None:
    wide = 1 << 29
    places = {
        "w.weight": {"dtype": "F8_E4M3", "shape": [1, wide], "data_offsets": [0, wide]},
        "w.weight_scale_inv": {"dtype": "F32", "shape": [1, wide], "data_offsets": [wide, 5 * wide]},
    }
    header = json.dumps(places).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 5 * wide)
    about = {"quant_method": "fp8", "weight_block_size": [1, 1]}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "quantization_config": about})
    )
    part = holdfast.Shard(torch.zeros(1, 16), (1, wide), (0, 0))
    with pytest.raises(CorruptCheckpoint, match=r"w\.weight_scale_inv"):
        holdfast.load({"w.weight": part}, tmp_path)
