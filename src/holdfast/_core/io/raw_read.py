"""Read verified bytes of stored tensors into memory, without torch, to inspect, compare or convert them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast._core.format.columns import Array, Columns
from holdfast._core.io.file_reader import plan_read, read_into
from holdfast._core.io.host_memory import HostMemory
from holdfast._core.io.source import Source
from holdfast._core.layout.box import Box, from_flat_range, whole
from holdfast._core.layout.tensor import DTYPES, listed
from holdfast._core.plan.agreement import what
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import Store
from holdfast.errors import MissingTensors, ShapeMismatch

SLAB = 64 << 20
"""Maximum number of bytes to inspect or compare at once, to bound the memory."""


def read_box(store: Store, columns: Columns, box: Box, where: str, fetched_for: str = "") -> Array:
    """Return the bytes of a box of the single tensor in `columns`, every block verified. fetched_for: as in
    `plan_read`."""
    spec = columns.spec_of(0)
    memory = HostMemory(box, DTYPES[spec.dtype].size)
    if box.volume:
        # Read as a shard of a rank, so that it goes through the same reader as a load.
        table = ShardTable()
        table.add(spec, box, (0, 1), False, memory)
        plan = plan_read(table, np.zeros(1, np.int64), columns, where, fetched_for)
        read_into(store, table, columns, plan, 1, lambda moved: None)
    return memory.array.reshape(-1)


def read_all(store: Store, columns: Columns, where: str) -> bytes:
    """Return all bytes of the single tensor (or object) in `columns`."""
    return read_box(store, columns, whole(columns.shape_of(0)), where).tobytes()


def fill_rows(store: Store, source: Source, table: ShardTable, threads: int = 1) -> None:
    """Read and verify the contents of the rows of a shard table. Rows have the names of `source`."""
    rows = source.find([spec.name for spec in table.specs])
    if (rows < 0).any():
        missing = sorted({table.specs[row].name for row in np.flatnonzero(rows < 0).tolist()})
        raise MissingTensors(
            f"{source.where} does not hold {listed(missing)}.", details={"missing": missing[:100]}
        )
    chosen, position = np.unique(rows, return_inverse=True)
    columns = source.select(chosen)
    for spec, row in zip(table.specs, position.tolist(), strict=True):
        stored = columns.spec_of(row)
        if stored != spec:
            raise ShapeMismatch(
                f"{source.where} holds {spec.name!r} as {what(stored)}, and {what(spec)} is wanted.",
                details={"tensor": spec.name},
            )
    plan = plan_read(table, position, columns, source.where, source.fetched_for)
    read_into(store, table, columns, plan, threads, lambda moved: None)


def slabs(box: Box, itemsize: int, limit: int = SLAB) -> Iterator[Box]:
    """Yield pieces of a box of at most `limit` bytes, in row-major order."""
    step = max(limit // itemsize, 1)
    for low in range(0, box.volume, step):
        for part in from_flat_range(box.shape, low, min(low + step, box.volume)):
            yield Box(tuple(a + b for a, b in zip(part.offset, box.offset, strict=True)), part.shape)
