"""Megatron's sharded state as leaves of a Holdfast state, and what was loaded back in its place.

A `ShardedTensor` names a global tensor by its key; its offset and shape, with the prepended axes (layer,
expert) as axes of length one, are a box of it.

Who writes a box. Each rank decides alone, so the rule must give the same answer on all ranks that hold a
copy; the main replica in particular cannot see whether there are others. Its own numbers do not tell: under
FSDP2 each data-parallel rank is the main replica of a slice, and a user may describe a tensor on the main
rank only. megatron-core describes a parameter on every rank of its data-parallel group, numbered (0, 0, i) in
the group's order. So copies (0, 0, i) of a parameter share the writing (`plan/replicas.py`). Anything else is
written by the main replica, and by no other copy:
buffers (a router's expert bias), detached parameters, FSDP2's slices, optimizer state, what isn't cut
regularly (an optimizer's buckets), tensors that megatron-core numbers over another group. Tensor- and
pipeline-parallel copies never write. Both halves of the rule look at the same facts, which the code that made
the state dict set alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from holdfast.errors import BadInput
from holdfast.format.names import COMMON
from holdfast.integrations.megatron import mcore
from holdfast.layout.box import Box
from holdfast.layout.tensor import Dims, TensorSpec
from holdfast.state.flatten import Leaf
from holdfast.state.memory import Part, ViewMemory, spec_of
from holdfast.state.tensors import Shard

_SOLE = (0, 1)


class _Group:
    """Ranks that hold copies, in the order of their replica numbers; none: not known."""

    def __init__(self, rank: int, ranks: tuple[int, ...], participants: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.number = ranks.index(rank) if rank in ranks else None
        """This rank's replica number."""
        present = set(participants)
        # Numbered anew among those that take part: others write nothing.
        sharing = [other for other in ranks if other in present]
        self.share = (sharing.index(rank), len(sharing)) if rank in sharing else _SOLE
        self.is_first = not self.share[0]
        """Is this rank the first that takes part?"""


class Copies:
    """Which of the data-parallel copies of a tensor this rank is."""

    def __init__(self, rank: int, participants: tuple[int, ...]) -> None:
        self.rank, self.participants = rank, participants
        dense, expert = mcore.groups()
        self._dense, self._expert = _Group(rank, dense, participants), _Group(rank, expert, participants)
        self._unknown = _Group(rank, (), ())

    def replica(self, tensor: mcore.ShardedTensor) -> tuple[int, int] | None:
        """(index, count) of this rank among those that share the writing, None if it writes nothing of the
        tensor."""
        said = tensor.replica_id
        # A plain number doesn't say over which ranks it counts: the main replica alone writes.
        if isinstance(said, int) or not said:
            return _SOLE if mcore.is_main_replica(said) else None
        *others, number = said
        # A tensor- or pipeline-parallel copy.
        if any(others):
            return None
        group = self._group(tensor)
        # Numbered over some other group, of which this rank knows nothing.
        if group.number != number:
            return _SOLE if number == 0 else None
        if _is_parameter(tensor.data):
            return group.share
        return _SOLE if group.is_first else None  # the main replica, or who stands for it if it takes no part

    def writes_state(self, tensor: mcore.ShardedTensor, holders: Collection[int]) -> bool:
        """Does this rank write the optimizer state of a model tensor, whose shards over `holders` it has one
        of?

        The tensor may have copies outside of the optimizer's group (another instance of it; tensor-parallel
        ranks that hold an expert whole): of all groups of holders the one with the main replica writes.
        """
        said = tensor.replica_id if isinstance(tensor.replica_id, tuple) else (tensor.replica_id, 0, 0)
        if any(said[:-1]):
            return False
        group = self._group(tensor)
        if group.number is None or group.number != said[-1]:
            return True  # its groups are not known; the commit finds out if another rank writes it, too
        return group.ranks[0] in holders

    def _group(self, tensor: mcore.ShardedTensor) -> _Group:
        # No regular grid, or an optimizer's state: whether there are other copies is not known.
        if tensor.axis_fragmentations is None or _is_optimizer(tensor.key):
            return self._unknown
        # An expert layer that is described alone has no prefix.
        return self._expert if ".experts." in f".{tensor.key}" else self._dense


