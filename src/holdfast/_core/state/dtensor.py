"""DTensors as boxes, by arithmetic alone: no gather, no communication.

Placements are applied to a tensor dimension from the first mesh dimension to the last. `Shard` takes this
rank's torch.chunk of the rest; `_StridedShard(dim, split_factor)` cuts the rest into `split_factor` pieces
and takes this rank's chunk of each, so the rank's rows may be several runs. Each run is a separate box (DCP
writes only the first offset, which is wrong unless the runs happen to touch).

Megatron-FSDP cuts a flat buffer, so its local tensors have other lengths than the placements give; the shards
of a tensor may be uneven, or empty anywhere. Its chunk metadata (`__create_chunk_list__`) is used if it is
there. Otherwise the offset is deferred along the axis whose length differs, and is computed later from the
lengths of all ranks (`layout/deferred_offset.py`). The order of a mesh's dimensions along an axis is that of
the placements, strided ones last, or `_shard_order`, which Megatron-FSDP sets on its meshes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.deferred_offset import DeferredOffset, told
from holdfast._core.layout.tensor import Dims, Replica, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, spec_of
from holdfast._core.state.subclasses import has_memory, is_wrapper, settled, type_name
from holdfast._core.state.wrapped import inner_parts
from holdfast._core.torch_private import local_of
from holdfast.errors import BadInput

if TYPE_CHECKING:  # a process without DTensors never imports them
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

CHUNKS = "__create_chunk_list__"
"""A method of a local tensor that returns its offset: torch DCP calls it, Megatron-FSDP sets it."""
GET_SHARD = "__get_tensor_shard__"
"""A method that returns one part of a local tensor that consists of several: torch's LocalShardsWrapper
(torchrec) has it."""
_VIEW, _SPANS = "_holdfast_view", "_holdfast_spans"
"""Attributes that we set on a mesh, to compute their values once per mesh."""
IndexRun = tuple[int, int]
"""Consecutive indices: start and length."""
Cuts = tuple[tuple[int, int, int], ...]
"""For each mesh dimension that cuts a dimension of a tensor: parts, index, split_factor."""


def _slice_runs(runs: Sequence[IndexRun], start: int, stop: int) -> list[IndexRun]:
    """Return the positions `[start, stop)` of a sequence of runs, merged where they touch."""
    merged: list[IndexRun] = []
    position = 0
    for first, length in runs:
        low, high = max(start - position, 0), min(stop - position, length)
        if low < high:
            if merged and merged[-1][0] + merged[-1][1] == first + low:
                merged[-1] = (merged[-1][0], merged[-1][1] + high - low)
            else:
                merged.append((first + low, high - low))
        position += length
    return merged


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of a piece as torch.chunk cuts it: ceil(size / parts) long, the last ones shorter
    or empty."""
    # Not balanced: 10 in 4 parts are 3, 3, 3, 1, as torch cuts them.
    piece = -(-size // parts)
    return min(piece * index, size), min(piece * (index + 1), size)


def local_runs(size: int, cuts: Sequence[tuple[int, int, int]]) -> list[IndexRun]:
    """Return which indices of a dimension of `size` a rank holds, in the order of its local tensor.

    `cuts`: for each mesh dimension that cuts this one, (parts, index, split_factor); 1 for Shard.
    """
    runs: list[IndexRun] = [(0, size)] if size else []
    for parts, index, split_factor in cuts:
        total = sum(length for _, length in runs)
        pieces: list[IndexRun] = []
        for piece in range(split_factor):
            low, high = _chunk(total, split_factor, piece)
            start, stop = _chunk(high - low, parts, index)
            pieces += _slice_runs(runs, low + start, low + stop)
        runs = _slice_runs(pieces, 0, total)  # merges neighbours
    return runs


class Pieces(NamedTuple):
    """The parts of a local tensor, and their boxes in the global one."""

    shape: Dims
    """Shape of the local tensor."""
    parts: tuple[tuple[tuple[slice, ...], Box], ...]
    """For each part, its slices in the local tensor and its box in the global tensor."""
    begin: Dims
    """Along each axis, the offset of the first run."""
    runs: Dims
    """Along each axis, the number of runs."""


@lru_cache(maxsize=4096)  # the layers of a model are alike
def pieces(shape: Dims, cuts: tuple[Cuts, ...]) -> Pieces:
    """Return the pieces that a rank holds of a tensor of `shape`. `cuts`: for each dimension, as in
    `local_runs`."""
    runs = [local_runs(size, cut) for size, cut in zip(shape, cuts, strict=True)]
    starts = [list(itertools.accumulate([0, *(length for _, length in axis)])) for axis in runs]
    parts = []
    for pick in itertools.product(*(range(len(axis)) for axis in runs)):
        indices = list(enumerate(pick))
        box = Box(tuple(runs[d][i][0] for d, i in indices), tuple(runs[d][i][1] for d, i in indices))
        parts.append((tuple(slice(starts[d][i], starts[d][i + 1]) for d, i in indices), box))
    begin = tuple(axis[0][0] if axis else 0 for axis in runs)
    return Pieces(tuple(start[-1] for start in starts), tuple(parts), begin, tuple(map(len, runs)))


class MeshView(NamedTuple):
    """A mesh as this rank sees it. torch would compute each of these again at every access."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    order: tuple[int, ...] | None
    """Mesh dimensions in the order in which they cut, if it is not that of the placements."""


def mesh_view(mesh: DeviceMesh) -> MeshView:
    known: MeshView | None = getattr(mesh, _VIEW, None)
    # The rest of a mesh never changes; the order is compared each time.
    order = getattr(mesh, "_shard_order", None)  # Megatron-FSDP sets it for every parameter
    if known is None or known.order != (order and tuple(order)):
        coordinate = mesh.get_coordinate()
        here = None if coordinate is None else tuple(map(int, coordinate))
        known = MeshView(tuple(map(int, mesh.mesh.shape)), here, order and tuple(map(int, order)))
        setattr(mesh, _VIEW, known)
    return known


def spans(mesh: DeviceMesh, everyone: tuple[int, ...]) -> bool:
    """Return whether the mesh contains exactly the participants. Cached for as long as they are the same
    object."""
    known: tuple[tuple[int, ...], bool] | None = getattr(mesh, _SPANS, None)
    # By identity: comparing 10,000 ranks for each of 100,000 tensors would take seconds.
    if known is None or known[0] is not everyone:
        known = (everyone, set(mesh.mesh.flatten().tolist()) == set(everyone))
        setattr(mesh, _SPANS, known)
    return known[1]


class _Layout(NamedTuple):
    """How a mesh cuts tensors of some number of dimensions, as this rank sees it."""

    cuts: tuple[Cuts, ...]
    """For each tensor dimension."""
    replica: tuple[int, int]
    """(index, count) over the replicated mesh dimensions."""
    stand: tuple[tuple[int, int], ...]
    """(lane, position) along each tensor dimension that is cut; others have (0, -1)."""
    cut: tuple[int, ...]
    """Tensor dimensions that are cut."""
    even: bool
    """Whether placements determine the offset of a shard. A mesh with its own order is not cut evenly."""


@lru_cache(maxsize=1024)
def _layout(ndim: int, placements: tuple[Any, ...], view: MeshView) -> _Layout | int:
    """Return the layout, or the mesh dimension that has a pending reduction."""
    assert view.coordinate is not None
    cuts: list[Cuts] = [()] * ndim
    inner: list[list[int]] = [[] for _ in range(ndim)]
    index, count = 0, 1
    for axis, placement in enumerate(placements):
        parts, here = view.sizes[axis], view.coordinate[axis]
        # Returned, not raised: layouts are cached, and only the caller knows the tensor's name.
        if placement.is_partial():
            return axis
        if placement.is_replicate():
            # The coordinates along replicated mesh dimensions are the digits of the replica index.
            index, count = index * parts + here, count * parts
            continue
        cuts[placement.dim] += ((parts, here, int(getattr(placement, "split_factor", 1))),)
        inner[placement.dim].append(axis)
    own = view.order or ()

    def rank_of(axis: int) -> tuple[int, int]:
        """Sort by the order in which axes cut; strided axes come last, because they cut finer."""
        return (
            (own.index(axis), 0)
            if axis in own
            else (len(own) + hasattr(placements[axis], "split_factor"), axis)
        )

    def number(axes: Sequence[int]) -> int:
        position = 0
        for axis in axes:  # coordinates as the digits of one number
            position = position * view.sizes[axis] + view.coordinate[axis]  # type: ignore[index]
        return position

    ordered = [sorted(axes, key=rank_of) for axes in inner]
    # Lane: this rank's position along all other axes that are cut. Lengths are added up within one lane.
    stand = tuple(
        (number([a for other in ordered if other is not axes for a in other]), number(axes))
        if axes
        else (0, -1)
        for axes in ordered
    )
    # The order matters only where two mesh dimensions cut one axis.
    even = view.order is None or all(len(axes) < 2 for axes in ordered)
    cut = tuple(axis for axis, axes in enumerate(ordered) if axes)
    return _Layout(tuple(cuts), (index, count), stand, cut, even)


def add_dtensor(
    table: ShardTable, name: str, value: DTensor, everyone: tuple[int, ...], undeclared: Replica | None
) -> None:
    """Add this rank's boxes of a DTensor. Ranks outside its mesh hold nothing of it.

    Its replicas are declared only if the mesh is exactly the participants: ranks outside it may hold the same
    DTensor on another mesh, and ranks of it that do not take part write nothing.
    """
    local = settled(local_of(value))
    view = mesh_view(value.device_mesh)
    if view.coordinate is None:
        return
    wrapped = is_wrapper(local) and not hasattr(local, GET_SHARD)
    parts = None if wrapped else _parts(name, local)
    if parts == []:
        return
    layout = _layout(value.dim(), value.placements, view)
    if isinstance(layout, int):
        raise BadInput(
            f"{name!r} is a DTensor with a pending reduction ({value.placements[layout]}) over mesh "
            f"dimension {layout}; its value is not known on any rank: redistribute it to Shard or Replicate "
            "first."
        )
    declared = undeclared
    # Otherwise the ranks find out who has a copy, as for plain tensors (docs/decisions/0004).
    if undeclared is None and spans(value.device_mesh, everyone):
        declared = layout.replica
    if wrapped:
        _add_wrapped(table, name, value, layout, declared, undeclared)
        return
    # If there are parts, pass one: `spec_of` would refuse the wrapper, which has no memory.
    spec = spec_of(name, parts[0][1] if parts else local, value.shape)
    if parts is not None:
        for box, part in parts:
            table.add(spec, box, declared, False, TensorMemory(part.detach()))
        return
    chunks = getattr(local, CHUNKS, None)
    shape, cut = tuple(local.shape), layout.cut
    expected = pieces(spec.shape, layout.cuts)
    if chunks is not None:
        _add_told(table, spec, local, chunks(), layout, expected, declared)
    # Strided: the rows are several runs, each a separate box.
    elif shape == expected.shape and layout.even and len(expected.parts) > 1:
        for slices, box in expected.parts:
            table.add(spec, box, declared, False, TensorMemory(local[slices].detach()))
    elif (shape == expected.shape or (0 in expected.shape and not local.numel())) and layout.even:
        # Its position is stored although the offset is known: a rank can't tell an even tensor from an uneven
        # one whose local length happens to be even (docs/decisions/0010).
        late = None
        if cut:
            axis = cut[0]
            late = DeferredOffset(axis, *layout.stand[axis], shape[axis], expected.begin[axis])
        _add(table, spec, Box(expected.begin, shape), declared, local, late)
    else:
        # Megatron-FSDP's uneven shards: the box begins at 0 along the open axis until the lengths are known.
        axis = _open_axis(name, value, shape, expected, layout)
        begin = (*expected.begin[:axis], 0, *expected.begin[axis + 1 :])
        has_length = local.numel() or 0 in spec.shape  # a rank without elements may have any shape
        late = DeferredOffset(axis, *layout.stand[axis], shape[axis] if has_length else 0, -1)
        _add(table, spec, Box(begin, shape), declared, local, late)


def _parts(name: str, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]] | None:
    """Return the parts of a local tensor that consists of several, and their boxes; None if it has memory
    itself."""
    if not hasattr(local, GET_SHARD):
        # For a plain tensor without memory, `spec_of` raises the error that it was freed.
        if has_memory(local) or type(local) is torch.Tensor or local.device.type == "meta":
            return None
        raise BadInput(
            f"{name!r} is a DTensor whose local tensor is a {type_name(local)}, which has no memory of its "
            "own: where the tensors that it is made of lie in the global one is not known.",
            hint="Keep it as a plain tensor of each rank (holdfast.PerRank), or as a DTensor of plain "
            "tensors.",
        )
    # Imported here, because hardly any DTensor comes this far.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    parts = []
    for index, chunk in enumerate(getattr(local, CHUNKS)()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if not box.volume:
            continue
        part = getattr(local, GET_SHARD)(MetadataIndex(name, chunk.offsets, index))
        if tuple(part.shape) != box.shape:
            raise BadInput(
                f"{name!r}: a part of the local tensor has shape {tuple(part.shape)}, but its chunk metadata "
                f"says {box.shape}."
            )
        parts.append((box, part))
    return parts


def _add_wrapped(
    table: ShardTable,
    name: str,
    value: DTensor,
    layout: _Layout,
    declared: Replica | None,
    undeclared: Replica | None,
) -> None:
    """Add the tensors that a local tensor is made of, each under its own name."""
    local, expected = settled(local_of(value)), pieces(tuple(value.shape), layout.cuts)
    by_rows = layout.cut in ((), (0,)) and layout.even and len(expected.parts) == 1
    if not by_rows or tuple(local.shape) != expected.shape or hasattr(local, CHUNKS):
        raise BadInput(
            f"{name!r} is a DTensor whose local tensor is a {type_name(local)} of shape "
            f"{tuple(local.shape)}, and {value.placements} on a mesh of shape "
            f"{tuple(value.device_mesh.shape)} does not cut it evenly along the first axis, as such must be.",
            hint="Keep it as a plain tensor of each rank (holdfast.PerRank), or as a DTensor of plain "
            "tensors.",
        )
    for inner in inner_parts(name, local, tuple(value.shape), expected.begin[0] if expected.begin else 0):
        spec, memory = spec_of(f"{name}.{inner.path}", inner.tensor, inner.shape), TensorMemory(inner.tensor)
        if inner.is_whole:
            table.add(spec, whole(inner.shape), undeclared, True, memory)
        else:
            table.add(spec, Box(inner.begin, tuple(inner.tensor.shape)), declared, False, memory)


def _open_axis(name: str, value: DTensor, shape: Dims, expected: Pieces, layout: _Layout) -> int:
    """Return the axis along which this rank's length differs from an even cut, so that its offset is
    unknown."""
    if layout.even and local_of(value).numel():
        open_axes = [axis for axis, (a, b) in enumerate(zip(shape, expected.shape, strict=False)) if a != b]
    else:  # several mesh dimensions cut it, or this rank has nothing of it
        several = [axis for axis in layout.cut if len(layout.cuts[axis]) > 1]
        open_axes = (several if not layout.even else []) or list(layout.cut[:1])
    fits = len(shape) == len(expected.shape) and all(
        axis in open_axes or (a == b and runs == 1)
        for axis, (a, b, runs) in enumerate(zip(shape, expected.shape, expected.runs, strict=True))
    )
    if (local_of(value).numel() and not fits) or len(open_axes) != 1 or open_axes[0] not in layout.cut:
        raise BadInput(
            f"{name!r}: the local tensor has shape {shape}, but its placements {value.placements} on a mesh "
            f"of shape {tuple(value.device_mesh.shape)} give {expected.shape}; declare it with "
            "holdfast.Shard."
        )
    return open_axes[0]


def _add_told(
    table: ShardTable,
    spec: TensorSpec,
    local: torch.Tensor,
    chunks: Sequence[ChunkStorageMetadata],
    layout: _Layout,
    expected: Pieces,
    declared: Replica | None,
) -> None:
    """Add a local tensor whose chunk metadata contains its offset, as torch DCP uses it."""
    shape = tuple(local.shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != shape:
        raise BadInput(
            f"{spec.name!r}: the local tensor has shape {shape}, but its chunk metadata says "
            f"{[tuple(chunk.sizes) for chunk in chunks]}; declare it with holdfast.Shard."
        )
    begin = tuple(map(int, chunks[0].offsets))
    cut = layout.cut
    late = None
    if cut:
        # Marked as told, because other ranks may lack the metadata and take their shards for even.
        start, as_cut = begin[cut[0]], layout.even and shape == expected.shape and begin == expected.begin
        late = DeferredOffset(cut[0], *layout.stand[cut[0]], shape[cut[0]], start if as_cut else told(start))
    _add(table, spec, Box(begin, shape), declared, local, late)


def _add(
    table: ShardTable,
    spec: TensorSpec,
    box: Box,
    declared: Replica | None,
    local: torch.Tensor,
    late: DeferredOffset | None,
) -> None:
    if 0 in box.shape:  # an empty shard: its name is known, and its length counts
        empty = (0,) * len(spec.shape)
        # Empty shards are not replicas of each other.
        box, declared = Box(empty, empty), (0, 1)
        late = late._replace(length=0) if late is not None else None
    table.add(spec, box, declared, False, TensorMemory(local.detach()), late)
