"""Grids: coordinates, ranks and groups that agree with each other and with Megatron."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.grid import AXES, DENSE, EXPERT, Grid
from holdfast.errors import BadInput


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    size = st.integers(1, 3)
    tp, cp, ep, etp, pp, first = (draw(size) for _ in range(6))
    order = draw(st.permutations(AXES))
    world = pp * tp * cp * ep * etp * draw(st.integers(1, 2))
    try:
        return Grid(world, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, order="-".join(order), first_rank=first)
    except BadInput:  # the two views have other pipelines
        order = [*(name for name in order if name != "pp"), "pp"]
        return Grid(world, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, order="-".join(order), first_rank=first)


@given(grids())
def test_rank_of_is_the_inverse_of_coordinates_in_both_views(grid: Grid) -> None:
    for axes in (DENSE, EXPERT):
        seen = set()
        for rank in range(grid.first_rank, grid.first_rank + grid.world):
            here = {name: at for name, at in grid.coordinates(rank).items() if name in axes}
            assert grid.rank_of(**here) == rank
            seen.add(tuple(here.values()))
        assert len(seen) == grid.world


@given(grids())
def test_a_rank_has_one_pipeline_for_dense_weights_and_experts(grid: Grid) -> None:
    for rank in range(grid.first_rank, grid.first_rank + grid.world):
        here = grid.coordinates(rank)
        dense = {
            stage: grid.rank_of(**{**{n: here[n] for n in DENSE}, "pp": stage}) for stage in range(grid.pp)
        }
        expert = {
            stage: grid.rank_of(**{**{n: here[n] for n in EXPERT}, "pp": stage}) for stage in range(grid.pp)
        }
        assert dense == expert


@settings(max_examples=40)
@given(grids(), st.data())
def test_groups_partition_the_ranks_and_vary_only_their_axes(grid: Grid, data: st.DataObject) -> None:
    view = data.draw(st.sampled_from([DENSE, EXPERT]))
    axes = data.draw(st.lists(st.sampled_from(view), min_size=1, unique=True))
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == [
        grid.first_rank + r for r in range(grid.world)
    ]
    for group in groups:
        assert list(group) == sorted(group)
        places = [grid.coordinates(rank) for rank in group]
        for name in view:
            assert len({place[name] for place in places}) == 1 or name in axes
        for index, rank in enumerate(group):
            assert grid.group(rank, *axes) == group
            assert grid.replica(rank, *axes) == (index, len(group))


@settings(max_examples=30)
@given(grids(), st.data())
def test_both_views_have_the_same_pipeline_stages(grid: Grid, data: st.DataObject) -> None:
    rank = data.draw(st.integers(grid.first_rank, grid.first_rank + grid.world - 1))
    assert grid.group(rank, "tp", "cp", "dp") == grid.group(rank, "etp", "ep", "edp")
    assert grid.group(rank, "pp")[grid.coordinates(rank)["pp"]] == rank


def test_megatron_moe_example() -> None:
    """16 ranks, TP 2, PP 2, EP 4, ETP 1: lists printed by megatron.core.parallel_state 0.16.1."""
    grid = Grid(16, tp=2, pp=2, ep=4, etp=1)
    assert grid.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13), (14, 15)]
    assert grid.groups("dp") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert grid.groups("pp") == [(r, r + 8) for r in range(8)]
    assert grid.groups("ep") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert grid.groups("edp") == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    assert grid.groups("tp", "pp") == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]


def test_megatron_docstring_example() -> None:
    """The 16-GPU example in initialize_model_parallel: TP 2, PP 4."""
    grid = Grid(16, tp=2, pp=4)
    assert grid.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert grid.groups("pp") == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert len(grid.groups("tp")) == 8


def test_another_order_moves_the_slow_axis() -> None:
    grid = Grid(8, tp=2, pp=2, order="tp-pp-dp")
    assert grid.groups("pp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_every_order_is_taken_when_both_views_agree() -> None:
    for order in itertools.permutations(AXES):
        grid = Grid(16, tp=2, ep=4, etp=1, cp=2, order="-".join(order))
        assert grid.expert["edp"] * 4 == 16


def test_describe_is_equal_exactly_for_equal_layouts() -> None:
    assert Grid(8, tp=2).describe() == Grid(8, tp=2, etp=2).describe()
    assert Grid(8, tp=2).describe() != Grid(8, tp=2, etp=1, ep=2).describe()
    assert Grid(8, tp=2, order="tp-dp").describe() == Grid(8, tp=2, order="tp-dp-cp-ep-pp").describe()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"world": 0}, "world=0 must be at least 1"),
    ({"world": 8, "tp": -2}, "tp=-2 must be at least 1"),
    ({"world": 8, "etp": 0}, "etp=0 must be at least 1"),
    ({"world": 8, "etp": -1}, "etp=-1 must be at least 1"),
    ({"world": 8, "vpp": 0}, "vpp=0 must be at least 1"),
    ({"world": "world=8,tp=2"}, "Grid world must be a whole number, not 'world=8,tp=2'.*Grid\\(16, tp=2\\)"),
    ({"world": True}, "world must be a whole number, not True"),
    ({"world": 8, "tp": None}, "tp must be a whole number, not None"),
    ({"world": 8, "first_rank": "0"}, "first_rank must be a whole number, not '0'"),
    ({"world": 8, "order": 3}, "order must be a text such as"),
    ({"world": 8, "tp": 3}, "not divisible by tp x cp x pp = 3"),
    ({"world": 8, "tp": 2, "ep": 8}, "not divisible by etp x ep x pp = 16"),
    ({"world": 8, "order": "tp-tp-dp"}, "each once"),
    ({"world": 8, "order": "tp-xp"}, "must list some of"),
    ({"world": 8, "ep": 2, "order": "tp-dp"}, "leaves ep out"),
    ({"world": 16, "tp": 2, "ep": 2, "pp": 2, "order": "pp-tp-cp-ep-dp"}, "put pp last"),
    ({"world": 8, "tp": 2, "ep": 2, "etp": 1, "pp": 2, "order": "tp-pp-ep-dp-cp"}, "put pp last"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_impossible_grids_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Grid(**arguments)


def test_impossible_questions_are_refused() -> None:
    grid = Grid(8, tp=2, ep=2, first_rank=4)
    for rank in (3, 12):
        with pytest.raises(BadInput, match=f"Rank {rank} is not in this grid of ranks 4 to 11"):
            grid.coordinates(rank)
    with pytest.raises(BadInput, match="must all be dense"):
        grid.groups("tp", "ep")
    with pytest.raises(BadInput, match="must all be dense"):
        grid.rank_of(colour=1)
    with pytest.raises(BadInput, match="tp=2 is outside"):
        grid.rank_of(tp=2)
    assert grid.rank_of() == 4
