"""A real checkpoint to harm, ways to harm it, and what must then be true."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import Options, PerRank, Shard
from holdfast._core.format.columns import Columns
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast.errors import HoldfastError

SHAPE = (96, 40)


def values() -> dict[str, Any]:
    """Matrices in panels and blocks, vectors, scalars, odd dtypes, objects of both encodings."""
    generator = torch.Generator().manual_seed(11)
    big = torch.randn(600, 64, generator=generator)
    return {
        "big": big,
        "turned": torch.randn(SHAPE, generator=generator).t(),
        "half": torch.randn(33, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "shards": [Shard(big[at : at + 50, :7].contiguous(), (100, 7), (at, 0)) for at in (0, 50)],
        "step": 17,
        "args": ["text", (1, 2.5), None],
        "rng": PerRank([torch.arange(9), "x"]),
        "sizes": [torch.Size([1, 2])],
    }  # fmt: skip


def blank() -> dict[str, Any]:
    """The same names with other values."""
    return {
        "big": torch.zeros(600, 64),
        "turned": torch.zeros(SHAPE).t(),
        "half": torch.zeros(33, dtype=torch.bfloat16),
        "scalar": torch.zeros((), dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "shards": torch.zeros(100, 7),
        "step": None,
        "args": None,
        "rng": PerRank([torch.zeros(9, dtype=torch.int64), ""]),
        "sizes": None,
    }


def write(folder: Path) -> None:
    """Several data files, small enough that a flip hits each kind of byte."""
    holdfast.save(values(), folder, step=17, job=holdfast.Job(options=Options(max_file_bytes=60_000)))


def read(folder: Path) -> dict[str, Any]:
    state = blank()
    holdfast.load(state, folder, job=holdfast.Job(timeout=30))
    return state


def is_right(state: dict[str, Any]) -> bool:
    good = values()
    shards = torch.cat([shard.tensor for shard in good["shards"]])
    tensors = ("big", "turned", "half", "scalar", "empty")
    return (
        all(torch.equal(state[name], good[name]) for name in tensors)
        and torch.equal(state["shards"], shards)
        and all(state[name] == good[name] for name in ("step", "args", "sizes"))
        and torch.equal(state["rng"].value[0], torch.arange(9))
        and state["rng"].value[1] == "x"
    )


def outcome(folder: Path) -> HoldfastError | None:
    """The error of a load, or None if every value was right; anything else is a failure."""
    try:
        state = read(folder)
    except HoldfastError as error:
        return error
    assert is_right(state), "a load returned wrong values as good ones"
    return None


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below a folder with what it is."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = "folder" if path.is_dir() else "other"
    return found


def columns_of(folder: Path) -> tuple[Columns, dict[str, Any]]:
    data = (folder / "index.safetensors").read_bytes()
    index = Index(lambda start, length: data[start : start + length], len(data), "index")
    return index.select(), index.about


def forge(folder: Path, change: Callable[[Columns], object], about: dict[str, Any] | None = None) -> None:
    """An index that says something else, under digests that are right."""
    columns, said = columns_of(folder)
    for name, value in vars(columns).items():
        if hasattr(value, "copy"):
            setattr(columns, name, value.copy())
    change(columns)
    (folder / "index.safetensors").write_bytes(encode(columns, said if about is None else about))


def rows_of(columns: Columns, name: str) -> tuple[int, slice]:
    """A tensor's row, and its chunks' rows."""
    row = columns.names.index(name)
    return row, slice(int(columns.chunk_end[row - 1]) if row else 0, int(columns.chunk_end[row]))
