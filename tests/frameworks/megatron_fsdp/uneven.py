"""Unevenly cut DTensors as Megatron-FSDP makes them, and what ranks do with them; importable by spawned
processes."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast._core.state.flatten import flatten
from tests.system.jobs import tensor

_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Made once a process: each costs groups."""
    if shape not in _meshes:
        world = dist.get_world_size()
        names = ("replica", "shard") if len(shape) == 2 else ("shard",)
        _meshes[shape] = DeviceMesh("cpu", torch.arange(world).reshape(shape), mesh_dim_names=names)
    return _meshes[shape]


class Uneven(NamedTuple):
    """A tensor, and how many rows each position of the mesh's last dimension holds."""

    name: str
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str = "float32"


def value_of(what: Uneven, step: int) -> torch.Tensor:
    return tensor(what.name, what.shape, step).to(getattr(torch, what.dtype))


def cut(what: Uneven, shape: tuple[int, ...], step: int) -> DTensor:
    """This rank's rows as a DTensor; nobody else is asked how many it has."""
    mesh = mesh_of(shape)
    position = mesh.get_local_rank("shard")
    begin = sum(what.lengths[:position])
    whole = value_of(what, step)
    local = whole[begin : begin + what.lengths[position]].clone()
    placements = [Replicate(), Shard(0)] if len(shape) == 2 else [Shard(0)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def state_of(
    whats: list[Uneven],
    shape: tuple[int, ...],
    step: int,
    rank: int,
    lacking: frozenset[tuple[int, str]],
    order: int,
) -> dict[str, Any]:
    """In an order of this rank's own, without what it lacks."""
    names = [what for what in whats if (rank, what.name) not in lacking]
    random.Random(order + rank).shuffle(names)
    return {what.name: cut(what, shape, step) for what in names}


def save_and_load(
    rank: int,
    path: str,
    whats: list[Uneven],
    shape: tuple[int, ...],
    lacking: frozenset[tuple[int, str]] = frozenset(),
    order: int = 0,
    asynchronous: bool = False,
    back: list[Uneven] | None = None,
) -> int:
    """Save, load into an equal state (or one that is cut as `back` says), compare; the number of bytes
    compared."""
    state = state_of(whats, shape, 1, rank, lacking, order)
    if asynchronous:
        holdfast.async_save(state, path, job=holdfast.Job(timeout=30, stall_timeout=10)).committed(30)
    else:
        holdfast.save(state, path, expected=None, job=holdfast.Job(timeout=30, stall_timeout=10))
    into = state_of(back or whats, shape, 2, rank, lacking, order + 1)
    holdfast.load(into, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    compared = 0
    wanted = state_of(back or whats, shape, 1, rank, lacking, order)
    for name, value in into.items():
        mine, right = value._local_tensor, wanted[name]._local_tensor
        assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8)), name
        compared += mine.nbytes
    return compared


def read_whole(path: str, whats: list[Uneven], prefix: str = "") -> None:
    """One process reads all of it, as plain tensors."""
    state = {prefix + what.name: torch.empty_like(value_of(what, 1)) for what in whats}
    holdfast.load(state, path, job=holdfast.Job(no_dist=True))
    for what in whats:
        assert torch.equal(state[prefix + what.name], value_of(what, 1)), what.name


def of_two_meshes(rank: int, path: str) -> None:
    """The same tensor, of which half of the ranks hold what one mesh says, and half what another says."""
    meshes = [mesh_of((4,)), mesh_of((2, 2))]
    mesh = meshes[rank // 2]
    placements = [Shard(0)] if mesh is meshes[0] else [Replicate(), Shard(0)]
    holdfast.save(
        {"w": distribute_tensor(torch.ones(8, 2), mesh, placements, src_data_rank=None)},
        path,
        job=holdfast.Job(timeout=30, stall_timeout=10),
    )


def by_hand(rank: int, path: str, lengths: list[int], replicas: int = 1) -> None:
    """`holdfast.Shard` with None for the offset that is not known."""
    position, copy = divmod(rank, replicas)
    whole = tensor("w", (sum(lengths), 6), 1)
    begin = sum(lengths[:position])

    def part(value: torch.Tensor) -> holdfast.Shard:
        mine = (
            value[begin : begin + lengths[position], 2 * copy : 2 * copy + 2]
            if replicas == 3
            else value[begin : begin + lengths[position]]
        )
        offset = (None, 2 * copy) if replicas == 3 else (None, 0)
        replica = (0, 1) if replicas == 3 else (copy, replicas)
        return holdfast.Shard(mine.clone(), whole.shape, offset, replica, position=position)

    holdfast.save({"w": part(whole)}, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    into = part(torch.zeros_like(whole))
    holdfast.load({"w": into}, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    assert torch.equal(into.tensor, part(whole).tensor)
    assert flatten({"w": into}, rank).leaves


def some_know(rank: int, path: str, what: Uneven, knowing: tuple[int, ...]) -> None:
    """Ranks that have chunk metadata beside ranks that have none: a save, a load, and a load of an
    optimizer's state."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    def one(step: int) -> DTensor:
        value = cut(what, (4,), step)
        if rank in knowing:
            chunk = ChunkStorageMetadata(
                torch.Size((sum(what.lengths[:rank]), *(0 for _ in what.shape[1:]))),
                value._local_tensor.shape,
            )
            value._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
        return value

    def optimized(step: int, steps: bool) -> tuple[Any, Any]:
        model = torch.nn.Module()
        model.register_parameter("w", torch.nn.Parameter(one(step)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if steps:
            optimizer.state[model.w]["momentum_buffer"] = one(step)
        return model, optimizer

    model, optimizer = optimized(1, True)
    a, b = holdfast.get_state_dict(model, optimizer)
    holdfast.save({"model": a, "optim": b}, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    other, fresh = optimized(2, False)
    a, b = holdfast.get_state_dict(other, fresh)
    state = {"model": a, "optim": b}
    holdfast.load(state, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    holdfast.set_state_dict(other, fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    wanted = cut(what, (4,), 1)._local_tensor
    for found in (other.w.data, fresh.state[other.w]["momentum_buffer"]):
        assert torch.equal(found._local_tensor, wanted)


def on_a_part_of_the_world(rank: int, path: str, lengths: tuple[int, ...]) -> None:
    """An uneven tensor on ranks 0 to 2 of four."""
    mesh = DeviceMesh("cpu", torch.arange(3))
    whole = tensor("w", (sum(lengths), 2), 1)
    state: dict[str, Any] = {"common": torch.ones(1)}
    if rank < 3:
        begin = sum(lengths[:rank])
        local = whole[begin : begin + lengths[rank]].clone()
        state["w"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1)
        )
    holdfast.save(state, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    if rank == 3:
        into = {"w": torch.zeros_like(whole)}
        holdfast.load(into, path, job=holdfast.Job(no_dist=True))
        assert torch.equal(into["w"], whole)


def bad_leaf_in_an_uneven_load(rank: int, path: str) -> None:
    what = Uneven("w", (9, 2), (3, 4, 0, 2))
    holdfast.save({"w": cut(what, (4,), 1)}, path, job=holdfast.Job(timeout=30, stall_timeout=10))
    into = {
        "w": cut(what, (4,), 2),
        **({"x": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)} if rank == 2 else {}),
    }
    holdfast.load(into, path, job=holdfast.Job(timeout=30, stall_timeout=10))
