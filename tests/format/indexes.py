"""Indexes to test with: random columns, their content as plain values, and a way to open bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from holdfast._core.format.columns import ITEMSIZE, Columns, pad
from holdfast._core.format.container import read_header
from holdfast._core.format.digest import block_counts, block_sizes
from holdfast._core.format.index import Index
from holdfast._core.layout.tensor import DTYPES, OBJECT

names_of_any_kind = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['a"b', "a\nb", "a\\b", "\0", "层.0", "é", "e\u0301", "\U0001f600", "__metadata__", "a.b", "a/b", ""]
)


def open_bytes(data: bytes, where: str = "the index") -> Index:
    return Index(reader(data), len(data), where)


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, length: data[start : start + length]


def place_of(data: bytes, column: str) -> tuple[int, int]:
    """Where the bytes of a column of an index begin and end in it."""
    header = read_header(reader(data), len(data), "the index")
    low, high = header.entries[column].data_offsets
    return header.data_start + low, header.data_start + high


def build(rows: list[tuple[str, int, int, tuple[int, ...], int]], seed: int = 0, files: int = 2) -> Columns:
    """Columns of `(name, dtype, kind, shape, parts)` rows; each tensor is cut along its first axis."""
    random = np.random.default_rng(seed)
    rows = sorted(rows)
    dims = max((len(row[3]) for row in rows), default=0) or 1
    chunk_end, offsets, sizes, tensor = [], [], [], []
    for at, (_, _, _, shape, parts) in enumerate(rows):
        volume = int(np.prod(shape))
        if volume:
            cuts = (
                np.linspace(0, shape[0], min(parts, shape[0]) + 1).astype(int).tolist() if shape else [0, 1]
            )
            for low, high in pairwise(cuts):
                offsets.append((low, *(0,) * (len(shape) - 1)) if shape else ())
                sizes.append((high - low, *shape[1:]) if shape else ())
                tensor.append(at)
        chunk_end.append(len(tensor))
    dtype = np.asarray([row[1] for row in rows], "u1")
    size = pad(sizes, dims, 1)
    item = ITEMSIZE[dtype[tensor]] if tensor else np.zeros(0, np.int64)
    nbytes = np.prod(size, axis=1) * item
    blocks = block_sizes(nbytes, np.zeros_like(nbytes))
    counts = block_counts(nbytes, blocks)
    file = np.sort(random.integers(0, files, len(tensor)))
    position = np.cumsum(nbytes) - nbytes + 64
    late = [at for at, row in enumerate(rows) if row[3] and row[2] != OBJECT][::2]
    number = {row: at for at, row in enumerate(late)}
    told = len(tensor) * int(random.integers(0, 2))  # an index has fingerprints or it has none
    return Columns(
        names=[row[0] for row in rows],
        dtype=dtype,
        kind=np.asarray([row[2] for row in rows], "u1"),
        ndim=np.asarray([len(row[3]) for row in rows], "u1"),
        shape=pad([row[3] for row in rows], dims, 1),
        chunk_end=np.asarray(chunk_end, "<i8"),
        offset=pad(offsets, dims, 0),
        size=size,
        file=file.astype("<i4"),
        position=position.astype("<i8"),
        block=blocks.astype("<i8"),
        digest_end=np.cumsum(counts, dtype="<i8"),
        digests=random.integers(0, 2**64 - 1, int(counts.sum()), "<u8"),
        file_names=[f"data/{at:04d}-r{at:05d}.safetensors" for at in range(files)],
        file_size=np.full(files, int(nbytes.sum()) + 64, "<i8"),
        file_rank=np.arange(files, dtype="<i4"),
        witness_tensor=np.zeros(1 if rows else 0, "<i8"),
        witness_offset=np.zeros((1 if rows else 0, dims), "<i8"),
        witness_size=np.ones((1 if rows else 0, dims), "<i8"),
        witness_block=np.full(1 if rows else 0, -1, "<i8"),
        witness_digest=np.full(1 if rows else 0, 7, "<u8"),
        fingerprint_first=random.integers(0, 2**64 - 1, told, "<u8"),
        fingerprint_second=random.integers(0, 2**64 - 1, told, "<u8"),
        late_tensor=np.asarray(late, "<i8"),
        late_axis=np.asarray([len(rows[at][3]) - 1 for at in late], "<i8"),
        late_lane=np.asarray([at % 3 for at in late], "<i8"),
        late_position=np.asarray([at % 5 for at in late], "<i8"),
        late_length=np.asarray([at % 7 for at in late], "<i8"),
        late_start=np.asarray([at % 2 - 1 for at in late], "<i8"),
        chunk_late=np.asarray([number.get(at, -1) for at in tensor] if late else [], "<i8"),
        witness_late=np.full(1 if late else 0, -1, "<i8"),
    )


@st.composite
def random_rows(draw: st.DrawFn) -> list[tuple[str, int, int, tuple[int, ...], int]]:
    rows = []
    for name in draw(st.sets(names_of_any_kind, max_size=12)):
        is_object = draw(st.booleans())
        shape = draw(st.lists(st.integers(0, 5), max_size=4)) if not is_object else [draw(st.integers(1, 99))]
        dtype = 0 if is_object else draw(st.integers(0, len(DTYPES) - 1))
        rows.append((name, dtype, OBJECT if is_object else 0, tuple(shape), draw(st.integers(1, 4))))
    return rows


def many(count: int) -> Columns:
    """A tall index: `count` tensors of one or two chunks."""
    return build([(f"model.layers.{i:07d}.weight", 1, 0, (4, 3), 1 + i % 2) for i in range(count)], files=8)


def content(columns: Columns) -> list[Any]:
    """Everything that a reader believes, as plain values."""
    found: list[Any] = [columns.names, columns.file_names, columns.shared]
    numbers = (
        "dtype", "kind", "ndim", "shape", "chunk_end", "offset", "size", "file", "position", "block",
        "digest_end", "digests", "file_size", "file_rank",
        "witness_tensor", "witness_offset", "witness_size", "witness_block", "witness_digest",
        "late_tensor", "late_axis", "late_lane", "late_position", "late_length", "late_start",
        "chunk_late", "witness_late", "fingerprint_first", "fingerprint_second",
    )  # fmt: skip
    return found + [getattr(columns, name).tolist() for name in numbers]


def everything(data: bytes) -> list[Any]:
    """Open bytes and read all of them."""
    index = open_bytes(data)
    return [index.about, *content(index.embedded()), index.find(index.names()).tolist()]
