"""Holdings without torch: shards that have numbers and no data."""

from __future__ import annotations

import numpy as np

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, TensorSpec
from holdfast._core.plan.shard_table import PlannedRows, ShardTable


class NoMemory:
    """What a plan must never touch."""

    address = 0

    def gather(self, box: Box, out: object) -> None:
        raise AssertionError("a plan read data")

    def scatter(self, box: Box, data: object) -> None:
        raise AssertionError("a plan wrote data")


def holding(
    *rows: tuple[str, tuple[int, ...], Box | None], dtype: str = "float32", plain: bool = False, rank: int = 0
) -> ShardTable:
    """Rows of (name, global shape, box or None for all of it)."""
    table = ShardTable(rank)
    for name, shape, box in rows:
        spec = TensorSpec(name, CODE_OF[dtype], shape)
        table.add(spec, whole(shape) if box is None else box, None, plain, NoMemory())
    return table


def boxes_of(plan: PlannedRows, row: int) -> tuple[np.ndarray, np.ndarray]:
    mine = plan.row == row
    return plan.offset[mine], plan.size[mine]
