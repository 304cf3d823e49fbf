"""The reader of boxes: every element arrives, every block is verified, and no byte is read twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import Array, Columns, pad
from holdfast._core.format.digest import block_sizes, digest
from holdfast._core.io.file_reader import plan_read, read_into
from holdfast._core.io.host_memory import HostMemory
from holdfast._core.layout.box import Box, from_flat_range, whole
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import Reader
from holdfast.errors import CorruptCheckpoint
from holdfast.testing import MemoryStore
from tests.support.boxes import split

FILE = "data.safetensors"


class NoAddress(HostMemory):
    """Memory that bytes can't be read into, as on a GPU."""

    def __init__(self, box: Box, itemsize: int) -> None:
        super().__init__(box, itemsize)
        self.address = 0


class Counting(MemoryStore):
    """A store that notes which bytes are read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []

    def open(self, name: str) -> Reader:
        reader, ranges = super().open(name), self.ranges
        inner = reader.read_into

        def read(start: int, buffers: Sequence[Buffer]) -> int:
            got = inner(start, buffers)
            ranges.append((start, start + got))
            return got

        reader.read_into = read  # type: ignore[method-assign]
        return reader


def stored(
    tensor: Array, chunks: list[Box], block: int | None, changed: int | None = None
) -> tuple[Counting, Columns]:
    """A file of the chunks of a tensor of int32, with digests; `block` in place of the format's rule. The byte
    `changed` is written with another value."""
    store, data, dims = Counting(), b"", tensor.ndim
    parts = [np.ascontiguousarray(tensor[box.slices()]).tobytes() for box in chunks]
    sizes = np.asarray([len(part) for part in parts])
    blocks = block_sizes(sizes, np.zeros_like(sizes)) if block is None else np.full(len(parts), block)
    position, digests, ends = [], [], []
    for part, size in zip(parts, blocks.tolist(), strict=True):
        position.append(len(data))
        digests += [digest(part[low : low + size]) for low in range(0, len(part), size)]
        ends.append(len(digests))
        data += part
    writer = store.create(FILE)
    writer.write_at(0, [data])
    if changed is not None:
        writer.write_at(changed, [bytes([data[changed] ^ 1])])
    writer.finish()
    columns = Columns(
        names=["w"],
        dtype=np.asarray([CODE_OF["int32"]], "u1"),
        kind=np.zeros(1, "u1"),
        ndim=np.asarray([dims], "u1"),
        shape=pad([tensor.shape], dims, 1),
        chunk_end=np.asarray([len(chunks)]),
        offset=pad([box.offset for box in chunks], dims, 0),
        size=pad([box.shape for box in chunks], dims, 1),
        file=np.zeros(len(chunks), "<i4"),
        position=np.asarray(position),
        block=blocks,
        digest_end=np.asarray(ends),
        digests=np.asarray(digests, "<u8"),
        file_names=[FILE],
        file_size=np.asarray([len(data)]),
        file_rank=np.zeros(1, "<i4"),
    )
    return store, columns


def read(
    store: MemoryStore, columns: Columns, boxes: list[Box], memory: type[HostMemory], threads: int
) -> list[Array]:
    table = ShardTable()
    shape = columns.shape_of(0)
    for box in boxes:
        table.add(TensorSpec("w", CODE_OF["int32"], shape), box, (0, 1), False, memory(box, 4))
    plan = plan_read(table, np.zeros(len(boxes), np.int64), columns, "here")
    read_into(store, table, columns, plan, threads, lambda moved: None)
    return [
        one.array.reshape(-1).view("<i4").reshape(box.shape)
        for one, box in zip(table.memory, boxes, strict=True)
    ]  # type: ignore[attr-defined]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box], int]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    chunks = [whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        axis, parts = int(random.integers(len(shape))), int(random.integers(1, 4))
        chunks = [part for box in chunks for part in split(box, axis, parts)]
    chunks.sort()
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        low = [int(random.integers(side)) for side in shape]
        boxes.append(
            Box(
                tuple(low), tuple(int(random.integers(1, s - o + 1)) for o, s in zip(low, shape, strict=True))
            )
        )
    return shape, chunks, boxes, 16 * draw(st.integers(1, 9))


@settings(max_examples=400, deadline=None)
@given(case=cases(), memory=st.sampled_from([HostMemory, NoAddress]), threads=st.integers(1, 2))
def test_every_element_arrives_and_no_byte_is_read_twice(
    case: tuple[tuple[int, ...], list[Box], list[Box], int], memory: type[HostMemory], threads: int
) -> None:
    shape, chunks, boxes, block = case
    tensor = np.arange(np.prod(shape), dtype="<i4").reshape(shape) + 1
    store, columns = stored(tensor, chunks, block)
    found = read(store, columns, boxes, memory, threads)
    for box, values in zip(boxes, found, strict=True):
        assert np.array_equal(values, tensor[box.slices()])
    ranges = sorted(store.ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    # Every block that is read holds a wanted byte.
    starts, wanted = columns.position.tolist(), np.zeros(int(columns.file_size[0]), bool)
    for chunk, start in zip(chunks, starts, strict=True):
        own = np.zeros(chunk.shape, bool)
        for box in boxes:
            if (common := box.intersect(chunk)) is not None:
                own[common.relative_to(chunk.offset).slices()] = True
        wanted[start : start + 4 * chunk.volume] = np.repeat(own.reshape(-1), 4)
    needed = 0
    for start, chunk in zip(starts, chunks, strict=True):
        for low in range(0, 4 * chunk.volume, block):
            part = wanted[start + low : min(start + low + block, start + 4 * chunk.volume)]
            needed += len(part) if part.any() else 0
    assert sum(stop - start for start, stop in ranges) == needed


@pytest.mark.parametrize("memory", [HostMemory, NoAddress])
def test_a_changed_byte_in_any_block_that_is_read_is_found(memory: type[HostMemory]) -> None:
    tensor = np.arange(64 * 64, dtype="<i4").reshape(64, 64)
    box = Box((10, 5), (20, 30))
    blocks = range(10 * 256 // 1024, -(-30 * 256 // 1024))
    for block in range(tensor.nbytes // 1024):
        store, columns = stored(tensor, [whole(tensor.shape)], 1024, changed=block * 1024 + 7)
        if block in blocks:
            with pytest.raises(CorruptCheckpoint, match="'w'"):
                read(store, columns, [box], memory, 1)
        else:
            assert np.array_equal(read(store, columns, [box], memory, 1)[0], tensor[box.slices()])


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8])
def test_a_rank_reads_little_more_than_its_rows(ranks: int) -> None:
    rows, row = 768, 2048
    tensor = np.arange(rows * row, dtype="<i4").reshape(rows, row)
    store, columns = stored(tensor, [whole(tensor.shape)], None)
    most = -(-rows // ranks)
    for low in range(0, rows, most):
        box = Box((low, 0), (min(most, rows - low), row))
        assert np.array_equal(read(store, columns, [box], HostMemory, 1)[0], tensor[box.slices()])
    assert sum(stop - start for start, stop in store.ranges) <= 1.10 * tensor.nbytes


def test_flat_ranges_of_a_distributed_optimizer_arrive() -> None:
    """Megatron's distributed optimizer cuts a tensor at any element: a rank has up to three boxes of it."""
    tensor = np.arange(96 * 100, dtype="<i4").reshape(96, 100)
    store, columns = stored(tensor, [whole(tensor.shape)], 4096)
    boxes = from_flat_range(tensor.shape, 1234, 7777)
    found = read(store, columns, boxes, HostMemory, 1)
    assert np.array_equal(np.concatenate([part.reshape(-1) for part in found]), tensor.reshape(-1)[1234:7777])
