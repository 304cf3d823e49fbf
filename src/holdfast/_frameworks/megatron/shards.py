"""Megatron's sharded state as leaves of a Holdfast state, for saves and loads.

A `ShardedTensor` names a global tensor by its key. Its offset and shape, with the prepended axes (layer,
expert) as axes of length one, are a box of that tensor.

Which rank writes a box. Each rank decides alone, so the rule must give the same answer on all ranks that hold
a copy, and the main replica cannot see whether there are others. Its replica_id alone does not say: under
FSDP2 each data-parallel rank is the main replica of a slice, and a user may describe a tensor on the main
rank only. But megatron-core describes a parameter on every rank of its data-parallel group, numbered
(0, 0, i) in the group's order. So the copies (0, 0, i) of a parameter share the writing (`plan/replicas.py`).
Everything else is written by the main replica alone: buffers (a router's expert bias), detached parameters,
FSDP2's slices, optimizer state, tensors that are not sharded regularly (an optimizer's buckets), and tensors
that megatron-core numbers over another group. Tensor- and pipeline-parallel copies never write. Both parts of
the rule use the same facts, which the code that made the state dict sets alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from holdfast._core.format.names import COMMON
from holdfast._core.layout.box import Box
from holdfast._core.layout.ranks import progressions
from holdfast._core.layout.tensor import Dims, TensorSpec
from holdfast._core.state.leaf import Leaf, Put
from holdfast._core.state.memory import Part, ViewMemory, spec_of
from holdfast._core.state.tensors import Shard
from holdfast._core.torch_private import base_of
from holdfast._frameworks.megatron import mcore
from holdfast.errors import BadInput

Progression = tuple[int, int, int]
_SOLE = (0, 1)
_COPY = (1, 2)
"""Index and count of a copy with an unknown number other than 0."""


class _Group:
    """The ranks that hold copies, in the order of their replica numbers; empty if not known."""

    def __init__(self, rank: int, ranks: tuple[int, ...], participants: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.number = ranks.index(rank) if rank in ranks else None
        """This rank's replica number."""
        present = set(participants)
        # Renumbered among the participants, because other ranks write nothing.
        sharing = [other for other in ranks if other in present]
        self.share = (sharing.index(rank), len(sharing)) if rank in sharing else _SOLE


class WrittenCopies:
    """Decides which copies of tensors this rank writes."""

    def __init__(self, rank: int, participants: tuple[int, ...]) -> None:
        self.rank, self.participants = rank, participants
        dense, expert = mcore.groups()
        self._dense, self._expert = _Group(rank, dense, participants), _Group(rank, expert, participants)
        self._unknown = _Group(rank, (), ())

    def replica(self, tensor: mcore.ShardedTensor) -> tuple[int, int] | None:
        """Return (index, count) of this rank among the ranks that share the writing; None if it is none."""
        replica_id = tensor.replica_id
        # A plain number doesn't say over which ranks it counts, so the main replica alone writes.
        if isinstance(replica_id, int) or not replica_id:
            return _SOLE if mcore.is_main_replica(replica_id) else None
        *others, number = replica_id
        # A tensor- or pipeline-parallel copy.
        if any(others):
            return None
        group = self._group(tensor)
        # Numbered over another group, which this rank does not know.
        if group.number != number:
            return _SOLE if number == 0 else None
        if _is_parameter(tensor.data):
            return group.share
        # The main replica, or the first participant in its place.
        return _SOLE if group.share[0] == 0 else None

    def writes_state(self, tensor: mcore.ShardedTensor, holders: Collection[int]) -> bool:
        """Return whether this rank writes its shard of the optimizer state of a model tensor.

        holders: the ranks over which the optimizer shards the state. The tensor may have copies outside of
        them (another instance of the optimizer; tensor-parallel ranks that hold a whole expert): of all such
        groups, the one with the main replica writes.
        """
        replica_id = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id, 0, 0)
        if any(replica_id[:-1]):
            return False
        group = self._group(tensor)
        if group.number is None or group.number != replica_id[-1]:
            return True  # its groups are not known; the commit fails if another rank writes it, too
        return group.ranks[0] in holders

    def same(self, sharded: Iterable[mcore.ShardedTensor | mcore.ShardedObject]) -> list[list[Progression]]:
        """Return the ranks that hold the same data as this one: its data-parallel group and its expert
        data-parallel group, if the whole state is a model's, in copies numbered over one of them; else none.

        The rule is narrow on purpose: a save must wait for a late rank with data of its own (of an optimizer,
        of FSDP2, of a random generator).
        """
        groups = (self._dense, self._expert)
        if any(group.number is None for group in groups) or not all(map(self._is_copy, sharded)):
            return []
        return [progressions(group.ranks) for group in groups]

    def _is_copy(self, item: mcore.ShardedTensor | mcore.ShardedObject) -> bool:
        """Return whether, by locally known facts, all ranks of this rank's group hold the same item."""
        if isinstance(item, mcore.ShardedObject):
            return "_extra_state" in item.key  # Transformer Engine's, of a module
        replica_id, data = item.replica_id, item.data
        if isinstance(replica_id, int) or not replica_id or data is None:
            return False
        if self._group(item).number != replica_id[-1]:
            return False
        # A slice has the number 0 on each rank. It is no parameter of the model, and not whole.
        return _is_parameter(data) or tuple(data.shape) == tuple(item.global_shape[item.prepend_axis_num :])

    def _group(self, tensor: mcore.ShardedTensor) -> _Group:
        # For an irregular grid or optimizer state, it is not known whether there are other copies.
        # megatron-core's own optimizers have these keys.
        if tensor.axis_fragmentations is None or tensor.key.startswith(("optimizer.", "chained_")):
            return self._unknown
        # The key of an expert layer that is described alone has no prefix.
        return self._expert if ".experts." in f".{tensor.key}" else self._dense


