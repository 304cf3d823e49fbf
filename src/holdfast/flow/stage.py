"""A rank's part of a state, copied: what it writes goes into an arena, what others write is digested.

Of a shard whose replicas are declared only the pieces that this rank writes are copied: which they are is a rule that
needs nobody (`plan/replicas.py`). Of one whose replicas are not declared all is copied, because who writes it is
agreed later, while training goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast.errors import BadInput
from holdfast.flow.arena import ALIGN, Arena
from holdfast.flow.write import Witnessed, witness, witness_key
from holdfast.format.columns import unpad
from holdfast.layout.box import Box
from holdfast.layout.tensor import DTYPES
from holdfast.options import Options
from holdfast.plan.holding import Holding, contiguous_at
from holdfast.plan.save import SavePlan, plan_save

MiB = 1 << 20


class Copy(NamedTuple):
    """A piece of a row of the holding, and where in the arena it goes."""

    row: int
    box: Box
    """Relative to the row's own box."""
    nbytes: int
    start: int


@dataclass
class Staged:
    """What an arena holds of a holding."""

    base: list[int]
    """Per row, where in the arena its first element is, or would be if all of it were there."""
    witnessed: Witnessed = field(default_factory=dict)
    nbytes: int = 0


def stage(
    held: Holding,
    options: Options,
    arena: Arena,
    budget: int | None,
    settle: Callable[[], None] = lambda: None,
) -> Staged:
    """Copy what this rank writes. `settle` waits for copies that a device makes by itself."""
    replicas = [declared or (0, 1) for declared in held.replicas]
    copies, size = _copies(held, plan_save(held, replicas, replace(options, columns=())))
    if budget is not None and size > budget:
        largest = max(copies, key=lambda copy: copy.nbytes)
        raise BadInput(
            f"The asynchronous save needs {size / MiB:,.0f} MiB of host memory on rank {held.rank}, but "
            f"host_memory_budget allows {budget / MiB:,.0f} MiB; the largest tensor is {held.specs[largest.row].name!r} "
            f"with {largest.nbytes / MiB:,.0f} MiB.",
            rank=held.rank,
            hint="Raise the budget, share the writing among more ranks, or save synchronously.",
        )
    arena.reserve(size)
    staged = Staged([0] * len(held), nbytes=sum(copy.nbytes for copy in copies))
    for copy in copies:
        shape, itemsize = held.boxes[copy.row].shape, DTYPES[held.specs[copy.row].dtype].size
        first = contiguous_at(shape, copy.box)
        assert first is not None  # pieces are cut along the first axis that has any length
        memory = held.memory[copy.row]
        address = memory.address
        if address:
            source = address + first * itemsize
            ctypes.memmove(arena.address + copy.start, source, copy.nbytes)
        else:
            memory.gather(copy.box, arena.view(copy.start, copy.nbytes))
        staged.base[copy.row] = copy.start - first * itemsize
    staged.witnessed = _witnessed(held, plan_save(held, replicas, options))
    settle()
    return staged


def _copies(held: Holding, plan: SavePlan) -> tuple[list[Copy], int]:
    """What to copy, in file order, and how many bytes it takes."""
    found: list[Copy] = []
    at = 0
    chunks = plan.chunks
    for number, (row, nbytes) in enumerate(zip(chunks.row.tolist(), chunks.nbytes.tolist(), strict=True)):
        ndim = len(held.specs[row].shape)
        box = Box(unpad(chunks.offset[number], ndim), unpad(chunks.size[number], ndim))
        found.append(Copy(row, box.relative_to(held.boxes[row].offset), nbytes, at))
        at += -(-nbytes // ALIGN) * ALIGN
    return found, at


def _witnessed(held: Holding, plan: SavePlan) -> Witnessed:
    return {witness_key(plan, at): witness(held, plan, at) for at in range(len(plan.witnesses.row))}
