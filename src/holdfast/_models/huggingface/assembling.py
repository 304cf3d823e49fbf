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
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._core.store.base import Store
from holdfast._models.huggingface.export_dtypes import CastLosses, CastMemory
from holdfast._models.huggingface.published_tensors import PublishedTensor
from holdfast._models.huggingface.quantizing import QuantizedTensor
from holdfast._models.views.reordered import as_ours
from holdfast._models.views.segments import MINUS_ONE, Segment


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
    targets = [_target(part, torch_dtype(part.tensor.code), memory) for part in parts]
    _fill(store, index, parts, targets)
    for part in parts:
        part.tensor.check_infinite()
    return [_bytes_of(target) for target in targets]


def assemble_quantized(
    store: Store, index: Index, tensor: QuantizedTensor, box: Box, memory: ScratchBuffer
) -> tuple[memoryview, memoryview]:
    """Read whole rows of blocks of a tensor in `memory`, in float32, and return the bytes of its elements in
    8 bits and of their scales."""
    memory.reset()
    part = PublishedPart(tensor, box)
    target = _target(part, torch.float32, memory)
    _fill(store, index, [part], [target])
    elements, scales = tensor.quantize(target)
    return _bytes_of(elements), _bytes_of(scales)


def _fill(
    store: Store, index: Index, parts: Sequence[PublishedPart], targets: Sequence[torch.Tensor]
) -> None:
    table = ShardTable()
    for (tensor, box), target in zip(parts, targets, strict=True):
        for spec, segment in tensor.pieces:
            seen = box
            if segment.split:  # no slab is so small that it cuts the last axis
                seen = Box((*box.offset, 0), (*box.shape[:-1], *segment.whole[-2:]))
            _add(table, spec, segment, target.view(seen.shape), seen, tensor.losses)
    fill_rows(store, index, table)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _target(part: PublishedPart, dtype: torch.dtype, memory: ScratchBuffer) -> torch.Tensor:
    """Return memory for a part; reused, because new memory costs as much as a copy."""
    shape, size = part.box.shape, part.box.volume * dtype.itemsize
    taken = memory.take(size) if size else None
    if taken is None:  # nothing, or many small parts, whose alignment gaps add up
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(taken, dtype=dtype).view(shape)


def _add(
    table: ShardTable, spec: TensorSpec, segment: Segment, target: torch.Tensor, part: Box, losses: CastLosses
) -> None:
    """Add the rows of a segment in a part of the published tensor; `target` is the memory of the part."""
    ours = segment.ours(part)
    if ours is None:
        return
    theirs = segment.theirs(ours).relative_to(part.offset)
    view = as_ours(target[theirs.slices()], segment.axes)
    stored, shift = torch_dtype(spec.dtype), int(segment.change == MINUS_ONE)
    is_cast = shift or stored != view.dtype
    memory = CastMemory(view, stored, shift, losses) if is_cast else TensorMemory(view, stored)
    table.add(spec, ours, (0, 1), False, memory)
