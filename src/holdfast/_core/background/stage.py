"""Stage a rank's part of a state: copy the pieces that it writes into an arena, and digest those that it
witnesses.

If a shard's replicas are declared, only the pieces that this rank writes are copied: a rule determines them
without messages (`plan/replicas.py`). If they are not declared, the whole shard is copied, because the
ranks agree on its writer later, while training goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast._core.background.arena import ALIGN, Arena
from holdfast._core.base.options import Options
from holdfast._core.base.values import size_text
from holdfast._core.format.columns import Array, unpad
from holdfast._core.io.file_writer import Witnessed, witness, witness_key
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, Replica
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import PlannedRows, SavePlan, ShardTable, contiguous_at
from holdfast.errors import BadInput

Into = Callable[[Arena], AbstractContextManager[None]]
"""Returns a context for copies into an arena; they are complete when the context ends."""


@dataclass
class Staged:
    """The copy of a shard table in an arena."""

    base: list[int]
    """For each row, the position of its first element in the arena, even if that element was not copied."""
    witnessed: Witnessed = field(default_factory=dict)
    nbytes: int = 0


def plan_copies(table: ShardTable, options: Options) -> SavePlan:
    """Plan the copies of all pieces that this rank writes."""
    return plan_save(table, _replicas(table), replace(options, columns=()))  # panels are not contiguous


def stage(table: ShardTable, options: Options, copies: SavePlan, arena: Arena, into: Into) -> Staged:
    """Copy the pieces that this rank writes, and digest those that it witnesses."""
    staged = stage_wave(table, copies, (0, len(copies.chunks.row)), arena, into)
    # Use the plan with panels, if there are any: digests are compared with those of the stored chunks.
    plan = plan_save(table, _replicas(table), options) if options.columns else copies
    staged.witnessed = witnessed(table, plan)
    return staged


def _replicas(table: ShardTable) -> list[Replica]:
    return [declared or (0, 1) for declared in table.replicas]


def aligned_bytes(plan: SavePlan, cut: tuple[int | None, int | None] = (None, None)) -> int:
    """Return the bytes that the chunks of `cut` (default: all chunks) take in an arena."""
    return int(_aligned(plan.chunks.nbytes[slice(*cut)]).sum())


def _aligned(nbytes: Array) -> Array:
    return -(-nbytes // ALIGN) * ALIGN


def stage_wave(table: ShardTable, plan: SavePlan, cut: tuple[int, int], arena: Arena, into: Into) -> Staged:
    """Copy the chunks of `cut`, a range of the plan's chunks in file order."""
    chunks = PlannedRows(*(column[slice(*cut)] for column in plan.chunks))
    ends = np.cumsum(_aligned(chunks.nbytes))
    starts = ends - _aligned(chunks.nbytes)
    arena.reserve(int(ends[-1]) if len(ends) else 0)
    is_whole = (chunks.nbytes == table.arrays().nbytes[chunks.row]).tolist()
    base = np.zeros(len(table), np.int64)
    # A rank writes at most one piece of a row (`plan.replicas.shares`), so one number is enough.
    base[chunks.row] = starts
    columns = (chunks.row.tolist(), starts.tolist(), chunks.nbytes.tolist())
    is_new = arena.is_new
    with into(arena):
        for index, (row, start, nbytes) in enumerate(zip(*columns, strict=True)):
            memory = table.memory[row]
            address = memory.address
            # The common case first, without a Python function call: a model has thousands of these.
            if address and is_whole[index] and not is_new:
                ctypes.memmove(arena.address + start, address, nbytes)
                continue
            box, itemsize = _box(table, chunks, index), DTYPES[table.specs[row].dtype].size
            first = contiguous_at(table.boxes[row].shape, box)
            assert first is not None  # pieces are cut along the first axis that has any length
            # This may be negative: only addresses within the copied piece are used.
            base[row] = start - first * itemsize
            if address:
                arena.copy(start, address + first * itemsize, nbytes)
            else:
                memory.gather(box, arena.view(start, nbytes))
    for row, first in table.tied.items():
        base[row] = base[first]
    return Staged(base.tolist(), nbytes=int(chunks.nbytes.sum()))


def _box(table: ShardTable, chunks: PlannedRows, index: int) -> Box:
    """Return the box of a chunk, relative to the box of its row."""
    row = int(chunks.row[index])
    ndim = len(table.specs[row].shape)
    box = Box(unpad(chunks.offset[index], ndim), unpad(chunks.size[index], ndim))
    return box.relative_to(table.boxes[row].offset)


def witnessed(table: ShardTable, plan: SavePlan) -> Witnessed:
    """Digest the pieces that this rank witnesses: it holds them, and another rank writes them."""
    return {witness_key(plan, index): witness(table, plan, index) for index in range(len(plan.witnesses.row))}


def check_one_wave(table: ShardTable, copies: SavePlan, budget: int) -> None:
    """Raise BadInput if one piece does not fit into a wave of `budget` bytes."""
    largest = int(np.argmax(copies.chunks.nbytes))
    nbytes = int(copies.chunks.nbytes[largest])
    if nbytes + ALIGN > budget:
        raise BadInput(
            f"The asynchronous save copies {size_text(aligned_bytes(copies))} on rank {table.rank}, but "
            f"host_memory_budget allows {size_text(budget)} at a time, and "
            f"{table.specs[int(copies.chunks.row[largest])].name!r} alone has {size_text(nbytes)}.",
            rank=table.rank,
            hint="Raise the budget, share the writing among more ranks, or save synchronously.",
        )
