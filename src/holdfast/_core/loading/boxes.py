"""Read boxes of tensors by name from any loadable folder, for comparing and converting without a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast._core.io.raw_read import fill_rows, slabs
from holdfast._core.io.source import Source, rows_of
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import DTYPES, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._core.store.base import Store


class Wanted(NamedTuple):
    """A box of a tensor."""

    spec: TensorSpec
    """As it is stored; for a published model also as megatron-core would have it."""
    box: Box
    dtype: int
    """The code (`DTYPES`) of the dtype that the elements are wanted in."""


def read_boxes(store: Store, source: Source, wanted: Sequence[Wanted]) -> tuple[list[torch.Tensor], set[str]]:
    """Read and verify the elements of boxes. Return also the names of the stored tensors that they come from.

    Raises MissingTensors for a name that is not there, ShapeMismatch for another shape or dtype.
    """
    buffers = [torch.empty(one.box.shape, dtype=torch_dtype(one.dtype), device="cpu") for one in wanted]
    return buffers, fill_boxes(store, source, wanted, buffers)


def fill_boxes(
    store: Store, source: Source, wanted: Sequence[Wanted], targets: Sequence[torch.Tensor]
) -> set[str]:
    """Read and verify the elements of boxes into tensors of their shapes, on any device; as `read_boxes`."""
    table = ShardTable()
    for one, target in zip(wanted, targets, strict=True):
        memory = TensorMemory(target, torch_dtype(one.spec.dtype))
        table.add(one.spec, one.box, (0, 1), False, memory)
    rows = rows_of(source, table, range(len(table)))
    for row in rows.blank:
        targets[row].zero_()
    fill_rows(store, source, rows.table)
    return {spec.name for spec in rows.table.specs}


def are_equal(store: Store, source: Source, names: Sequence[str], tick: Callable[[], None]) -> bool:
    """Return whether tensors have the same dtype, shape and elements. tick: called after each part."""
    columns = source.select(np.sort(source.find(names)))
    specs = columns.specs()
    if len({spec[1:] for spec in specs}) > 1:
        return False
    for part in slabs(whole(specs[0].shape), DTYPES[specs[0].dtype].size):
        tensors, _ = read_boxes(store, source, [Wanted(spec, part, spec.dtype) for spec in specs])
        x, *others = (tensor.reshape(-1).view(torch.uint8) for tensor in tensors)
        if not all(torch.equal(x, other) for other in others):
            return False
        tick()
    return True
