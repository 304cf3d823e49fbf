"""Read boxes of tensors by name from any folder that can be loaded, for comparing and converting, where there
is no state to fill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.errors import MissingTensors, ShapeMismatch
from holdfast.io.file_reader import plan_read, read_into
from holdfast.io.source import Source
from holdfast.layout.box import Box
from holdfast.layout.tensor import TensorSpec, listed
from holdfast.loading.published import see_published
from holdfast.plan.merge import what
from holdfast.plan.shard_table import ShardTable
from holdfast.state.memory import TensorMemory, torch_dtype
from holdfast.store.base import Store


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
    table, buffers = ShardTable(), []
    for one in wanted:
        stored = torch_dtype(one.spec.dtype)
        buffers.append(torch.empty(one.box.shape, dtype=torch_dtype(one.dtype)))
        table.add(one.spec, one.box, (0, 1), False, TensorMemory(buffers[-1], stored))
    blank: list[torch.Tensor] = []
    seen, _ = see_published(source, table, range(len(table)), blank)
    for tensor in blank:
        tensor.zero_()
    fill_rows(store, source, seen, lambda moved: None)
    return buffers, {spec.name for spec in seen.specs}


def fill_rows(store: Store, source: Source, table: ShardTable, progress: Callable[[int], None]) -> None:
    """Read and verify what fills the rows of a shard table. They have the names that `source` has."""
    rows = source.find([spec.name for spec in table.specs])
    if (rows < 0).any():
        missing = sorted({table.specs[row].name for row in np.flatnonzero(rows < 0).tolist()})
        raise MissingTensors(
            f"{source.where} does not hold {listed(missing)}.", details={"missing": missing[:100]}
        )
    chosen, position = np.unique(rows, return_inverse=True)
    columns = source.select(chosen)
    for spec, row in zip(table.specs, position.tolist(), strict=True):
        stored = int(columns.kind[row]), int(columns.dtype[row]), columns.shape_of(row)
        if stored != (spec.kind, spec.dtype, spec.shape):
            raise ShapeMismatch(
                f"{source.where} holds {spec.name!r} as {what(*stored)}, and "
                f"{what(spec.kind, spec.dtype, spec.shape)} is wanted.",
                details={"tensor": spec.name},
            )
    plan = plan_read(table, position, columns, source.where)
    read_into(store, table, columns, plan, 1, progress)
