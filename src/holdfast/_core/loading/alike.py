"""Check whether two stored tensors are equal, as tied weights are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from holdfast._core.format.columns import Columns, tied_rows
from holdfast._core.io.raw_read import fill_rows, slabs
from holdfast._core.io.source import Source
from holdfast._core.layout.box import whole
from holdfast._core.layout.tensor import DTYPES, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._core.store.base import Store


def stored_alike(columns: Columns, alike: Mapping[int, int], one: int, other: int) -> bool | None:
    """Return whether two rows hold the same elements; None if only their bytes can tell. alike: the tied rows
    of `columns`."""
    if alike.get(one, one) == alike.get(other, other):
        return True
    parts = _parts(columns, one), _parts(columns, other)
    # Equal chunk boundaries, so digests decide.
    return parts[0] == parts[1] if len(columns.digests) and parts[0][:3] == parts[1][:3] else None


def hold_the_same(store: Store, source: Source, one: TensorSpec, other: TensorSpec) -> bool:
    """Return whether two tensors of a checkpoint hold the same bits. Reads them if nothing else tells."""
    if one[1:] != other[1:]:
        return False
    chosen, position = np.unique(source.find([one.name, other.name]), return_inverse=True)
    columns = source.select(chosen)
    known = stored_alike(columns, tied_rows(columns), *position.tolist())
    if known is not None:
        return known
    for part in slabs(whole(one.shape), DTYPES[one.dtype].size):
        table = ShardTable()
        held = [torch.empty(part.shape, dtype=torch_dtype(one.dtype), device="cpu") for _ in range(2)]
        for spec, tensor in zip((one, other), held, strict=True):
            table.add(spec, part, (0, 1), False, TensorMemory(tensor))
        fill_rows(store, source, table)
        if not same_bits(*held):
            return False
    return True


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    x, y = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(x, y)


def _parts(columns: Columns, row: int) -> tuple[bytes, ...]:
    """Return boxes, blocks and digests of the chunks of a tensor."""
    chunks = columns.chunks_of(row)
    ends = np.concatenate([[0], columns.digest_end])[chunks.start : chunks.stop + 1]
    boxes = (getattr(columns, name)[chunks].tobytes() for name in ("offset", "size", "block"))
    return (*boxes, columns.digests[int(ends[0]) : int(ends[-1])].tobytes())