class AllCopies(WrittenCopies):
    """Selects all copies, including ones that are not written."""

    def replica(self, tensor: mcore.ShardedTensor) -> tuple[int, int]:
        return super().replica(tensor) or _COPY


def _is_parameter(data: object) -> bool:
    """Return whether data is a parameter, or a view of one (a part of a fused weight)."""
    return isinstance(data, torch.nn.Parameter) or isinstance(base_of(data), torch.nn.Parameter)


def to_save(
    sharded: Iterable[mcore.ShardedTensor | mcore.ShardedObject],
    common: Mapping[str, object],
    copies: WrittenCopies,
) -> list[Leaf]:
    """Make the leaves that this rank contributes to a save."""
    leaves: list[Leaf] = []
    # One spec for the thousands of experts under one key.
    known: dict[tuple[object, ...], tuple[TensorSpec, Dims]] = {}
    for item in sharded:
        if isinstance(item, mcore.ShardedObject):
            if mcore.is_main_replica(item.replica_id):
                # Private: no other rank saves it, so ranks need not compare it.
                leaves.append(Leaf(item.unique_key, item.data, _ignore, private=True))
            continue
        replica = copies.replica(item)
        if replica is not None:
            leaves.append(Leaf(item.key, _part(item, replica, known), _ignore))
    if copies.rank == copies.participants[0]:
        leaves.append(Leaf(COMMON, dict(common), _ignore, private=True))
    return leaves


def to_load(
    sharded: Iterable[mcore.ShardedTensor | mcore.ShardedObject],
    skip: Collection[str],
    stock: bool,
    stored_as: Mapping[str, str],
) -> list[Leaf]:
    """Make the leaves that this rank loads; every copy reads for itself. Keys in `skip` are left out.

    stock: the checkpoint is stock megatron-core's, with each object in a list of one.
    stored_as: the stored names of objects and tensors, where they differ.
    """
    leaves: list[Leaf] = []
    for item in sharded:
        if item.key in skip:
            continue
        if isinstance(item, mcore.ShardedObject):
            name = stored_as.get(item.unique_key, item.unique_key)
            leaves.append(Leaf(name, None, _into(item, stock), private=True))
            continue
        # Allocates only if the caller has given no memory, as in `load_plain_tensors`.
        item.init_data("cpu")
        data = _data(item)[(None,) * item.prepend_axis_num]
        value = Shard(data, item.global_shape, item.global_offset, _SOLE)
        name = stored_as.get(item.key, item.key)
        leaves.append(Leaf(name, value, _ignore, converts=True, fits=item.allow_shape_mismatch))
    return leaves


def _part(
    tensor: mcore.ShardedTensor,
    replica: tuple[int, int],
    known: dict[tuple[object, ...], tuple[TensorSpec, Dims]],
) -> Part:
    """Convert a ShardedTensor to the part that this rank writes. known: specs and box shapes made so far."""
    data, lead = _data(tensor), tensor.prepend_axis_num
    # Everything that a spec depends on: of thousands of experts under one key, only the first is checked.
    mark = (tensor.key, data.dtype, data.device.type, tensor.global_shape, data.shape)
    if mark not in known:
        known[mark] = spec_of(tensor.key, data, tensor.global_shape), (*(1,) * lead, *data.shape)
    spec, shape = known[mark]
    return Part(spec, Box(tuple(tensor.global_offset), shape), ViewMemory(data, lead), replica)


def _data(tensor: mcore.ShardedTensor) -> torch.Tensor:
    if tensor.data is None:
        raise BadInput(f"{tensor.key!r} is a ShardedTensor without data.")
    if getattr(tensor, "flattened_range", None) is not None:
        raise BadInput(f"{tensor.key!r} has a flattened_range, which megatron-core no longer supports.")
    return tensor.data  # type: ignore[no-any-return]


def take_data(item: mcore.ShardedTensor | mcore.ShardedObject) -> object:
    data = item.data
    return data.detach() if isinstance(data, torch.Tensor) else data


def _ignore(value: object) -> None:
    """Ignore a loaded value: tensors are filled in place."""


def _into(item: mcore.ShardedTensor | mcore.ShardedObject, stock: bool) -> Put:
    def put(value: Any) -> None:
        item.data = value[0] if stock else value

    return put
