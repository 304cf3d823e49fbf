"""Tensors that say themselves which boxes of a global one they hold: ShardedTensor, CheckpointableTensor,
LocalShardsWrapper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast._core.layout.box import Box
from holdfast._core.state.flatten import build_shard_table, flatten
from holdfast._tools.checkpoints.inspect import describe
from holdfast.errors import BadInput
from tests.state import sharded_jobs as jobs
from tests.support.processes import ProcessWorld


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessWorld]:
    with ProcessWorld(2) as world:
        yield world


def shape_in(path: Path) -> Any:
    return describe(path).shown[0].shape  # type: ignore[union-attr]


def test_a_sharded_tensor_is_boxes(two: ProcessWorld, tmp_path: Path) -> None:
    """FSDP1's and torchrec's, cut in any way into any other."""
    two.run(jobs.sharded_round_trip, str(tmp_path))
    assert shape_in(tmp_path / "many") == (10, 6)


def test_a_model_under_fsdp1(two: ProcessWorld, tmp_path: Path) -> None:
    two.run(jobs.fsdp1, str(tmp_path))


def test_sharded_tensors_of_several_groups(tmp_path: Path) -> None:
    with ProcessWorld(4) as world:
        world.run(jobs.sharded_over_some, str(tmp_path))
    assert shape_in(tmp_path) == (10, 6)


def test_a_checkpointable_tensor_is_boxes(two: ProcessWorld, tmp_path: Path) -> None:
    """Not a tensor of its own shape: what torch 2.15's protocol says of it is heeded."""
    two.run(jobs.checkpointable_round_trip, str(tmp_path / "c"))
    assert shape_in(tmp_path / "c") == (10, 6)
    assert shape_in(tmp_path / "c-same") == (10, 6)


def test_a_dtensor_of_several_local_shards(two: ProcessWorld, tmp_path: Path) -> None:
    for words in two.run(jobs.wrapped_locals, str(tmp_path / "c")):
        assert "'odd' is a DTensor whose local tensor is a torch.masked." in words
    assert shape_in(tmp_path / "c") == (10, 6)


def test_boxes_of_a_checkpointable_tensor_are_held_where_they_lie() -> None:
    local = jobs.with_boxes(torch.zeros(4, 6), [((1, 0), (0, 0), (2, 6)), ((8, 0), (2, 0), (2, 6))])
    table, owner = build_shard_table(flatten({"w": local}, 0).leaves, 0, (0, 1))
    assert table.boxes == [Box((1, 0), (2, 6)), Box((8, 0), (2, 6))]
    assert {spec.shape for spec in table.specs} == {(10, 6)}
    assert table.replicas == [None, None]
    assert owner == [0, 0]
    nothing, _ = build_shard_table(
        flatten({"w": jobs.with_boxes(torch.zeros(0, 6), [])}, 0).leaves, 0, (0, 1)
    )
    assert not len(nothing)
    scalar, _ = build_shard_table(
        flatten({"w": jobs.with_boxes(torch.zeros(()), [((), (), ())], ())}, 0).leaves, 0, (0,)
    )
    assert scalar.boxes == [Box((), ())]


@pytest.mark.parametrize(
    "boxes",
    [
        [((9, 0), (0, 0), (2, 6))],  # outside of the global shape
        [((0, 0), (3, 0), (2, 6))],  # outside of the tensor
        [((0, 0), (), (3, 6))],  # all of the tensor, which has another shape
        [((0,), (0, 0), (4, 6))],
        [((0, 0), (0,), (4, 6))],
        [((-1, 0), (0, 0), (4, 6))],
    ],
)
def test_boxes_that_make_no_sense_are_refused(boxes: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'w' says that it holds size .* does not lie inside both"):
        holdfast.save(
            {"w": jobs.with_boxes(torch.zeros(4, 6), boxes)}, tmp_path, job=holdfast.Job(no_dist=True)
        )
    local: Any = jobs.with_boxes(torch.zeros(4, 6), [((0, 0), (0, 0), (4, 6))])
    local.local_sizes = ()
    with pytest.raises(BadInput, match="'w' has 1 global_offsets, 1 local_offsets and 0 local_sizes"):
        holdfast.save({"w": local}, tmp_path, job=holdfast.Job(no_dist=True))
