"""Tensors that describe which boxes of a global tensor they hold: ShardedTensor, and torch's
CheckpointableTensor protocol.

A ShardedTensor (FSDP1, torchrec) has local shards, each with offsets and sizes. A CheckpointableTensor (torch
2.15) is any tensor with the attributes `global_shape`, `global_offsets`, `local_offsets` and `local_sizes`:
each of its boxes has a local offset (an empty one: the box is the whole local tensor) and a global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Replica
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, spec_of
from holdfast._core.state.subclasses import is_sharded_tensor
from holdfast._core.torch_private import group_of
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def is_checkpointable(value: torch.Tensor) -> bool:
    return getattr(value, "global_shape", None) is not None and all(hasattr(value, name) for name in _FIELDS)


def copy_boxes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the attributes of a CheckpointableTensor to a tensor that replaces it."""
    for name in _FIELDS if is_checkpointable(source) else ():
        setattr(target, name, getattr(source, name))


def add_checkpointable(
    table: ShardTable, name: str, tensor: torch.Tensor, undeclared: Replica | None
) -> None:
    """Add the boxes of a CheckpointableTensor. Whether other ranks hold the same box is undeclared."""
    shape, spec = tuple(tensor.shape), spec_of(name, tensor, tuple(map(int, getattr(tensor, _FIELDS[0]))))
    # The attributes come from other code, so each box is checked here, where the tensor's name is known.
    starts, inner, sizes = ([tuple(map(int, box)) for box in getattr(tensor, field)] for field in _FIELDS[1:])
    if not len(starts) == len(inner) == len(sizes):
        raise BadInput(
            f"{name!r} has {len(starts)} global_offsets, {len(inner)} local_offsets and {len(sizes)} "
            "local_sizes; each of its boxes has one of each."
        )
    for start, local_start, size in zip(starts, inner, sizes, strict=True):
        box, part = Box(start, size), Box(local_start or (0,) * len(shape), size if local_start else shape)
        dims = {len(start), len(local_start or shape), len(size), len(shape), len(spec.shape)}
        if len(dims) > 1 or part.shape != size or not box.within(spec.shape) or not part.within(shape):
            raise BadInput(
                f"{name!r} says that it holds size {size} at {start} of a global shape {spec.shape}, at "
                f"{local_start} of its own shape {shape}, which does not lie inside both."
            )
        table.add(spec, box, undeclared, False, TensorMemory(tensor.detach()[part.slices()]))


def add_sharded(
    table: ShardTable, name: str, value: ShardedTensor, everyone: Sequence[int], undeclared: Replica | None
) -> None:
    """Add this rank's shards of a ShardedTensor. Each shard belongs to one rank of the tensor's group.

    Ranks outside the group may hold the same ShardedTensor over another group; so there is no other copy only
    if all participants are in the group.
    """
    shape = tuple(map(int, value.metadata().size))
    group = group_of(value)
    ranks = set(dist.get_process_group_ranks(group)) if group is not None else set()
    declared = (0, 1) if ranks >= set(everyone) else undeclared
    for shard in value.local_shards():
        if is_sharded_tensor(shard.tensor):
            raise BadInput(
                f"{name!r} is a ShardedTensor of ShardedTensors.",
                hint="Use DTensors (FSDP2), or declare the parts with holdfast.Shard.",
            )
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        table.add(
            spec_of(name, shard.tensor, shape), box, declared, False, TensorMemory(shard.tensor.detach())
        )
