"""Loading of tied tensors: memory that a state has under several names is filled once, and the stored values
under all of these names must be equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from types import SimpleNamespace
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

_FEW = 64
"""Of more rows that lie among each other, all are compared after the read, whether or not they share."""
_WORK = 10_000
"""Limit of NumPy's search for a shared element."""


class Tied(NamedTuple):
    """Rows that share memory with another row, in whole or in part."""

    rows: frozenset[int]
    """Rows that need not be read, because another row fills the same elements."""
    unknown: list[tuple[int, int]]
    """Pairs of rows that share memory and whose stored elements may differ; they are compared after the read
    (`check_same`)."""


def rows_read_once(table: ShardTable, position: Array, columns: Columns, where: str) -> Tied:
    """Return which rows of a load need not be read. position: for each row, the index of its tensor in
    `columns`.

    Rows that overlap only in part are all read, but not directly into their memory: the bytes of one row
    would make the digest check of the other fail. Raises LoadFailed if tied rows are stored with different
    elements.
    """
    begins, ends = _memory_of(table)
    if not _sharing(table, begins, ends):  # the usual case
        return Tied(frozenset(), [])
    ties = find_ties(table)
    begins[[*ties]] = 0
    unknown = _sharing(table, begins, ends)
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
    """Return the first and end addresses of each row's memory, with the gaps of one that is not contiguous;
    0 if unknown."""
    begins = np.asarray([memory.address for memory in table.memory], np.int64)
    ends = begins + table.arrays().nbytes
    for row in (begins == 0).nonzero()[0].tolist():
        memory = table.memory[row]
        if type(memory) is TensorMemory and memory.tensor.numel():
            tensor = memory.tensor
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            begins[row] = tensor.data_ptr()
            ends[row] = begins[row] + (last + 1) * tensor.element_size()
    return begins, ends


def _sharing(table: ShardTable, begins: Array, ends: Array) -> list[tuple[int, int]]:
    """Return pairs of rows that share elements of memory, or may: each such row, with one other."""
    rows = ((begins != 0) & (begins < ends)).nonzero()[0]
    rows = rows[np.argsort(begins[rows], kind="stable")]
    reach = np.maximum.accumulate(ends[rows])
    # Groups of rows whose memory begins in that of rows before them; most have one row.
    cuts = np.concatenate([[0], (begins[rows[1:]] >= reach[:-1]).nonzero()[0] + 1, [len(rows)]])
    pairs: list[tuple[int, int]] = []
    for at in (np.diff(cuts) > 1).nonzero()[0].tolist():
        group = rows[cuts[at] : cuts[at + 1]]
        arrays = [_as_array(table, row) for row in group.tolist()]
        if all(array.flags.c_contiguous for array in arrays):
            pairs += _overlaps(group, begins, ends)
        else:
            pairs += _that_share(group.tolist(), arrays)
    return pairs


def _as_array(table: ShardTable, row: int) -> Array:
    """Return an array with the addresses of a row's elements, on whatever device: they are never read."""
    memory = table.memory[row]
    assert isinstance(memory, TensorMemory)
    tensor, size = memory.tensor, memory.tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(size * stride for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _that_share(rows: list[int], arrays: list[Array]) -> list[tuple[int, int]]:
    """Return pairs of these rows, some of which have gaps in their memory, that share elements."""
    if len(rows) > _FEW:
        return [*zip(rows, [rows[1], *rows[:-1]], strict=True)]
    found: dict[int, int] = {}
    for (row, one), (other, another) in combinations(zip(rows, arrays, strict=True), 2):
        if (row not in found or other not in found) and _may_share(one, another):
            found.setdefault(row, other)
            found.setdefault(other, row)
    return [*found.items()]


def _may_share(one: Array, other: Array) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_WORK)
    except np.exceptions.TooHardError:
        return True


def _overlaps(rows: Array, begins: Array, ends: Array) -> list[tuple[int, int]]:
    """Return pairs of these contiguous rows, in the order of their beginnings, that overlap."""
    # Of the rows that begin before a row, the one that reaches farthest overlaps it, if any does.
    reach = np.maximum.accumulate(ends[rows])
    farthest = np.maximum.accumulate(np.where(ends[rows] == reach, np.arange(len(rows)), 0))
    late = (begins[rows[1:]] < reach[:-1]).nonzero()[0]
    pairs = [*zip(rows[late + 1].tolist(), rows[farthest[late]].tolist(), strict=True)]
    return [*pairs, *((first, row) for row, first in pairs)]


def check_same(
    store: Store, source: Source, table: ShardTable, unknown: list[tuple[int, int]], tick: Callable[[], None]
) -> None:
    """Compare the stored elements of rows with their memory, which other rows have also filled.

    Raises LoadFailed if they differ.
    """
    for row, first in unknown:
        spec, box, memory = table.specs[row], table.boxes[row], table.memory[row]
        assert isinstance(memory, TensorMemory)
        dtype = torch_dtype(spec.dtype)
        for part in slabs(box, DTYPES[spec.dtype].size):
            stored = torch.empty(part.shape, dtype=dtype, device="cpu")
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
