"""Put loaded values into a state: check that each target is filled exactly once, and notify autograd."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from holdfast._core.base.values import told
from holdfast._core.io.file_reader import ReadPlan
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.live import LiveSource
from holdfast._core.state.memory import TensorMemory, count_changes
from holdfast._core.state.subclasses import is_sharded_tensor
from holdfast.errors import BadInput, HoldfastError, LoadFailed


def check_filled(table: ShardTable, plan: ReadPlan) -> None:
    """Refuse a plan that leaves elements of a target unwritten, or writes some twice."""
    wanted = plan.pairs.wanted
    planned = np.zeros(len(table), np.int64)
    # A row may have several pairs: `planned[wanted] += ...` would count only the last of them.
    np.add.at(planned, wanted, np.prod(plan.pairs.size, axis=1))
    needed = np.prod(table.arrays().size, axis=1)
    # Sums are enough: `plan_read` has refused chunks that overlap, so no element is counted twice.
    wrong = (planned != needed).nonzero()[0]
    if len(wrong):
        row = int(wrong[0])
        raise LoadFailed(
            f"{table.specs[row].name!r} would get {int(planned[row])} elements, and has {int(needed[row])} "
            f"on rank {table.rank}.",
            hint="This is a defect of Holdfast; nothing was read into the state.",
        )


def refuse_expanded(table: ShardTable) -> None:
    """Refuse targets whose elements share memory (expanded tensors)."""
    for spec, memory in zip(table.specs, table.memory, strict=True):
        if memory.address or not isinstance(memory, TensorMemory):  # mostly: its elements lie row-major
            continue
        if memory.tensor.numel() and _overlaps_itself(memory.tensor):
            raise BadInput(
                f"{spec.name!r} is an expanded or unfolded tensor: several of its elements are one in "
                "memory, so a load can't fill it.",
                hint="Give the tensor that it was made of, or a copy: tensor.contiguous().",
                rank=table.rank,
            )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0  # from the first element to the last one, along the axes so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def announce(table: ShardTable, leaves: Iterable[Leaf]) -> None:
    """Bump the autograd version counters of tensors that are about to change, before the first byte is
    written.

    leaves: the leaf of each row of the table.
    """
    changed: dict[int, torch.Tensor] = {}
    for memory, leaf in zip(table.memory, leaves, strict=True):
        tensor, value = getattr(memory, "tensor", None), leaf.value
        if tensor is not None:
            changed[id(tensor)] = tensor
        # A DTensor or a wrapper has a version counter apart from its inner tensors.
        if value is not tensor and isinstance(value, torch.Tensor) and not is_sharded_tensor(value):
            changed[id(value)] = value
        if leaf.outer is not None:
            changed[id(leaf.outer)] = leaf.outer
    count_changes(changed.values())


def give_back(
    leaves: Sequence[Leaf],
    filled: Iterable[int],
    objects: Mapping[int, object],
    built: Iterable[tuple[Leaf, object]],
) -> None:
    """Put objects and created values into the state; then notify the live containers. Tensors are there
    already.

    filled: indices of the leaves that were filled. objects: the objects that were read, by index of leaf.
    built: leaves, and the created values that take their place.
    """
    for index, value in objects.items():
        _put(leaves[index], value)
    sources: dict[int, LiveSource | None] = {}
    # A leaf of several boxes is listed several times. A source has many leaves, and is notified once, at the
    # end.
    for index in dict.fromkeys(filled):
        leaf = leaves[index]
        if leaf.made:
            _put(leaf, leaf.value)
        sources[id(leaf.source)] = leaf.source
    for leaf, value in built:
        _put(leaf, value)
    for source in sources.values():
        if source is not None:
            source.loaded()


def _put(leaf: Leaf, value: object) -> None:
    """Put one value into the user's container or object, whose own code may refuse it: a mapping that can't
    be changed, a generator that gets what is no state of one."""
    try:
        leaf.put(value)
    except HoldfastError:
        raise
    except Exception as error:
        raise LoadFailed(
            f"{leaf.name!r} could not be put into the state: {told(error)}",
            hint="Give a state whose dicts can be changed, and the kind of value that was saved; or leave it "
            "out of the load.",
        ) from error
