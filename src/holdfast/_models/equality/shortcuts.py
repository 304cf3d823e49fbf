"""Sums of shards that would take long one by one, or element by element: many small ones, transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from holdfast._core.format.fingerprint import nothing, sums_by_columns, sums_of_each
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.plan.shard_table import Memory, ShardTable
from holdfast._core.state.memory import TensorMemory
from holdfast._models.equality.rounding import Numbers, less_exact_than, rounded_of_each

_SMALL, _STACK = 64 << 10, 1 << 20
"""Bytes of a shard that is summed together with others, and bytes of all of these, few enough for the
cache."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def small_sums(
    table: ShardTable, rows: Sequence[int], tick: Callable[[], None]
) -> dict[int, tuple[tuple[int, int], list[Numbers]]]:
    """Return the sums of those rows of which several are alike: small, and of one dtype, shape and place; and
    those in less exact dtypes."""
    alike: dict[tuple[int, Box, torch.device], list[tuple[int, torch.Tensor]]] = {}
    small: dict[tuple[int, Box], bool] = {}
    for row in rows:
        memory, kind = table.memory[row], (table.specs[row].dtype, table.boxes[row])
        if kind not in small:
            small[kind] = 0 < kind[1].volume * DTYPES[kind[0]].size <= _SMALL
        if small[kind] and isinstance(memory, TensorMemory) and type(memory.tensor) in _PLAIN:
            alike.setdefault((*kind, memory.tensor.device), []).append((row, memory.tensor))
    found: dict[int, tuple[tuple[int, int], list[Numbers]]] = {}
    for (code, box, _), these in alike.items():
        size = DTYPES[code].size
        step = max(_STACK // (box.volume * size), 1)
        for first in range(0, len(these) if len(these) > 1 else 0, step):
            some = these[first : first + step]
            with torch.no_grad():
                stack = torch.stack([tensor for _, tensor in some]).cpu().reshape(len(some), -1)
            sums = sums_of_each(stack.view(torch.uint8).numpy(), size, box).tolist()
            rounded = rounded_of_each(code, stack, box)
            for (row, _), pair, numbers in zip(some, sums, rounded, strict=True):
                found[row] = tuple(pair), numbers
            tick()
    return found


def turned_sums(memory: Memory, code: int, box: Box, tick: Callable[[], None]) -> tuple[int, int] | None:
    """Return the sums of a shard whose rows lie across memory, as those of a transposed tensor; None if it is
    no such shard."""
    size = DTYPES[code].size
    # Elements of a dtype that another is less exact than are rounded, too.
    if not isinstance(memory, TensorMemory) or memory.address or size > 8 or less_exact_than(code):
        return None
    tensor = memory.tensor.detach()
    if (
        type(memory.tensor) not in _PLAIN
        or not tensor.is_cpu
        or tensor.dim() < 2
        or tensor.is_complex()
        or tensor.stride(-2) != 1
        or min(tensor.shape[-2:]) < 2
    ):
        return None
    whole = tensor.view(_INTEGERS[size]).numpy().view(_UNSIGNED[size])
    sums, ahead = nothing(), (1,) * (tensor.dim() - 2)
    for index in product(*map(range, tensor.shape[:-2])):
        offset = (*(low + at for low, at in zip(box.offset, index, strict=False)), *box.offset[-2:])
        sums += sums_by_columns(whole[index].T, Box(offset, (*ahead, *box.shape[-2:])))
        tick()
    return int(sums[0]), int(sums[1])
