"""Assemble parts of published tensors from boxes of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from holdfast._core.format.index import Index
from holdfast._core.io.host_memory import ScratchBuffer
from holdfast._core.io.raw_read import fill_rows
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import ShiftedMemory, TensorMemory, torch_dtype
from holdfast._core.store.base import Store
from holdfast._models.huggingface.published_tensors import PublishedTensor
from holdfast._models.views.mapping import MINUS_ONE, Segment
from holdfast._models.views.reordered import as_ours


class PublishedPart(NamedTuple):
    """A part of a published tensor."""

    tensor: PublishedTensor
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.volume * DTYPES[self.tensor.code].size


def assemble(
    store: Store, index: Index, parts: Sequence[PublishedPart], memory: ScratchBuffer
) -> list[memoryview]:
    """Read and assemble parts of published tensors in `memory`, and return the bytes of each."""
    memory.reset()
    table, targets = ShardTable(), [_target(part, memory) for part in parts]
    for (tensor, box), target in zip(parts, targets, strict=True):
        for spec, segment in tensor.pieces:
            seen = box
            if segment.split:  # no slab is so small that it cuts the last axis
                seen = Box((*box.offset, 0), (*box.shape[:-1], *segment.whole[-2:]))
            _add(table, spec, segment, target.view(seen.shape), seen)
    fill_rows(store, index, table)
    for part, target in zip(parts, targets, strict=True):
        part.tensor.check_cast(target)
    return [target.view(-1).view(torch.uint8).numpy().data for target in targets]


def _target(part: PublishedPart, slab: ScratchBuffer) -> torch.Tensor:
    """Return memory for a part; reused, because new memory costs as much as a copy."""
    dtype, shape = torch_dtype(part.tensor.code), part.box.shape
    memory = slab.take(part.nbytes) if part.nbytes else None
    if memory is None:  # nothing, or many small parts, whose alignment gaps add up
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _add(table: ShardTable, spec: TensorSpec, segment: Segment, target: torch.Tensor, part: Box) -> None:
    """Add the rows of a segment in a part of the published tensor; `target` is the memory of the part."""
    ours = segment.ours(part)
    if ours is None:
        return
    theirs = segment.theirs(ours).relative_to(part.offset)
    view = as_ours(target[theirs.slices()], segment.axes)
    stored = torch_dtype(spec.dtype)
    memory = ShiftedMemory(view, stored, 1) if segment.change == MINUS_ONE else TensorMemory(view, stored)
    table.add(spec, ours, (0, 1), False, memory)
