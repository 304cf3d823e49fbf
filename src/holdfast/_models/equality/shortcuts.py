"""Sums of shards that would take long one by one, or element by element: many small ones, transposed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from holdfast._core.format.fingerprint import nothing, sums_by_columns, sums_of_each
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.plan.shard_table import Memory
from holdfast._core.state.memory import TensorMemory
from holdfast._models.equality.rounding import Sums, add_rounded_of_each, less_exact_than, no_sums

_SMALL, _STACK = 64 << 10, 1 << 20
"""Bytes of a shard that is summed together with others, and bytes of all of these, few enough for the
cache."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def many_at_once(code: int, box: Box) -> int:
    """Return how many shards of this kind `sums_together` should get; 1 if each is summed by itself."""
    size = box.volume * DTYPES[code].size
    return _STACK // size if 0 < size <= _SMALL else 1


def sums_together(memories: Sequence[Memory], code: int, box: Box) -> Sums | None:
    """Return the sums of shards of one dtype, shape and place; None if these can't be taken together."""
    tensors = [memory.tensor for memory in memories if isinstance(memory, TensorMemory)]
    if len(tensors) < len(memories) or not {*map(type, tensors)}.issubset(_PLAIN):
        return None
    if not all(memory.address for memory in memories) and len({tensor.device for tensor in tensors}) > 1:
        return None
    with torch.no_grad():
        stack = torch.stack(tensors).cpu().reshape(len(tensors), -1)
    sums = no_sums(code, len(tensors))
    sums[:, 0, :2] = sums_of_each(stack.view(torch.uint8).numpy(), DTYPES[code].size, box)
    add_rounded_of_each(sums, code, stack, box)
    return sums


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
