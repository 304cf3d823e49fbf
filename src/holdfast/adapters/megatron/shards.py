"""Megatron's sharded state as leaves of a Holdfast state, and what was loaded back in its place.

A `ShardedTensor` names a global tensor by its key; its offset and shape, with the prepended axes (layer, expert)
as axes of length one, are a box of it. The main replica, whose `replica_id` is all zeros, exists always; of the
others only the data-parallel ones, (0, 0, i), are sure to hold the same and to be as many as their group, so these share
the writing (`plan/replicas.py`) and tensor- and pipeline-parallel copies write nothing. What isn't cut regularly
(an optimizer's buckets) has no other data-parallel copies, whatever its `replica_id` says: the main replica writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.megatron import mcore
from holdfast.adapters.state import Leaf
from holdfast.adapters.tensors import Shard
from holdfast.errors import BadInput
from holdfast.format.torch_dist import COMMON


@dataclass(frozen=True)
class Copies:
    """Which of the data-parallel copies of a tensor this rank is."""

    rank: int
    participants: tuple[int, ...]
    dense: tuple[int, ...]
    """Global ranks of the data-parallel group, in the order of their replica numbers; empty: not known."""
    expert: tuple[int, ...]

    @staticmethod
    def here(rank: int, participants: tuple[int, ...]) -> Copies:
        return Copies(rank, participants, *mcore.groups())

    def replica(self, tensor: Any) -> tuple[int, int] | None:
        """(index, count) of this rank among those that share the writing, None if it isn't one of them."""
        said = tensor.replica_id
        if isinstance(said, int) or not said:
            return (0, 1) if mcore.is_main_replica(said) else None
        *others, number = said
        if any(others):
            return None
        group = self._group(tensor)
        if self.rank not in group or group.index(self.rank) != number:
            return (0, 1) if number == 0 else None
        present = [rank for rank in group if rank in self.participants]
        return present.index(self.rank), len(present)

    def writes_state(self, tensor: Any, holders: Collection[int]) -> bool:
        """Does this rank write the optimizer state of a model tensor, whose shards over `holders` it has one of?

        The tensor may have copies outside of the optimizer's group (another instance of it; tensor-parallel ranks that
        hold an expert whole): of all groups of holders the one with the main replica writes.
        """
        said = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id, 0, 0)
        if any(said[:-1]):
            return False
        group = self._group(tensor)
        if self.rank not in group or group.index(self.rank) != said[-1]:
            return True  # its groups are not known; the commit finds out if another rank writes it, too
        return group[0] in holders

    def _group(self, tensor: Any) -> tuple[int, ...]:
        if tensor.axis_fragmentations is None or _is_optimizer(tensor.key):
            return ()
        return self.expert if ".experts." in tensor.key else self.dense


def _is_optimizer(key: str) -> bool:
    """State that megatron-core's own optimizers describe, of which other copies need not be there."""
    return key.startswith(("optimizer.", "chained_"))


def to_save(sharded: Iterable[Any], common: Mapping[str, Any], copies: Copies) -> list[Leaf]:
    """What this rank contributes to a save; `sharded` are ShardedTensors and ShardedObjects."""
    leaves: list[Leaf] = []
    for item in sharded:
        if isinstance(item, mcore.ShardedObject):
            if mcore.is_main_replica(item.replica_id):
                leaves.append(Leaf(item.unique_key, item.data, _ignore, private=True))
            continue
        replica = copies.replica(item)
        if replica is not None:
            leaves.append(Leaf(item.key, shard(item, replica), _ignore))
    if copies.rank == copies.participants[0]:
        leaves.append(Leaf(COMMON, dict(common), _ignore, private=True))
    return leaves


def to_load(sharded: Iterable[Any], skip: Collection[str] = (), stock: bool = False) -> list[Leaf]:
    """What this rank asks for: every copy reads for itself. Keys in `skip` are left out.

    stock: the checkpoint is megatron-core's own, in which each object is in a list of one.
    """
    leaves: list[Leaf] = []
    for item in sharded:
        if item.key in skip:
            continue
        if isinstance(item, mcore.ShardedObject):
            leaves.append(Leaf(item.unique_key, None, _into(item, stock), private=True))
            continue
        item.init_data("cpu")
        value = shard(item, (0, 1))
        leaves.append(Leaf(item.key, value, _ignore, converts=True, fits=item.allow_shape_mismatch))
    return leaves


def shard(tensor: Any, replica: tuple[int, int]) -> Shard:
    """A ShardedTensor as a `Shard` over the same memory."""
    data = tensor.data
    if data is None:
        raise BadInput(f"{tensor.key!r} is a ShardedTensor without data.")
    if tensor.flattened_range is not None:
        raise BadInput(f"{tensor.key!r} has a flattened_range, which megatron-core no longer supports.")
    return Shard(data[(None,) * tensor.prepend_axis_num], tensor.global_shape, tensor.global_offset, replica)


def take_data(item: Any) -> Any:
    """What a ShardedTensor or ShardedObject holds once it was loaded."""
    data = item.data
    return data.detach() if isinstance(data, torch.Tensor) else data


def _ignore(value: Any) -> None:
    """Tensors are filled in place."""


def _into(item: Any, stock: bool) -> Any:
    def put(value: Any) -> None:
        item.data = value[0] if stock else value

    return put
