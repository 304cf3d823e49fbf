"""A rank's part of a state, copied: what it writes goes into an arena, what others write is digested.

Of a shard whose replicas are declared only the pieces that this rank writes are copied: which they are is a
rule that needs nobody (`plan/replicas.py`). Of one whose replicas are not declared all is copied, because who
writes it is agreed later, while training goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast.background.arena import ALIGN, Arena
from holdfast.errors import BadInput
from holdfast.format.columns import unpad
from holdfast.io.file_writer import Witnessed, witness, witness_key
from holdfast.layout.box import Box
from holdfast.layout.tensor import DTYPES
from holdfast.options import Options
from holdfast.plan.save import SavePlan, plan_save
from holdfast.plan.shard_table import ShardTable, contiguous_at

MiB = 1 << 20
Into = Callable[[Arena], AbstractContextManager[None]]
"""What copies into an arena are made in; they have arrived when it is left."""


class Copy(NamedTuple):
    """A piece of a row of the shard table, and where in the arena it goes."""

    row: int
    box: Box
    """Relative to the row's own box."""
    nbytes: int
    start: int


@dataclass
class Staged:
    """What an arena holds of a shard table."""

    base: list[int]
    """Per row, where in the arena its first element is, or would be if all of it were there."""
    witnessed: Witnessed = field(default_factory=dict)
    nbytes: int = 0


def stage(table: ShardTable, options: Options, arena: Arena, budget: int | None, into: Into) -> Staged | None:
    """Copy what this rank writes; None if it is more than `budget` bytes, and has to be copied in waves."""
    replicas = [declared or (0, 1) for declared in table.replicas]
    plan = plan_save(
        table, replicas, replace(options, columns=())
    )  # panels of columns don't lie in one piece
    copies, size = _copies(table, plan, 0, len(plan.chunks.row))
    if budget is not None and size > budget:
        _check_one_wave(table, copies, size, budget)
        return None
    staged = _copied(table, copies, size, arena, into)
    # By the plan with panels, if there are any: digests are compared with those of chunks as they are stored.
    staged.witnessed = witnessed(table, plan_save(table, replicas, options) if options.columns else plan)
    return staged


def copied_bytes(table: ShardTable, options: Options) -> int:
    """How many bytes `stage` takes of an arena."""
    replicas = [declared or (0, 1) for declared in table.replicas]
    plan = plan_save(table, replicas, replace(options, columns=()))
    return _copies(table, plan, 0, len(plan.chunks.row))[1]


def aligned_bytes(plan: SavePlan, cut: tuple[int, int]) -> int:
    """How many bytes some of a plan's chunks take of an arena."""
    return int((-(-plan.chunks.nbytes[slice(*cut)] // ALIGN) * ALIGN).sum())


def stage_wave(table: ShardTable, plan: SavePlan, cut: tuple[int, int], arena: Arena, into: Into) -> Staged:
    """Copy some of a plan's chunks."""
    copies, size = _copies(table, plan, *cut)
    return _copied(table, copies, size, arena, into)


def _copied(table: ShardTable, copies: list[Copy], size: int, arena: Arena, into: Into) -> Staged:
    arena.reserve(size)
    with into(arena):
        base = _copy(table, copies, arena)
    return Staged(base, nbytes=sum(copy.nbytes for copy in copies))


def witnessed(table: ShardTable, plan: SavePlan) -> Witnessed:
    """Digests of what this rank holds and others write."""
    return {witness_key(plan, index): witness(table, plan, index) for index in range(len(plan.witnesses.row))}


def _check_one_wave(table: ShardTable, copies: list[Copy], size: int, budget: int) -> None:
    largest = max(copies, key=lambda copy: copy.nbytes)
    if largest.nbytes + ALIGN > budget:
        raise BadInput(
            f"The asynchronous save copies {size / MiB:,.3g} MiB on rank {table.rank}, but "
            f"host_memory_budget allows "
            f"{budget / MiB:,.3g} MiB at a time, and {table.specs[largest.row].name!r} alone has "
            f"{largest.nbytes / MiB:,.3g} MiB.",
            rank=table.rank,
            hint="Raise the budget, share the writing among more ranks, or save synchronously.",
        )


def _copy(table: ShardTable, copies: list[Copy], arena: Arena) -> list[int]:
    """Copy; returns where in the arena each row begins, or would."""
    base = [0] * len(table)
    for copy in copies:
        shape, itemsize = table.boxes[copy.row].shape, DTYPES[table.specs[copy.row].dtype].size
        first = contiguous_at(shape, copy.box)
        assert first is not None  # pieces are cut along the first axis that has any length
        memory = table.memory[copy.row]
        address = memory.address
        if address:
            ctypes.memmove(arena.address + copy.start, address + first * itemsize, copy.nbytes)
        else:
            memory.gather(copy.box, arena.view(copy.start, copy.nbytes))
        # May lie before the arena: only addresses from the piece on are used. A rank writes at most one piece
        # of a row (`plan.replicas.shares`), so one number says where it is.
        base[copy.row] = copy.start - first * itemsize
    return base


def _copies(table: ShardTable, plan: SavePlan, start: int, stop: int) -> tuple[list[Copy], int]:
    """What to copy of chunks [start, stop), in file order, and how many bytes it takes."""
    copies: list[Copy] = []
    offset = 0
    chunks = plan.chunks
    rows, sizes = chunks.row[start:stop].tolist(), chunks.nbytes[start:stop].tolist()
    for number, (row, nbytes) in enumerate(zip(rows, sizes, strict=True), start):
        ndim = len(table.specs[row].shape)
        box = Box(unpad(chunks.offset[number], ndim), unpad(chunks.size[number], ndim))
        copies.append(Copy(row, box.relative_to(table.boxes[row].offset), nbytes, offset))
        offset += -(-nbytes // ALIGN) * ALIGN
    return copies, offset