def _is_parameter(data: object) -> bool:
    """Is it a parameter, or a view of one (a part of a fused weight)?"""
    return isinstance(data, torch.nn.Parameter) or isinstance(
        getattr(data, "_base", None), torch.nn.Parameter
    )


def _is_optimizer(key: str) -> bool:
    """State that megatron-core's own optimizers describe, of which other copies need not be there."""
    return key.startswith(("optimizer.", "chained_"))


def to_save(
    sharded: Iterable[mcore.ShardedTensor | mcore.ShardedObject], common: Mapping[str, object], copies: Copies
) -> list[Leaf]:
    """What this rank contributes to a save; `sharded` are ShardedTensors and ShardedObjects."""
    leaves: list[Leaf] = []
    known: dict[
        tuple[object, ...], tuple[TensorSpec, Dims]
    ] = {}  # one for the thousands of experts under one key
    for item in sharded:
        if isinstance(item, mcore.ShardedObject):
            if mcore.is_main_replica(item.replica_id):
                # Private: no other rank saves it, so none has to be asked.
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
    skip: Collection[str] = (),
    stock: bool = False,
    stored_as: Mapping[str, str] | None = None,
) -> list[Leaf]:
    """What this rank asks for: every copy reads for itself. Keys in `skip` are left out.

    stock: the checkpoint is megatron-core's own, in which each object is in a list of one.
    stored_as: the names of objects and tensors that the checkpoint has under another one.
    """
    leaves: list[Leaf] = []
    for item in sharded:
        if item.key in skip:
            continue
        if isinstance(item, mcore.ShardedObject):
            name = (stored_as or {}).get(item.unique_key, item.unique_key)
            leaves.append(Leaf(name, None, _into(item, stock), private=True))
            continue
        # Allocates only where the caller has given no memory, as `load_plain_tensors` does.
        item.init_data("cpu")
        value = shard(item, (0, 1))
        name = (stored_as or {}).get(item.key, item.key)
        leaves.append(Leaf(name, value, _ignore, converts=True, fits=item.allow_shape_mismatch))
    return leaves


def _part(
    tensor: mcore.ShardedTensor,
    replica: tuple[int, int],
    known: dict[tuple[object, ...], tuple[TensorSpec, Dims]],
) -> Part:
    """A ShardedTensor as what is written of it; `known` are the specs and the shapes of boxes made
    already."""
    data, lead = _data(tensor), tensor.prepend_axis_num
    # What a spec is made of: of thousands of experts under one key only the first is looked at closely.
    mark = (tensor.key, data.dtype, data.device.type, tensor.global_shape, data.shape)
    if mark not in known:
        known[mark] = spec_of(tensor.key, data, tensor.global_shape), (*(1,) * lead, *data.shape)
    spec, shape = known[mark]
    return Part(spec, Box(tuple(tensor.global_offset), shape), ViewMemory(data, lead), replica)


def shard(tensor: mcore.ShardedTensor, replica: tuple[int, int]) -> Shard:
    """A ShardedTensor as a `Shard` over the same memory."""
    data = _data(tensor)
    return Shard(data[(None,) * tensor.prepend_axis_num], tensor.global_shape, tensor.global_offset, replica)


def _data(tensor: mcore.ShardedTensor) -> torch.Tensor:
    if tensor.data is None:
        raise BadInput(f"{tensor.key!r} is a ShardedTensor without data.")
    if getattr(tensor, "flattened_range", None) is not None:
        raise BadInput(f"{tensor.key!r} has a flattened_range, which megatron-core no longer supports.")
    return tensor.data  # type: ignore[no-any-return]


def take_data(item: mcore.ShardedTensor | mcore.ShardedObject) -> object:
    """What a ShardedTensor or ShardedObject holds once it was loaded."""
    data = item.data
    return data.detach() if isinstance(data, torch.Tensor) else data


def _ignore(value: object) -> None:
    """Tensors are filled in place."""


def _into(item: mcore.ShardedTensor | mcore.ShardedObject, stock: bool) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        item.data = value[0] if stock else value

    return put
