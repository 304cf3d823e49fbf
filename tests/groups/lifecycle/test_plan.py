"""Which groups, and in which rounds: without a process group."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.layout.grid import Grid
from holdfast._core.layout.ranks import from_progressions, progressions
from holdfast._groups.lifecycle.plan import KINDS, members, plan_groups, rounds, shown
from holdfast.errors import BadInput


def test_names_whose_ranks_are_the_same_share_a_group_and_groups_of_one_are_left_out() -> None:
    plan = plan_groups(Grid(16, tp=2, pp=2, ep=2))
    assert [planned.names for planned in plan] == [
        ("world",),
        ("dp_cp", "dp"),
        ("mp",),
        ("tp", "tp_cp", "etp"),
        ("pp", "embedding"),
        ("tp_dp_cp", "tp_dp"),
        ("ep",),
        ("tp_ep",),
        ("tp_ep_pp",),
        ("edp",),
    ]
    everyone = list(range(16))
    for planned in plan:
        assert sorted(planned.table.ravel().tolist()) == everyone
        assert planned.table.shape[1] > 1


def test_embedding_groups_are_first_and_last_stages() -> None:
    grid = Grid(8, pp=4)
    plan = {name: planned.table.tolist() for planned in plan_groups(grid) for name in planned.names}
    assert plan["embedding"] == [[0, 6], [1, 7]]
    assert members(grid, 6)["embedding"] == (0, 6)
    assert "embedding" not in members(grid, 2)
    assert members(grid, 9) == {}


@pytest.mark.parametrize("first", [0, 8])
def test_members_are_the_rows_of_the_plan(first: int) -> None:
    grid = Grid(16, tp=2, pp=2, ep=2, cp=2, first_rank=first)
    for planned in plan_groups(grid):
        for row in planned.table.tolist():
            for rank in row:
                for name in planned.names:
                    assert members(grid, rank)[name] == tuple(row)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="There is no group 'tensor'"):
        plan_groups(Grid(2, tp=2), ["tensor"])
    assert [planned.names for planned in plan_groups(Grid(4, tp=2), ["tp"])] == [("world",), ("tp",)]


@given(st.lists(st.sets(st.integers(0, 20), min_size=1), max_size=90))
def test_groups_of_a_round_have_no_rank_in_common(sets: list[set[int]]) -> None:
    groups = [np.array(sorted(ranks), np.int64) for ranks in sets]
    chosen = rounds(groups)
    for number in set(chosen):
        together = [rank for ranks, at in zip(sets, chosen, strict=True) if at == number for rank in ranks]
        assert len(together) == len(set(together))


def test_rounds_beyond_a_word_of_bits() -> None:
    assert sorted(rounds([np.array([3, 5], np.int64)] * 150)) == list(range(150))


@given(st.lists(st.integers(0, 1000), unique=True, min_size=1))
def test_runs_are_the_same_ranks(ranks: list[int]) -> None:
    assert from_progressions(progressions(ranks)) == ranks


def test_a_layout_of_16384_ranks_is_planned_in_seconds() -> None:
    grid = Grid(16384, tp=8, pp=16, ep=8, cp=2)
    begun = time.thread_time()
    groups = [row for planned in plan_groups(grid) for row in planned.table]
    chosen = rounds(groups)
    assert time.thread_time() - begun < 30.0
    assert len(groups) > 16384
    assert (
        max(chosen) + 1 == len(plan_groups(grid)) <= len(KINDS) + 1
    )  # as many as any rank has groups: it can't be fewer


def test_long_lists_are_cut() -> None:
    assert shown(range(20), 3) == "ranks 0, 1, 2 and 17 more"
