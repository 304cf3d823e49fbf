"""DTensor boxes by arithmetic, against torch's own, and against tensors that torch cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    _get_shard_size_and_offsets,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast._core.layout.deferred_offset import told
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.dtensor import local_runs, spans
from holdfast._core.state.flatten import build_shard_table, flatten
from holdfast._core.state.subclasses import is_dtensor
from holdfast.errors import BadInput
from tests.support.boxes import tiles

Placement = Cut | _StridedShard | Replicate


def indices(runs: list[tuple[int, int]]) -> list[int]:
    return [at for start, length in runs for at in range(start, start + length)]


def cuts_of(
    mesh: tuple[int, ...], place: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[int, int, int]]:
    return [
        (parts, here, int(getattr(placement, "split_factor", 1)))
        for parts, here, placement in zip(mesh, place, placements, strict=True)
        if not isinstance(placement, Replicate)
    ]


def torchs(
    size: int, mesh: tuple[int, ...], place: tuple[int, ...], placements: tuple[Any, ...]
) -> list[int]:
    """The indices that torch gives a rank, by its own arithmetic applied mesh dimension by mesh dimension."""
    left, previous = size, None
    for parts, here, placement in zip(mesh, place, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        left, previous = _get_shard_size_and_offsets(left, parts, here, placement, previous, size, False)
    return list(range(size)) if previous is None else previous.tolist()[:left]


placement = st.one_of(
    st.just(Cut(0)), st.integers(1, 5).map(lambda f: _StridedShard(0, split_factor=f)), st.just(Replicate())
)


@settings(max_examples=400)
@given(
    st.integers(0, 60), st.lists(st.tuples(st.integers(1, 5), placement), min_size=1, max_size=3), st.data()
)
def test_runs_are_torchs_indices(size: int, axes: list[tuple[int, Any]], data: st.DataObject) -> None:
    mesh, placements = tuple(a for a, _ in axes), tuple(p for _, p in axes)
    place = tuple(data.draw(st.integers(0, parts - 1)) for parts in mesh)
    runs = local_runs(size, cuts_of(mesh, place, placements))
    assert indices(runs) == torchs(size, mesh, place, placements)
    assert all(length > 0 for _, length in runs)
    assert all(a + n < b or b < a for (a, n), (b, _) in itertools.pairwise(runs))  # merged where they touch


def test_strided_shards_where_dcp_is_wrong() -> None:
    """13 rows, FSDP over 3 of tensor parallelism over 2: DCP writes the first offset and the length,
    which claims rows that the rank does not hold. Ours are the rows that torch put there."""
    placements = (_StridedShard(0, split_factor=2), Cut(0))
    wrong, table = [], []
    for place in itertools.product(range(3), range(2)):
        runs = local_runs(13, cuts_of((3, 2), place, placements))
        table += indices(runs)
        assert indices(runs) == torchs(13, (3, 2), place, placements)
        shape, offset = _compute_local_shape_and_global_offset((13, 4), (3, 2), list(place), placements)
        if indices(runs) != list(range(offset[0], offset[0] + shape[0])):
            wrong.append(place)
    assert sorted(table) == list(range(13))
    assert wrong  # the day torch is right, this test may go
    assert any(len(local_runs(13, cuts_of((3, 2), place, placements))) > 1 for place in wrong)


@contextmanager
def fake_rank(rank: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Iterator[DeviceMesh]:
    """A process group of which only this rank exists, and a mesh over all of it."""
    world = int(np.prod(shape))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield DeviceMesh("cpu", torch.arange(world).reshape(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def scattered(table: ShardTable, shape: tuple[int, ...], fill: np.ndarray) -> None:
    """Write what a rank holds into an array of the whole tensor, through the shards' own memory."""
    for spec, box, memory in zip(table.specs, table.boxes, table.memory, strict=True):
        assert spec.shape == shape
        if box.volume:
            out = bytearray(box.volume * 4)
            memory.gather(box.relative_to(box.offset), out)
            fill[box.slices()] += np.frombuffer(out, "<f4").reshape(box.shape)


MESHES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = [
    ((13, 4), (3, 2), (_StridedShard(0, split_factor=2), Cut(0))),
    ((13, 5), (2, 2), (Cut(0), Cut(1))),
    ((7, 9), (2, 3), (Cut(1), Cut(1))),
    ((3, 2), (4,), (Cut(0),)),
    ((6, 4), (2, 2), (Replicate(), Cut(0))),
    ((6, 4), (2, 2), (Cut(1), Replicate())),
    ((10, 3), (2, 2), (_StridedShard(0, split_factor=2), Replicate())),
    ((2, 9), (2, 2), (Cut(0), _StridedShard(1, split_factor=3))),
    ((0, 4), (2,), (Cut(0),)),
    ((), (2,), (Replicate(),)),
    ((5, 4, 3), (2, 2, 2), (Cut(2), Replicate(), Cut(0))),
]


