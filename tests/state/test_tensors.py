"""Tensors of every dtype, shape and memory layout come back bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Options, Shard
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.state.flatten import build_shard_table, flatten
from holdfast._core.state.memory import BytesMemory, TensorMemory
from holdfast.errors import BadInput
from tests.support.boxes import split

ALL = [getattr(torch, dtype.name) for dtype in DTYPES if hasattr(torch, dtype.name)]
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (0,), (3, 0, 2), (5, 3), (2, 3, 4))


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes that its values are, whatever its strides."""
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return resolved.view(torch.uint8).tolist() if resolved.numel() else []


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bit patterns: NaN payloads, infinities, subnormals and all."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    count = 1
    for size in shape:
        count *= size
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = {f"{dtype}.{shape}": noise(shape, dtype) for dtype, shape in itertools.product(ALL, SHAPES)}
    holdfast.save(state, tmp_path)
    loaded = {name: noise(tuple(value.shape), value.dtype, 1) for name, value in state.items()}
    report = holdfast.load(loaded, tmp_path)
    assert report.tensors == len(state)
    for name, value in state.items():
        assert loaded[name].dtype == value.dtype
        assert loaded[name].shape == value.shape
        assert bits(loaded[name]) == bits(value), name


def test_the_table_of_dtypes_is_torchs() -> None:
    there = [dtype for dtype in DTYPES if hasattr(torch, dtype.name)]
    assert len(there) >= len(DTYPES) - 1, "torch 2.6 lacks float8_e8m0fnu"
    for dtype in there:
        assert getattr(torch, dtype.name).itemsize == dtype.size


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64],
)
@pytest.mark.parametrize("path", ["direct", "copied"])
def test_nan_payloads_survive(dtype: torch.dtype, path: str, tmp_path: Path) -> None:
    """Signalling and quiet NaNs of both signs, through both ways of reading and writing."""
    raw = torch.full((8, 4 * dtype.itemsize), 0xFF, dtype=torch.uint8)
    raw[:, 0] = torch.arange(1, 9)
    raw[::2, dtype.itemsize - 1] = 0x7F
    value = raw.view(dtype)
    assert value.isnan().any()
    saved = value if path == "direct" else value.t()
    target = torch.zeros_like(value) if path == "direct" else torch.zeros(8, 4, dtype=dtype).t()
    holdfast.save({"a": saved}, tmp_path)
    holdfast.load({"a": target}, tmp_path)
    assert bits(target) == bits(saved)


def layouts() -> dict[str, torch.Tensor]:
    base = noise((6, 8), torch.complex64, 3)
    real = noise((6, 8), torch.float32, 4)
    return {
        "transposed": real.t(),
        "every other": real[::2, 1::3],
        "a column": real[:, 2],
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "flipped": real.flip(0),
        "permuted": noise((2, 3, 4), torch.bfloat16).permute(2, 0, 1),
        "offset": real.reshape(-1)[5:29],
        "conj": base.conj(),
        "conj transposed": base.mH,
        "negative": base.conj().imag,
        "negative in one piece": torch._neg_view(noise((4, 3), torch.float64)),
        "real part": base.real,
        "channels last": noise((2, 3, 4, 5), torch.float32).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(noise((3,), torch.float32)),
        "one element": real[2, 3],
    }


@pytest.mark.parametrize("name", layouts())
def test_any_memory_layout_is_saved(name: str, tmp_path: Path) -> None:
    value = layouts()[name]
    holdfast.save({"a": value}, tmp_path)
    loaded = torch.zeros(value.shape, dtype=value.dtype)
    holdfast.load({"a": loaded}, tmp_path)
    assert bits(loaded) == bits(value)


@pytest.mark.parametrize("name", [name for name in layouts() if name != "expanded"])
def test_any_memory_layout_is_filled_and_nothing_beside_it(name: str, tmp_path: Path) -> None:
    target = layouts()[name].detach()
    value = noise(tuple(target.shape), target.dtype, 9)
    holdfast.save({"a": value}, tmp_path)
    storage = torch.frombuffer(bytearray(target.untyped_storage().nbytes()), dtype=torch.uint8)
    view = torch.empty(0, dtype=target.dtype).set_(
        storage.untyped_storage(), target.storage_offset(), target.shape, target.stride()
    )
    if target.is_conj():
        view = torch._conj(view)
    if target.is_neg():
        view = torch._neg_view(view)
    holdfast.load({"a": view}, tmp_path)
    assert bits(view) == bits(value)
    touched = torch.count_nonzero(storage.view(target.dtype))
    assert int(touched) <= target.numel()


def test_large_tensors_of_many_blocks(tmp_path: Path) -> None:
    value = noise((1500, 1000), torch.float32)
    holdfast.save({"a": value, "t": value.t()}, tmp_path)
    loaded = {"a": torch.zeros(1500, 1000), "t": torch.zeros(1000, 1500)}
    holdfast.load(loaded, tmp_path, job=holdfast.Job(options=Options(writer_threads=2)))
    assert torch.equal(loaded["a"].view(torch.int32), value.view(torch.int32))
    assert torch.equal(loaded["t"].view(torch.int32), value.t().contiguous().view(torch.int32))


