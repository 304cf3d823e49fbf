"""Read verified bytes of stored tensors into host memory, without torch, to inspect or compare them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holdfast.format import objects
from holdfast.format.columns import Array, Columns
from holdfast.format.limits import bounded_memory
from holdfast.io.file_reader import plan_read, read_into
from holdfast.io.host_memory import HostMemory
from holdfast.io.open_checkpoint import open_source
from holdfast.layout.box import Box, from_flat_range, whole
from holdfast.layout.tensor import DTYPES, TensorSpec
from holdfast.plan.shard_table import ShardTable
from holdfast.store.base import Store

SLAB = 64 << 20
"""Bytes that are inspected or compared at once, so that memory stays bounded."""


def read_box(store: Store, columns: Columns, box: Box, where: str) -> Array:
    """Return the bytes of a box of the single tensor in `columns`, every block verified."""
    spec = TensorSpec(columns.names[0], int(columns.dtype[0]), columns.shape_of(0), int(columns.kind[0]))
    memory = HostMemory(box, DTYPES[spec.dtype].size)
    if box.volume:
        # Read as a shard of a rank, so that it goes through the same reader as a load.
        table = ShardTable()
        table.add(spec, box, (0, 1), False, memory)
        plan = plan_read(table, np.zeros(1, np.int64), columns, where)
        read_into(store, table, columns, plan, 1, lambda moved: None)
    return memory.array.reshape(-1)


def read_all(store: Store, columns: Columns, where: str) -> bytes:
    """Return all bytes of the single tensor (or object) in `columns`."""
    return read_box(store, columns, whole(columns.shape_of(0)), where).tobytes()


def read_object(store: Store, name: str) -> object:
    """Return an object of a committed checkpoint by its name, or None if there is none of that name."""
    with open_source(store) as index:
        row = index.find_one(name)
        if row < 0:
            return None
        columns, where = index.select(np.asarray([row])), index.where
        prefix = index.object_prefix
    with bounded_memory(f"The object {name!r} of {where}"):
        return objects.decode(prefix + read_all(store, columns, where), name)


def slabs(box: Box, itemsize: int, limit: int = SLAB) -> Iterator[Box]:
    """Yield pieces of a box of at most `limit` bytes, in row-major order."""
    step = max(limit // itemsize, 1)
    for low in range(0, box.volume, step):
        for part in from_flat_range(box.shape, low, min(low + step, box.volume)):
            yield Box(tuple(a + b for a, b in zip(part.offset, box.offset, strict=True)), part.shape)
