"""DTensors as boxes, by arithmetic alone: no gather, no communication.

Placements are applied to a tensor dimension from the first mesh dimension to the last. `Shard`
takes this rank's torch.chunk of what is left; `_StridedShard(dim, split_factor)` cuts what is
left into `split_factor` pieces and takes this rank's chunk of each, so the rank's rows may be
several runs. Each run is a box of its own (DCP writes the first offset only, which is wrong
unless the runs happen to touch).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from holdfast.adapters.memory import TensorMemory
from holdfast.adapters.tensors import spec_of
from holdfast.errors import BadInput
from holdfast.layout.box import Box, Dims
from holdfast.plan.holding import Holding

Run = tuple[int, int]
"""Consecutive indices: start and length."""
Cuts = tuple[tuple[int, int, int], ...]
"""For each mesh dimension that cuts a dimension of a tensor: parts, index, split_factor."""


def is_dtensor(value: Any) -> bool:
    """Told by name, so that plain tensors never import torch.distributed.tensor."""
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed")
        for base in type(value).__mro__
    )


def _slice_runs(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The positions `[start, stop)` of a sequence of runs, merged where they touch."""
    found: list[Run] = []
    at = 0
    for first, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            if found and found[-1][0] + found[-1][1] == first + low:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            else:
                found.append((first + low, high - low))
        at += length
    return found


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """torch.chunk: pieces of ceil(size / parts), the last ones shorter or empty."""
    piece = -(-size // parts)
    return min(piece * index, size), min(piece * (index + 1), size)


def local_runs(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[Run]:
    """Which indices of a dimension of `size` a rank holds, in the order they lie in its local tensor.

    `cuts`: for each mesh dimension that cuts this one, (parts, index, split_factor); 1 for Shard.
    """
    runs: list[Run] = [(0, size)] if size else []
    for parts, index, split_factor in cuts:
        total = sum(length for _, length in runs)
        pieces: list[Run] = []
        for piece in range(split_factor):
            low, high = _chunk(total, split_factor, piece)
            start, stop = _chunk(high - low, parts, index)
            pieces += _slice_runs(runs, low + start, low + stop)
        runs = _slice_runs(pieces, 0, total)  # merges neighbours
    return runs


class Pieces(NamedTuple):
    """Where the parts of a local tensor lie in the whole one."""

    shape: Dims
    """Of the local tensor."""
    parts: tuple[tuple[tuple[slice, ...], Box], ...]
    """Of the local tensor, and of the whole."""


@lru_cache(maxsize=4096)  # the layers of a model are alike
def pieces(shape: Dims, cuts: tuple[Cuts, ...]) -> Pieces:
    """What a rank holds of a tensor of `shape`; `cuts`: those of each dimension, as `local_runs` takes them."""
    runs = [local_runs(size, cut) for size, cut in zip(shape, cuts, strict=True)]
    starts = [list(itertools.accumulate([0, *(length for _, length in axis)])) for axis in runs]
    parts = []
    for pick in itertools.product(*(range(len(axis)) for axis in runs)):
        at = list(enumerate(pick))
        box = Box(tuple(runs[d][i][0] for d, i in at), tuple(runs[d][i][1] for d, i in at))
        parts.append((tuple(slice(starts[d][i], starts[d][i + 1]) for d, i in at), box))
    return Pieces(tuple(start[-1] for start in starts), tuple(parts))


class Place(NamedTuple):
    """A mesh as this rank sees it. torch computes each of these anew at every question."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None


def place_in(mesh: Any) -> Place:
    known: Place | None = getattr(mesh, "_holdfast_place", None)
    if known is None:
        coordinate = mesh.get_coordinate()
        here = None if coordinate is None else tuple(map(int, coordinate))
        known = mesh._holdfast_place = Place(tuple(map(int, mesh.mesh.shape)), here)
    return known


def spans(mesh: Any, everyone: tuple[int, ...]) -> bool:
    """Does the mesh contain just the participants? The answer is kept for as long as they are the same object."""
    known: tuple[tuple[int, ...], bool] | None = getattr(mesh, "_holdfast_spans", None)
    if known is None or known[0] is not everyone:
        known = mesh._holdfast_spans = (everyone, set(mesh.mesh.flatten().tolist()) == set(everyone))
    return known[1]


def _cuts(value: Any, name: str, place: Place) -> tuple[tuple[Cuts, ...], tuple[int, int]]:
    """For each tensor dimension its cuts, and (index, count) over the replicated mesh dimensions."""
    assert place.coordinate is not None
    cuts: list[Cuts] = [()] * len(value.shape)
    index, count = 0, 1
    for axis, placement in enumerate(value.placements):
        parts, here = place.sizes[axis], place.coordinate[axis]
        if placement.is_partial():
            raise BadInput(
                f"{name!r} is a DTensor with a pending reduction ({placement}) over mesh dimension {axis}; "
                "its value is not known on any rank: redistribute it to Shard or Replicate before saving."
            )
        if placement.is_replicate():
            index, count = index * parts + here, count * parts
        else:
            cuts[placement.dim] += ((parts, here, int(getattr(placement, "split_factor", 1))),)
    return tuple(cuts), (index, count)


def add_dtensor(
    held: Holding, name: str, value: Any, everyone: tuple[int, ...], undeclared: tuple[int, int] | None
) -> None:
    """This rank's boxes of a DTensor. Ranks outside its mesh hold nothing of it.

    Its replicas are declared only if the mesh is exactly the participants: ranks outside it may hold
    the same DTensor on a mesh of their own, and ranks of it that do not take part write nothing.
    """
    local: torch.Tensor = value._local_tensor  # to_local() would record autograd and may communicate
    if hasattr(local, "wait"):  # an AsyncCollectiveTensor: its data is not there before this
        local = local.wait()
    place = place_in(value.device_mesh)
    if place.coordinate is None:
        return
    spec = spec_of(name, local, value.shape)
    cuts, replica = _cuts(value, name, place)
    expected, parts = pieces(spec.shape, cuts)
    if tuple(local.shape) != expected and (local.numel() or all(expected)):
        raise BadInput(
            f"{name!r}: the local tensor has shape {tuple(local.shape)}, but its placements {value.placements} "
            f"on a mesh of shape {tuple(value.device_mesh.shape)} give {expected}; declare it with holdfast.Shard."
        )
    declared = undeclared
    if undeclared is None and spans(value.device_mesh, everyone):
        declared = replica
    for slices, box in parts:
        part = local.detach() if len(parts) == 1 else local[slices].detach()
        held.add(spec, box, declared, False, TensorMemory(part))
    if not parts:  # a trailing empty shard: the name is known here all the same
        empty = tuple(0 for _ in spec.shape)
        held.add(spec, Box(empty, empty), (0, 1), False, TensorMemory(local.detach()))
