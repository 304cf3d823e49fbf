"""Into a state what a load has read: each target is to get exactly its own bytes, and autograd is to know of
it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from holdfast.errors import HoldfastError, LoadFailed
from holdfast.io.file_reader import ReadPlan
from holdfast.plan.shard_table import ShardTable
from holdfast.state.flatten import Leaf
from holdfast.state.live import Source
from holdfast.state.memory import count_changes
from holdfast.state.subclasses import is_sharded_tensor


def check_filled(table: ShardTable, plan: ReadPlan) -> None:
    """Refuse a plan that leaves elements of a target as they are, or writes some twice."""
    wanted = plan.pairs.wanted
    planned = np.zeros(len(table), np.int64)
    # A row may have several pairs: `planned[wanted] += ...` would count only the last of them.
    np.add.at(planned, wanted, np.prod(plan.pairs.size, axis=1) if len(wanted) else 0)
    needed = np.prod(table.arrays().size, axis=1)
    # Sums are enough: `plan_read` has refused chunks that overlap, so nothing comes twice.
    wrong = np.flatnonzero(planned != needed)
    if len(wrong):
        row = int(wrong[0])
        raise LoadFailed(
            f"{table.specs[row].name!r} would get {int(planned[row])} elements, and has {int(needed[row])} "
            f"on rank {table.rank}.",
            hint="This is a defect of Holdfast; nothing was read into the state.",
        )


def announce(table: ShardTable, leaves: Iterable[Leaf]) -> None:
    """Let autograd know what is about to be filled, before the first byte is."""
    count_changes(_tensors(table, leaves))


def _tensors(table: ShardTable, leaves: Iterable[Leaf]) -> Iterator[torch.Tensor]:
    for memory in table.memory:
        tensor = getattr(memory, "tensor", None)
        if tensor is not None:
            yield tensor
    for leaf in leaves:  # a DTensor, and a wrapper, count apart from what they are made of
        if isinstance(leaf.value, torch.Tensor) and not is_sharded_tensor(leaf.value):
            yield leaf.value
        if leaf.outer is not None:
            yield leaf.outer


def give_back(
    leaves: Sequence[Leaf],
    filled: Iterable[int],
    objects: Mapping[int, object],
    built: Iterable[tuple[Leaf, object]],
) -> None:
    """Objects, and what was made, into the state; then live containers take over what is in them. Tensors are
    there already.

    filled, objects: positions of leaves, and the objects that were read. built: what takes the place of
        leaves that were made.
    """
    for index, value in objects.items():
        leaves[index].put(value)
    sources: dict[int, Source | None] = {}
    # A leaf of several boxes is named several times. Sources have many leaves, and are told once, after all.
    for index in dict.fromkeys(filled):
        leaf = leaves[index]
        if leaf.made:
            leaf.put(leaf.value)
        sources[id(leaf.source)] = leaf.source
    for leaf, value in built:
        leaf.put(value)
    for source in sources.values():
        try:
            if source is not None:
                source.loaded()
        except HoldfastError as error:
            error.hint = f"{error.hint} Other ranks don't know of this.".strip()
            raise
