"""docs/format.md is enough to read a checkpoint: its own reader does, and its tables are the code's."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast._core.format.columns import FINGERPRINTS, LATE
from holdfast._core.format.container import Header, read_header
from holdfast._core.format.digest import block_sizes
from holdfast._core.format.index_layout import FENCE
from holdfast._core.format.index_pages import PAGE
from holdfast._core.format.names import FORMAT, NARROW, SHARED
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.roster.memory import MemoryRoster
from tests.docs.pages import after, table, text
from tests.support.threads import on_ranks

WORLD = 4
ODD = {"nan": float("nan"), "inf": float("-inf"), "keys": {1: "a", (2, 3): b"\x00\xff"}, "!": {"set": {3, 1}}}
PLAIN = {"step": 100, "lr": [1e-3, (2, 3)], "odd": ODD, "c": 1 - 2j, "text": "ä\n", "none": None}

Space = dict[str, Any]


@pytest.fixture(scope="module")
def page() -> Space:
    """What the page's code defines."""
    space: Space = {}
    for block in ("reader", "objects"):
        exec(compile(after(text("docs/format.md"), block), "docs/format.md", "exec"), space)
    return space


def whole(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(shape)))


def every_type() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return {
        d.name: (raw[:, 0:1] % 2).bool() if d.name == "bool" else raw.view(getattr(torch, d.name))
        for d in DTYPES
    }