@st.composite
def any_layout(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """A shape, a mesh of up to 4 x 3 x 2, and placements: strided ones where another cuts the same dimension
    after it."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = tuple(draw(st.integers(1, most)) for most in (4, 3, 2)[: draw(st.integers(1, 3))])
    one = st.one_of(
        st.just(Replicate()),
        st.builds(Cut, st.integers(0, len(shape) - 1)),
        st.builds(
            lambda d, f: _StridedShard(d, split_factor=f), st.integers(0, len(shape) - 1), st.integers(2, 4)
        ),
    )
    return shape, mesh, tuple(draw(one) for _ in mesh)


@settings(max_examples=60)
@given(any_layout())
def test_any_layout_is_held_as_it_lies(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]],
) -> None:
    check_layout(*layout)


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), MESHES)
def test_tensors_that_torch_cut_are_held_as_they_lie(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]
) -> None:
    check_layout(shape, mesh_shape, placements)


def check_layout(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """Every rank's boxes and bytes put together are the tensor, once for each replica."""
    value = torch.arange(1, int(np.prod(shape)) + 1, dtype=torch.float32).reshape(shape)
    world = int(np.prod(mesh_shape))
    fill = np.zeros(shape, "<f4")
    seen: dict[tuple[int, int] | None, list[Any]] = {}
    for rank in range(world):
        with fake_rank(rank, mesh_shape, tuple("abc"[: len(mesh_shape)])) as mesh:
            place = mesh.get_coordinate()
            assert place is not None
            picks = [
                torchs(
                    size,
                    mesh_shape,
                    tuple(place),
                    tuple(p if isinstance(p, Replicate) or p.dim == d else Replicate() for p in placements),
                )
                for d, size in enumerate(shape)
            ]
            local = value[np.ix_(*picks)].contiguous() if shape else value.clone()
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride()
            )
            if all(type(p) is not _StridedShard for p in placements):
                own = distribute_tensor(value.clone(), mesh, placements, src_data_rank=None)
                assert torch.equal(own._local_tensor, local)
            table, owner = build_shard_table(flatten({"w": tensor}, rank).leaves, rank, tuple(range(world)))
        assert len(table) >= 1
        assert owner == [0] * len(table)
        assert not any(table.unsharded)
        scattered(table, shape, fill)
        seen.setdefault(table.replicas[0] if table.boxes[0].volume else None, []).extend(
            box for box in table.boxes if box.volume
        )
    copies = int(
        np.prod([n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)])
    )
    assert (fill == value.numpy() * copies).all()
    for key, boxes in seen.items():
        if key is None:
            continue
        assert key[1] == copies
        offsets = np.asarray([b.offset for b in boxes], np.int64).reshape(len(boxes), len(shape))
        sizes = np.asarray([b.shape for b in boxes], np.int64).reshape(len(boxes), len(shape))
        assert tiles(shape, offsets, sizes)


def test_replicas_are_numbered_over_the_replicated_dimensions() -> None:
    found = []
    for rank in range(8):
        with fake_rank(rank, (2, 2, 2), ("dp", "tp", "cp")) as mesh:
            tensor = distribute_tensor(
                torch.zeros(4, 4), mesh, [Replicate(), Cut(0), Replicate()], src_data_rank=None
            )
            table, _ = build_shard_table(flatten({"w": tensor}, rank).leaves, rank, tuple(range(8)))
            found.append((table.boxes[0].offset[0], table.replicas[0]))
    assert found == [
        (0, (0, 4)),
        (0, (1, 4)),
        (2, (0, 4)),
        (2, (1, 4)),
        (0, (2, 4)),
        (0, (3, 4)),
        (2, (2, 4)),
        (2, (3, 4)),
    ]


def test_a_mesh_of_some_ranks_leaves_replicas_to_be_agreed() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        part = DeviceMesh("cpu", torch.arange(2))
        tensor = distribute_tensor(torch.zeros(4), part, [Replicate()], src_data_rank=None)
        assert spans(part, (0, 1))
        assert not spans(part, (0, 1, 2, 3))
        inside, _ = build_shard_table(flatten({"w": tensor}, 1).leaves, 1, (0, 1))
        assert inside.replicas == [(1, 2)]
        outside, _ = build_shard_table(flatten({"w": tensor}, 1).leaves, 1, (0, 1, 2, 3))
        assert outside.replicas == [None]
    finally:
        dist.destroy_process_group()


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        tensor = distribute_tensor(
            torch.zeros(4), DeviceMesh("cpu", torch.arange(2)), [Cut(0)], src_data_rank=None
        )
        table, owner = build_shard_table(
            flatten({"w": tensor, "x": torch.ones(1)}, 3).leaves, 3, (0, 1, 2, 3)
        )
        assert [spec.name for spec in table.specs] == ["x"]
        assert owner == [1]
    finally:
        dist.destroy_process_group()


def test_a_pending_reduction_is_refused() -> None:
    with fake_rank(0, (2,), ("dp",)) as mesh:
        tensor = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
        with pytest.raises(
            BadInput,
            match=r"'w' is a DTensor with a pending reduction .* over mesh dimension 0.*redistribute",
        ):
            build_shard_table(flatten({"w": tensor}, 0).leaves, 0, (0, 1))


