"""What ranks do with tensors that say themselves which boxes they hold; importable by spawned processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Cut

import holdfast
from tests.support.collectives import counted

JOB = holdfast.Job(timeout=60, stall_timeout=20)
WHOLE = torch.arange(10 * 6.0).view(10, 6)
ROWS = {
    "even": [(0, 5, 0), (5, 5, 1)],
    "many": [(0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)],
    "one": [(0, 8, 1), (8, 2, 1)],
}
"""How rows are cut: begin, length, rank."""


def sharded(cut: str, fill: bool, group: Any = None) -> ShardedTensor:
    """WHOLE, or zeros, cut by rows."""
    mine = [
        Shard.from_tensor_and_offsets(
            WHOLE[begin : begin + rows].clone() if fill else torch.zeros(rows, 6), [begin, 0], rank
        )
        for begin, rows, rank in ROWS[cut]
        if rank == dist.get_rank()
    ]
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[begin, 0], shard_sizes=[rows, 6], placement=f"rank:{rank}/cpu")
            for begin, rows, rank in ROWS[cut]
        ]
    )
    found = sharded_tensor.zeros(spec, 10, 6, process_group=group)
    for shard, value in zip(found.local_shards(), mine, strict=True):
        shard.tensor.copy_(value.tensor)
    return found


def rows_of(value: ShardedTensor) -> None:
    """All that this rank has is what it should be."""
    for shard in value.local_shards():
        begin, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert torch.equal(shard.tensor, WHOLE[begin : begin + rows])


def sharded_round_trip(rank: int, path: str) -> None:
    """Any cut into any other; a plain tensor into a ShardedTensor and the other way round; without a
    collective."""
    for cut in ROWS:
        saved, targets = sharded(cut, True), [sharded(other, False) for other in ROWS]
        plain = torch.zeros(10, 6)
        assert counted(lambda: holdfast.save({"w": saved}, f"{path}/{cut}", job=JOB)) == []  # noqa: B023
        for target in targets:
            assert counted(lambda: holdfast.load({"w": target}, f"{path}/{cut}", job=JOB)) == []  # noqa: B023
            rows_of(target)
        holdfast.load({"w": plain}, f"{path}/{cut}", job=JOB)
        assert torch.equal(plain, WHOLE)
    chunked = sharded_tensor.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 10, 6)
    holdfast.save({"w": WHOLE.clone()}, f"{path}/plain", job=JOB)
    holdfast.load({"w": chunked}, f"{path}/plain", job=JOB)
    rows_of(chunked)


def sharded_over_some(rank: int, path: str) -> None:
    """Two groups of two ranks, each with a ShardedTensor of its own over the same values: replicas that
    nobody has declared."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = groups[rank // 2]
    parts = [Shard.from_tensor_and_offsets(WHOLE[5 * (rank % 2) :][:5].clone(), [5 * (rank % 2), 0], rank)]
    value = ShardedTensor._init_from_local_shards(parts, 10, 6, process_group=pair)
    holdfast.save({"w": value}, path, job=JOB)
    found = torch.zeros(10, 6)
    holdfast.load({"w": found}, path, job=JOB)
    assert torch.equal(found, WHOLE)


def with_boxes(local: torch.Tensor, boxes: list[tuple[Any, Any, Any]], shape: Any = (10, 6)) -> torch.Tensor:
    """A plain tensor with the attributes of torch 2.15's CheckpointableTensor; boxes: global offset, local
    offset, size."""
    held: Any = local
    held.global_shape = shape
    held.global_offsets, held.local_offsets, held.local_sizes = (
        tuple(tuple(found) for found in zip(*boxes, strict=True)) if boxes else ((), (), ())
    )
    return local


def checkpointable(rank: int, padded: bool, fill: bool) -> torch.Tensor:
    """Rank 0 has rows 0 to 2 and 7 to 9, with padding between; rank 1 rows 3 to 6."""
    if rank == 1:
        local = WHOLE[3:7].clone() if fill else torch.zeros(4, 6)
        return with_boxes(local, [((3, 0), (), (4, 6))])
    gap = 2 if padded else 0
    local = torch.full((6 + gap, 6), -1.0)
    local[:3] = WHOLE[:3] if fill else 0
    local[3 + gap :] = WHOLE[7:] if fill else 0
    return with_boxes(local, [((0, 0), (0, 0), (3, 6)), ((7, 0), (3 + gap, 0), (3, 6))])


def checkpointable_round_trip(rank: int, path: str) -> None:
    saved = checkpointable(rank, True, True)
    holdfast.save({"w": saved}, path, job=JOB)
    target = checkpointable(rank, False, False)
    holdfast.load({"w": target}, path, job=JOB)
    assert torch.equal(target, checkpointable(rank, False, True))
    padded = checkpointable(rank, True, False)
    holdfast.load({"w": padded}, path, job=JOB)
    assert torch.equal(padded, saved)  # padding is left as it was
    plain = torch.zeros(10, 6)
    holdfast.load({"w": plain}, path, job=JOB)
    assert torch.equal(plain, WHOLE)
    same = with_boxes(WHOLE[:10].clone(), [((0, 0), (0, 0), (10, 6))])  # on both ranks: a replica
    holdfast.save({"w": same}, f"{path}-same", job=JOB)


def wrapped_locals(rank: int, path: str) -> str:
    """torchrec's DTensors, whose local tensor is a LocalShardsWrapper; and one whose local tensor does not say
    what it is made of, which is refused."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    mesh = init_device_mesh("cpu", (2,))

    def columns(fill: bool) -> DTensor:
        """Rank 0 has columns 0 and 1, and 4; rank 1 the rest."""
        begins = [(0, 2), (4, 1)] if rank == 0 else [(2, 2), (5, 1)]
        parts = [WHOLE[:, b : b + n].clone() if fill else torch.zeros(10, n) for b, n in begins]
        local = LocalShardsWrapper(parts, [(0, b) for b, _ in begins])
        return DTensor.from_local(
            local, mesh, [Cut(1)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
        )

    holdfast.save({"w": columns(True)}, path, job=JOB)
    target = columns(False)
    holdfast.load({"w": target}, path, job=JOB)
    wanted: Any = columns(True)._local_tensor
    found: Any = target._local_tensor
    assert all(map(torch.equal, found.local_shards(), wanted.local_shards()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = torch.masked.masked_tensor(torch.ones(2, 2), torch.ones(2, 2) > 0)
    odd = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    try:
        holdfast.save({"odd": odd}, f"{path}-odd", job=JOB)
    except holdfast.errors.BadInput as error:
        return str(error)
    return ""


def fsdp1(rank: int, path: str) -> None:
    """A model under FSDP1 with sharded state dicts: what its own state_dict gives, and the module as it
    is."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def make(seed: int) -> FullyShardedDataParallel:
        torch.manual_seed(seed)
        inner = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return model

    model, other, third = make(1), make(2), make(3)
    state = model.state_dict()
    assert all(isinstance(value, ShardedTensor) for value in state.values())
    holdfast.save({"model": state, "itself": model}, path, job=JOB)
    found = other.state_dict()
    holdfast.load({"model": found}, path, job=JOB)
    other.load_state_dict(found)
    holdfast.load({"itself": third}, path, job=JOB)
    x = torch.ones(2, 5)
    wanted = model(x)
    assert torch.equal(other(x), wanted)
    assert torch.equal(third(x), wanted)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    holdfast.load({"model": plain}, path, job=JOB)
    assert torch.allclose(plain(x), wanted)
