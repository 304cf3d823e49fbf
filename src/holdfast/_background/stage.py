"""Copy a rank's part of a state: what it writes goes into an arena, what others write is digested.

If a shard's replicas are declared, only the pieces that this rank writes are copied: a rule tells which they
are, without messages (`plan/replicas.py`). If they are not declared, the whole shard is copied, because the
ranks agree on its writer later, while training goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast._background.arena import ALIGN, Arena
from holdfast._format.columns import unpad
from holdfast._io.file_writer import Witnessed, witness, witness_key
from holdfast._layout.box import Box
from holdfast._layout.tensor import DTYPES, Replica
from holdfast._options import Options
from holdfast._plan.save import plan_save
from holdfast._plan.shard_table import SavePlan, ShardTable, contiguous_at
from holdfast._values import size_text
from holdfast.errors import BadInput

Into = Callable[[Arena], AbstractContextManager[None]]
"""The context that copies into an arena are made in; they are complete when it ends."""


class Copy(NamedTuple):
    """A piece of a row of the shard table, and where in the arena it goes."""

    row: int
    box: Box
    """Relative to the row's own box."""
    nbytes: int
    start: int


@dataclass
class Staged:
    """What was copied of a shard table into an arena."""

    base: list[int]
    """Per row, where in the arena its first element is, or would be if all of it were there."""
    witnessed: Witnessed = field(default_factory=dict)
    nbytes: int = 0


class CopyPlan(NamedTuple):
    """What this rank copies of a shard table."""

    plan: SavePlan
    pieces: list[Copy]
    nbytes: int
    """Of an arena."""


def plan_copies(table: ShardTable, options: Options) -> CopyPlan:
    """Plan to copy all that this rank writes."""
    plan = plan_save(table, _replicas(table), replace(options, columns=()))  # panels are not contiguous
    return CopyPlan(plan, *_copies(table, plan, 0, len(plan.chunks.row)))


def stage(table: ShardTable, options: Options, copies: CopyPlan, arena: Arena, into: Into) -> Staged:
    """Copy what this rank writes, and digest what others write."""
    staged = _copied(table, copies.pieces, copies.nbytes, arena, into)
    # By the plan with panels, if there are any: digests are compared with those of the stored chunks.
    plan = plan_save(table, _replicas(table), options) if options.columns else copies.plan
    staged.witnessed = witnessed(table, plan)
    return staged


def _replicas(table: ShardTable) -> list[Replica]:
    return [declared or (0, 1) for declared in table.replicas]


def aligned_bytes(plan: SavePlan, cut: tuple[int, int]) -> int:
    """Return how many bytes of an arena the chunks of `cut` take."""
    return int((-(-plan.chunks.nbytes[slice(*cut)] // ALIGN) * ALIGN).sum())


def stage_wave(table: ShardTable, plan: SavePlan, cut: tuple[int, int], arena: Arena, into: Into) -> Staged:
    """Copy the chunks of `cut`, a range of the plan's."""
    return _copied(table, *_copies(table, plan, *cut), arena, into)


def _copied(table: ShardTable, copies: list[Copy], size: int, arena: Arena, into: Into) -> Staged:
    arena.reserve(size)
    base = [0] * len(table)
    with into(arena):
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
            # This may lie before the arena: only addresses from the piece on are used. A rank writes at most
            # one piece of a row (`plan.replicas.shares`), so one number is enough.
            base[copy.row] = copy.start - first * itemsize
    return Staged(base, nbytes=sum(copy.nbytes for copy in copies))


def witnessed(table: ShardTable, plan: SavePlan) -> Witnessed:
    """Digest what this rank holds and others write."""
    return {witness_key(plan, index): witness(table, plan, index) for index in range(len(plan.witnesses.row))}


def check_one_wave(table: ShardTable, copies: CopyPlan, budget: int) -> None:
    """Raise BadInput if one piece does not fit into a wave of `budget` bytes."""
    largest = max(copies.pieces, key=lambda copy: copy.nbytes)
    if largest.nbytes + ALIGN > budget:
        raise BadInput(
            f"The asynchronous save copies {size_text(copies.nbytes)} on rank {table.rank}, but "
            f"host_memory_budget allows {size_text(budget)} at a time, and "
            f"{table.specs[largest.row].name!r} alone has {size_text(largest.nbytes)}.",
            rank=table.rank,
            hint="Raise the budget, share the writing among more ranks, or save synchronously.",
        )


def _copies(table: ShardTable, plan: SavePlan, start: int, stop: int) -> tuple[list[Copy], int]:
    """List the copies for chunks [start, stop), in file order, and how many bytes they take."""
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
