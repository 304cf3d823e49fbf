"""Load into memory that a state has under several names: tied tensors are filled once, and none may be stored
with other elements than the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from holdfast._core.format.columns import Array, Columns, tied_rows
from holdfast._core.io.raw_read import fill_rows, slabs
from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.loading.alike import same_bits, stored_alike
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._core.state.tied import find_ties
from holdfast._core.store.base import Store
from holdfast.errors import LoadFailed


class Tied(NamedTuple):
    """Rows of which another row has the memory, or a part of it."""

    rows: frozenset[int]
    """Those that are not read, because another row fills the same elements."""
    unknown: list[tuple[int, int]]
    """Those whose stored elements may differ from what another row puts there, and that row."""


def rows_read_once(table: ShardTable, position: Array, columns: Columns, where: str) -> Tied:
    """Return which rows of a load need not be read. position: of each row, its tensor in `columns`.

    Rows that only overlap are all read, but not directly into their memory: what one row reads there would
    look like damage of another. Raises LoadFailed if other elements are stored under the names of tied rows.
    """
    begins, ends = _memory_of(table)
    if not _overlaps(begins, ends):  # mostly
        return Tied(frozenset(), [])
    ties = find_ties(table)
    begins[[*ties]] = 0
    unknown = _overlaps(begins, ends)
    for row in {row for row, _ in unknown}:
        memory = table.memory[row]
        assert isinstance(memory, TensorMemory)
        memory.address = 0
    alike = tied_rows(columns)
    for row, first in ties.items():
        match stored_alike(columns, alike, int(position[row]), int(position[first])):
            case False:
                raise _differ(table, row, first, where)
            case None:
                unknown.append((row, first))
    return Tied(frozenset(ties), unknown)


def _memory_of(table: ShardTable) -> tuple[Array, Array]:
    """Return where the memory of each row begins and ends; 0 if that is not known.

    Of a tensor whose elements do not lie together, only the first byte counts.
    """
    begins = np.asarray([memory.address for memory in table.memory], np.int64)
    ends = begins + table.arrays().nbytes
    for row in (begins == 0).nonzero()[0].tolist():
        memory = table.memory[row]
        if type(memory) is TensorMemory and memory.tensor.numel():
            tensor = memory.tensor
            begins[row] = tensor.data_ptr()
            ends[row] = begins[row] + (tensor.nbytes if tensor.is_contiguous() else 1)
    return begins, ends


def _overlaps(begins: Array, ends: Array) -> list[tuple[int, int]]:
    """Return the rows that have memory in common with another row, each with such a row."""
    rows = ((begins != 0) & (begins < ends)).nonzero()[0]
    rows = rows[np.argsort(begins[rows], kind="stable")]
    # Of the rows that begin before a row, the one that reaches farthest overlaps it, if any does.
    reach = np.maximum.accumulate(ends[rows])
    farthest = np.maximum.accumulate(np.where(ends[rows] == reach, np.arange(len(rows)), 0))
    late = (begins[rows[1:]] < reach[:-1]).nonzero()[0]
    pairs = [*zip(rows[late + 1].tolist(), rows[farthest[late]].tolist(), strict=True)]
    return [*pairs, *((first, row) for row, first in pairs)]


def check_same(
    store: Store, source: Source, table: ShardTable, unknown: list[tuple[int, int]], tick: Callable[[], None]
) -> None:
    """Compare the stored elements of rows with the memory that others have filled, too.

    Raises LoadFailed if they differ.
    """
    for row, first in unknown:
        spec, box, memory = table.specs[row], table.boxes[row], table.memory[row]
        assert isinstance(memory, TensorMemory)
        dtype = torch_dtype(spec.dtype)
        for part in slabs(box, DTYPES[spec.dtype].size):
            stored = torch.empty(part.shape, dtype=dtype)
            asked = ShardTable()
            asked.add(spec, part, (0, 1), False, TensorMemory(stored))
            fill_rows(store, source, asked)
            held = memory.tensor.detach()[part.relative_to(box.offset).slices()]
            if not same_bits(stored.to(held.dtype), held.cpu()):
                raise _differ(table, row, first, source.where)
            tick()


def _differ(table: ShardTable, row: int, first: int, where: str) -> LoadFailed:
    names = table.specs[first].name, table.specs[row].name
    return LoadFailed(
        f"{names[0]!r} and {names[1]!r} share memory on rank {table.rank}, but {where} holds different "
        "elements under these names.",
        rank=table.rank,
        hint="Untie them, or leave one out: exclude=[...].",
        details={"tensors": list(names)},
    )