@pytest.mark.parametrize("local", [(2, 3), (3, 3), (4,)])
def test_a_local_tensor_that_does_not_fit_is_refused(local: tuple[int, ...]) -> None:
    """Along an axis that is not cut, along two, of other dimensions."""
    with fake_rank(0, (2,), ("dp",)) as mesh:
        tensor = DTensor.from_local(
            torch.zeros(local), mesh, [Cut(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
        )
        with pytest.raises(
            BadInput, match=r"the local tensor has shape .*, but its placements .* give \(2, 2\); declare it"
        ):
            build_shard_table(flatten({"w": tensor}, 0).leaves, 0, (0, 1))


def late_of(
    local: tuple[int, ...],
    shape: tuple[int, ...],
    place: int,
    mesh_shape: tuple[int, ...],
    placements: Any,
    order: Any = None,
) -> tuple[Any, Any]:
    with fake_rank(place, mesh_shape, ("a", "b")[: len(mesh_shape)]) as mesh:
        if order is not None:
            mesh._shard_order = order
        stride = torch.empty(shape, device="meta").stride()
        tensor = DTensor.from_local(
            torch.zeros(local), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        table, _ = build_shard_table(
            flatten({"w": tensor}, place).leaves, place, tuple(range(int(np.prod(mesh_shape))))
        )
        return table.boxes[0], table.deferred[0]


def test_a_length_of_its_own_leaves_the_offset_open() -> None:
    assert late_of((3, 2), (4, 2), 0, (2,), [Cut(0)]) == (((0, 0), (3, 2)), (0, 0, 0, 3, -1))
    assert late_of((2, 2), (4, 2), 1, (2,), [Cut(0)]) == (
        ((2, 0), (2, 2)),
        (0, 0, 1, 2, 2),
    )  # takes it for known
    assert late_of((0, 2), (4, 2), 1, (2,), [Cut(0)]) == (((0, 0), (0, 0)), (0, 0, 1, 0, -1))
    # Rank 3 of a 2 x 2 mesh, (1, 1): the second along axis 0 in the second lane of axis 1, whose offset is
    # known.
    assert late_of((3, 2), (4, 4), 3, (2, 2), [Cut(0), Cut(1)]) == (((0, 2), (3, 2)), (0, 1, 1, 3, -1))
    # Rank 1, (0, 1): both mesh dimensions cut axis 0, the first one first; or the second, if it is strided or
    # the mesh says so.
    assert late_of((3, 2), (8, 2), 1, (2, 2), [Cut(0), Cut(0)])[1] == (0, 0, 1, 3, -1)
    strided = [_StridedShard(0, split_factor=2), Cut(0)]
    assert late_of((3, 2), (8, 2), 1, (2, 2), strided)[1] == (0, 0, 2, 3, -1)
    assert late_of((2, 2), (8, 2), 1, (2, 2), [Cut(0), Cut(0)], [1, 0])[1] == (0, 0, 2, 2, -1)
    # Rank 1 of HSDP: the second replica has the same position.
    assert late_of((3, 2), (8, 2), 2, (2, 2), [Replicate(), Cut(0)])[1] == (0, 0, 0, 3, -1)


def test_chunk_metadata_is_believed() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk

    with fake_rank(1, (2,), ("dp",)) as mesh:

        def held_by(chunks: list[Chunk]) -> ShardTable:
            tensor = DTensor.from_local(
                torch.zeros(3, 2), mesh, [Cut(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
            )
            tensor._local_tensor.__create_chunk_list__ = lambda: chunks
            return build_shard_table(flatten({"w": tensor}, 1).leaves, 1, (0, 1))[0]

        table = held_by([Chunk(torch.Size((5, 0)), torch.Size((3, 2)))])
        assert table.boxes == [((5, 0), (3, 2))]
        assert table.deferred == [(0, 0, 1, 3, told(5))]
        for wrong in (
            [],
            [Chunk(torch.Size((5, 0)), torch.Size((2, 2)))],
            [Chunk(torch.Size((6, 0)), torch.Size((3, 2)))],
        ):
            with pytest.raises(
                BadInput, match=r"but its chunk metadata says|does not lie inside its global shape"
            ):
                held_by(wrong)


def test_dtensors_are_told_by_their_class() -> None:
    assert not is_dtensor(torch.zeros(1))
    assert not is_dtensor(torch.nn.Parameter(torch.zeros(1)))
    with fake_rank(0, (2,), ("dp",)) as mesh:
        tensor = distribute_tensor(torch.zeros(4), mesh, [Cut(0)], src_data_rank=None)
        assert is_dtensor(tensor)
        assert is_dtensor(torch.nn.Parameter(tensor))


def test_saving_reads_the_local_tensor_without_a_copy() -> None:
    with fake_rank(0, (2,), ("dp",)) as mesh:
        local = torch.arange(4.0)
        tensor = DTensor.from_local(local, mesh, [Cut(0)], run_check=False)
        table, _ = build_shard_table(flatten({"w": tensor}, 0).leaves, 0, (0, 1))
        assert table.memory[0].address == local.data_ptr()
        assert table.boxes[0].offset == (0,)
        assert table.specs[0].shape == (8,)