@settings(max_examples=25)
@given(data=st.data())
def test_any_shards_load_as_any_other_shards(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("shards")
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex128]))
    value = noise(shape, dtype, 1)

    def cut(tensor: torch.Tensor) -> list[Shard]:
        axis, parts = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
        other = data.draw(st.integers(0, len(shape) - 1))
        boxes = [b for piece in split(whole(shape), axis, parts) for b in split(piece, other, parts)]
        return [Shard(tensor[b.slices()], shape, b.offset) for b in boxes]

    options = Options(
        columns=data.draw(st.sampled_from([(), ("*",)])),
        max_file_bytes=data.draw(st.sampled_from([50, 1 << 30])),
    )
    holdfast.save({"a": cut(value)}, path, job=holdfast.Job(options=options))
    target = torch.zeros(shape, dtype=dtype)
    holdfast.load({"a": cut(target)}, path)
    assert bits(target) == bits(value)
    part = [slice(data.draw(st.integers(0, size - 1)), None) for size in shape]
    small = torch.zeros_like(value[tuple(part)])
    report = holdfast.load({"a": Shard(small, shape, [p.start for p in part])}, path)
    assert bits(small) == bits(value[tuple(part)])
    assert report.bytes_needed == small.numel() * dtype.itemsize


def test_a_slice_reads_about_its_own_bytes(tmp_path: Path) -> None:
    value = noise((4096, 512), torch.float32)
    holdfast.save({"a": value}, tmp_path)
    part = torch.zeros(512, 512)
    report = holdfast.load({"a": Shard(part, (4096, 512), (1024, 0))}, tmp_path)
    assert torch.equal(part.view(torch.int32), value[1024:1536].view(torch.int32))
    assert report.bytes_needed == 1 << 20
    assert report.bytes_read < 1.2 * (1 << 20)


def test_empty_shards_are_ordinary(tmp_path: Path) -> None:
    state = {"a": [Shard(torch.ones(3, 2), (3, 2), (0, 0)), Shard(torch.ones(0, 2), (3, 2), (3, 0))]}
    holdfast.save(state, tmp_path)
    loaded = {"a": [Shard(torch.zeros(0, 2), (3, 2), (1, 0)), Shard(torch.zeros(1, 2), (3, 2), (2, 0))]}
    holdfast.load(loaded, tmp_path)
    assert loaded["a"][1].tensor.tolist() == [[1, 1]]


def test_addresses_are_given_only_where_bytes_lie_right() -> None:
    value = torch.arange(6.0).reshape(2, 3)
    assert TensorMemory(value).address == value.data_ptr()
    assert TensorMemory(value.t()).address == 0
    assert TensorMemory(noise((2,), torch.complex64).conj()).address == 0


def test_memory_gathers_and_scatters_sub_boxes() -> None:
    value = torch.arange(12.0).reshape(3, 4).t()
    out = bytearray(4 * 2 * 2)
    TensorMemory(value).gather(Box((1, 1), (2, 2)), out)
    assert torch.frombuffer(out, dtype=torch.float32).tolist() == value[1:3, 1:3].reshape(-1).tolist()
    target = torch.zeros(4, 3)
    TensorMemory(target.t()).scatter(Box((1, 1), (2, 2)), out, (2, 2), Box((0, 0), (2, 2)))
    assert torch.equal(target.t()[1:3, 1:3], value[1:3, 1:3])
    assert int(target.count_nonzero()) == 4
    text = BytesMemory(b"hello world")
    piece = bytearray(3)
    text.gather(Box((4,), (3,)), piece)
    assert piece == b"o w"
    text.resize(5)
    text.scatter(Box((1,), (3,)), b"xabcx", (5,), Box((1,), (3,)))
    assert text.value(5) == b"\0abc\0"


def test_held_names_and_shapes_are_the_tensors() -> None:
    table, _ = build_shard_table(flatten({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, 0).leaves, 0, (0,))
    assert table.specs[0].shape == (2, 3)
    assert DTYPES[table.specs[0].dtype].name == "bfloat16"


def test_a_tensor_without_elements_may_be_cut_at_a_place_that_is_not_known(tmp_path: Path) -> None:
    whole_one = Shard(torch.empty(5, 0), (5, 0), (None, 0), position=0)
    holdfast.save({"w": whole_one}, tmp_path)
    holdfast.load({"w": whole_one}, tmp_path)
    holdfast.load({"w": torch.empty(5, 0)}, tmp_path)


@pytest.mark.parametrize("shape", [(1 << 62, 0), (1 << 40, 0, 1 << 40), (1,) * 256])
def test_a_shape_that_no_index_can_hold_is_refused_before_anything_is_written(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    tensor = torch.empty(shape) if 0 in shape else torch.ones(1).view(shape)
    with pytest.raises(BadInput, match=r"Rank 0 holds a part of 'w', whose global shape .* is larger than"):
        holdfast.save({"w": tensor}, tmp_path / "it")
    holdfast.save({"w": torch.empty(1 << 50, 0)}, tmp_path / "it")
    assert holdfast.load(tmp_path / "it")["w"].shape == (1 << 50, 0)
