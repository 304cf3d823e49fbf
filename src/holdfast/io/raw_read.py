"""Verified bytes of stored tensors in host memory, without torch: for looking and comparing."""

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
"""Bytes that are compared or looked at in one go, so that memory stays bounded."""


def read_box(store: Store, columns: Columns, box: Box, where: str) -> Array:
    """The bytes of a box of the one tensor in `columns`, every block verified."""
    spec = TensorSpec(columns.names[0], int(columns.dtype[0]), columns.shape_of(0), int(columns.kind[0]))
    memory = HostMemory(box, DTYPES[spec.dtype].size)
    if box.volume:
        # As a rank's own shard: so what is looked at or compared goes through the reader that a load uses.
        table = ShardTable()
        table.add(spec, box, (0, 1), False, memory)
        plan = plan_read(table, np.zeros(1, np.int64), columns, where)
        read_into(store, table, columns, plan, 1, lambda moved: None)
    return memory.array.reshape(-1)


def read_all(store: Store, columns: Columns, where: str) -> bytes:
    """All bytes of the one tensor (or object) in `columns`."""
    return read_box(store, columns, whole(columns.shape_of(0)), where).tobytes()


def read_object(store: Store, name: str) -> object:
    """An object of a committed checkpoint by its name, or None if it has none such."""
    with open_source(store) as index:
        row = index.find_one(name)
        if row < 0:
            return None
        columns, where = index.select(np.asarray([row])), index.where
        prefix = index.object_prefix
    with bounded_memory(f"The object {name!r} of {where}"):
        return objects.decode(prefix + read_all(store, columns, where), name)


def slabs(box: Box, itemsize: int, limit: int = SLAB) -> Iterator[Box]:
    """A box in pieces of at most `limit` bytes, in row-major order."""
    step = max(limit // itemsize, 1)
    for low in range(0, box.volume, step):
        for part in from_flat_range(box.shape, low, min(low + step, box.volume)):
            yield Box(tuple(a + b for a, b in zip(part.offset, box.offset, strict=True)), part.shape)