def state_of(rank: int) -> dict[str, Any]:
    experts, rows = whole("experts", (8, 96, 64)), whole("flat", (10, 7))
    cuts = (0, 1, 1, 6, 10)  # rank 1 holds nothing of it
    return {
        "model": {
            "dense": whole("dense", (300, 200)),
            "wide": whole("wide", (1200, 1024)),
            "experts": holdfast.Shard(
                experts[rank % 2 * 4 : rank % 2 * 4 + 4].clone(),
                experts.shape,
                (rank % 2 * 4, 0, 0),
                (rank // 2, 2),
            ),
            "uneven": holdfast.Shard(
                rows[cuts[rank] : cuts[rank + 1]].clone(), rows.shape, (cuts[rank], 0), (0, 1)
            ),
            "bf16": whole("bf16", (5, 3)).bfloat16(),
            "empty": torch.zeros(0, 5),
            "scalar": torch.tensor(2.5),
        },
        "types": every_type(),
        "many": {f"tensor {at}": torch.full((2,), float(at)) for at in range(600)},  # beyond one fence
        "rng": holdfast.PerRank({"seed": rank, "state": torch.full((3,), rank)}),
        "names": {"__metadata__": torch.ones(1), "a@1,2": torch.zeros(2), "ünï 中": torch.ones(2)},
        **PLAIN,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("format") / "step-00000100")
    options = holdfast.Options(
        split_bytes=20_000, max_file_bytes=400_000, columns=("*",), check_replicas="full"
    )

    def save(roster: MemoryRoster) -> None:
        holdfast.save(
            state_of(roster.rank),
            path,
            step=100,
            notes={"by": "me"},
            job=holdfast.Job(options=options, roster=roster),
        )

    on_ranks(WORLD, save)
    return path


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def test_the_reader_uses_nothing_of_ours() -> None:
    found = set()
    for block in ("reader", "objects"):
        for node in ast.walk(ast.parse(after(text("docs/format.md"), block))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    assert found - set(sys.stdlib_module_names) == {"numpy", "xxhash"}


def test_every_value_is_read(page: Space, saved: str) -> None:
    reader = page["Reader"](saved)
    expected: dict[str, torch.Tensor] = {
        "model.dense": whole("dense", (300, 200)),
        "model.wide": whole("wide", (1200, 1024)),
        "model.experts": whole("experts", (8, 96, 64)),
        "model.uneven": whole("flat", (10, 7)),
        "model.bf16": whole("bf16", (5, 3)).bfloat16(),
        "model.empty": torch.zeros(0, 5),
        "model.scalar": torch.tensor(2.5),
        **{f"types.{name}": value for name, value in every_type().items()},
        **{f"many.tensor {at}": torch.full((2,), float(at)) for at in range(600)},
        **{f"rng@{rank}.state": torch.full((3,), rank) for rank in range(WORLD)},
        "names.__metadata__": torch.ones(1),
        "names.a@1,2": torch.zeros(2),
        "names.ünï 中": torch.ones(2),
    }
    for name, value in expected.items():
        found = reader.read(name)
        assert found.shape == tuple(value.shape), name
        assert found.tobytes() == raw(value), name
    assert reader.read("model.bf16").dtype == np.uint16
    objects: dict[str, Any] = {name: value for name, value in PLAIN.items() if name != "odd"}
    objects |= {f"rng@{rank}.seed": rank for rank in range(WORLD)}
    for name, value in objects.items():
        assert page["decode"](reader.read(name).tobytes()) == value, name
    assert set(reader.names) >= set(expected) | set(objects)
    with pytest.raises(KeyError):
        reader.read("model.dens")


def test_several_ranks_files_and_panels_took_part(page: Space, saved: str) -> None:
    """What the test above read was not the simple case."""
    reader = page["Reader"](saved)
    assert set(reader.column["file_rank"].tolist()) == set(range(WORLD))
    assert len(reader.files) > WORLD
    assert len(reader.column["fence_end"]) > 2
    for name, axis in (("model.wide", 1), ("model.experts", 0)):
        chunks = range(*reader.rows("chunk_end", reader.names.index(name)))
        cut = int(reader.meta["dims"]) - int(reader.column["ndim"][reader.names.index(name)])
        assert len({int(reader.column["offset"][at, cut + axis]) for at in chunks}) > 1


@pytest.mark.parametrize("value", list(PLAIN.values()) + list(ODD.values()), ids=repr)
def test_objects_are_decoded(page: Space, tmp_path: Path, value: Any) -> None:
    holdfast.save({"x": [value], "t": (value,)}, tmp_path / "s", job=holdfast.Job(no_dist=True))
    reader = page["Reader"](str(tmp_path / "s"))
    assert repr(page["decode"](reader.read("x").tobytes())) == repr([value])
    assert repr(page["decode"](reader.read("t").tobytes())) == repr((value,))


def test_every_flipped_byte_is_caught_or_read_by_nobody(page: Space, saved: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    reader = page["Reader"](str(copy))
    clean = {name: reader.read(name).tobytes() for name in reader.names}
    rng = random.Random(3)

    def flip(path: Path, at: int) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))

    index = copy / "index.safetensors"
    for _ in range(60):
        at = rng.randrange(os.path.getsize(index))
        kept = index.read_bytes()
        flip(index, at)
        with pytest.raises(ValueError):
            page["Reader"](str(copy))
        index.write_bytes(kept)
    for _ in range(40):
        row = rng.randrange(len(reader.names))
        first, last = reader.rows("chunk_end", row)
        if first == last:
            continue
        chunk = rng.randrange(first, last)
        nbytes = int(np.prod(reader.column["size"][chunk])) * DTYPES[reader.column["dtype"][row]].size
        path = copy / reader.files[reader.column["file"][chunk]]
        at = int(reader.column["position"][chunk]) + rng.randrange(nbytes)
        byte = path.read_bytes()[at]
        flip(path, at)
        with pytest.raises(ValueError, match="damaged checkpoint: data/"):
            reader.read(reader.names[row])
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    assert {name: reader.read(name).tobytes() for name in reader.names} == clean


def test_a_link_out_of_the_folder_is_not_followed(page: Space, saved: str, tmp_path: Path) -> None:
    shutil.copy(f"{saved}/index.safetensors", tmp_path)
    os.symlink(f"{saved}/data", tmp_path / "data")
    with pytest.raises(ValueError, match="leads out of the folder"):
        page["Reader"](str(tmp_path)).read("model.dense")


def header_of(path: str) -> Header:
    with open(path, "rb") as file:
        data = file.read()
    return read_header(lambda start, length: data[start : start + length], len(data), path)


def test_the_table_of_late_bound_shards(tmp_path: Path) -> None:
    rows = {row[0]: (row[1], row[2]) for row in table(text("docs/format.md"), "columns")}
    part = holdfast.Shard(torch.ones(5, 2), (5, 2), (None, 0), position=0)
    holdfast.save({"w": part, "x": torch.ones(1)}, tmp_path, job=holdfast.Job(no_dist=True))
    (file,) = (tmp_path / "data").iterdir()
    data = file.read_bytes()
    whole = header_of(str(file))
    start, stop = (whole.data_start + at for at in whole.entries["__holdfast__"].data_offsets)
    inside = data[start:stop]
    header = read_header(lambda at, length: inside[at : at + length], len(inside), "the embedded index")
    counts = {"L": 1, "C": 2, "W": 0}
    for name in LATE:
        tag, shape = rows[name]
        assert (header.entries[name].dtype, header.entries[name].shape) == (tag, (counts[shape],)), name


def test_the_table_of_columns(page: Space, saved: str) -> None:
    rows = {row[0]: (row[1], row[2]) for row in table(text("docs/format.md"), "columns")}
    reader, header = page["Reader"](saved), header_of(f"{saved}/index.safetensors")
    rows = {name: row for name, row in rows.items() if name not in (*LATE, *FINGERPRINTS)}  # a plain file
    assert set(rows) == set(header.entries)
    dims = int(reader.meta["dims"])
    counts = {
        "T": len(reader.names),
        "C": len(reader.column["file"]),
        "G": len(reader.column["digests"]),
        "F": len(reader.files),
        "W": 0,
        "T/256 up": -(-len(reader.names) // FENCE),
        "2": 2,
        "pages": -(-header.entries["pages"].data_offsets[0] // PAGE),
    }
    for name, (tag, shape) in rows.items():
        entry = header.entries[name]
        narrower = ("U8", "U16", "U32") if tag in ("I64", "I32") else ()
        assert entry.dtype in (tag, *narrower), name
        if shape != "bytes":
            wide = (dims,) if shape.endswith(" x d") else ()
            assert entry.shape == (counts[shape.removesuffix(" x d")], *wide), name
    assert {"offset", "file"}.isdisjoint(
        name for name in rows if header.entries[name].dtype in ("I64", "I32")
    )
    assert header.metadata["format"] == NARROW
    assert list(header.entries)[-3:] == ["padding", "pages", "seal"]
    assert header.metadata.keys() == {"format", "dims", "about"}


def test_the_table_of_types() -> None:
    rows = table(text("docs/format.md"), "dtypes")
    told = [
        (int(code), name, int(size), tag.removesuffix(", twice"), 2 if tag.endswith("twice") else 1)
        for code, name, size, tag in rows
    ]
    assert told == [(code, *dtype) for code, dtype in enumerate(DTYPES)]


def test_numbers_on_the_page() -> None:
    page = text("docs/format.md")
    assert f"`{FORMAT}`" in page
    assert f"`{NARROW}`" in page
    assert f"PAGE = {PAGE}\n" in page
    assert f"{PAGE} bytes, the last one shorter" in page
    assert FENCE == 256

    def rule(nbytes: int, row: int) -> int:
        """The page's sentence about blocks, word by word."""
        if nbytes < 128 << 10:
            return max(nbytes, 1)
        parts = 2
        while nbytes >= 2 * parts * (64 << 10) and (parts < 64 or nbytes > parts * (256 << 10)):
            parts *= 2
        size = -(-nbytes // (16 * parts)) * 16
        return -(-size // row) * row if row <= 256 << 10 else size

    rng = random.Random(0)
    for _ in range(2000):
        row, rows = (
            rng.choice([1, 2, 3, 100, 4096, 5_000_001]) * rng.randrange(1, 900),
            rng.randrange(2, 3000),
        )
        assert block_sizes(np.asarray([row * rows]), np.asarray([row]))[0] == rule(row * rows, row)


def test_the_embedded_index_is_an_index(page: Space, saved: str, tmp_path: Path) -> None:
    reader, witnesses = page["Reader"](saved), 0
    about = {"step", "grid", "notes", "attempt", "ranks"}
    assert set(json.loads(reader.meta["about"])) == about | {"created", "versions", "metadata_beside"}
    for key in (*about, "created", "versions", "metadata_beside", "rank", "part", "parts"):
        assert f"`{key}`" in text("docs/format.md")
    shutil.copytree(f"{saved}/data", tmp_path / "data")
    for name in reader.files:
        header = header_of(f"{saved}/{name}")
        low, high = header.entries["__holdfast__"].data_offsets
        data = Path(saved, name).read_bytes()[header.data_start :]
        (tmp_path / "index.safetensors").write_bytes(data[low:high])
        alone = page["Reader"](str(tmp_path))
        assert alone.files == [name]
        assert set(json.loads(alone.meta["about"])) == about | {"rank", "part", "parts"}
        attempt = json.loads(alone.meta["about"])["attempt"]
        assert re.fullmatch(rf"data/{attempt}-r\d{{5}}(-\d{{3}})?\.safetensors", name)
        witnesses += len(alone.column["witness_digest"])
        for row, tensor in enumerate(alone.names):
            for chunk in range(*alone.rows("chunk_end", row)):
                nbytes = (
                    int(np.prod(alone.column["size"][chunk])) * DTYPES[int(alone.column["dtype"][row])].size
                )
                assert len(alone.verified(chunk, nbytes)) == nbytes, tensor
    assert witnesses > 0


def test_data_files_are_as_told(page: Space, saved: str) -> None:
    reader = page["Reader"](saved)
    for name in reader.files:
        header = header_of(f"{saved}/{name}")
        assert header.metadata["format"] == FORMAT
        assert header.metadata.keys() == {"format", "rank"}
        assert list(header.entries)[-1] == "__holdfast__"
        ends = 0
        for entry in header.entries.values():
            assert entry.data_offsets[0] == ends
            ends = entry.data_offsets[1]
        assert header.data_start % 64 == 0
    listed = [name for file in reader.files for name in header_of(f"{saved}/{file}").entries]
    assert "model.wide@0,128" in listed
    assert "types.complex64" in listed


def test_the_pages_reader_reads_tied_tensors_under_both_names(page: Space, tmp_path: Path) -> None:
    one = whole("tied", (300, 200))
    holdfast.save({"a": one, "b": one}, tmp_path, job=holdfast.Job(no_dist=True))
    reader = page["Reader"](str(tmp_path))
    assert reader.meta["format"] == SHARED
    assert np.array_equal(reader.read("a"), one.numpy())
    assert np.array_equal(reader.read("b"), one.numpy())
