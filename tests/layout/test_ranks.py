"""Ranks and grids as people write them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.layout.grid import Grid, grid_of
from holdfast._core.layout.ranks import ranks_of, ranks_text


@given(st.sets(st.integers(0, 200), min_size=1))
def test_ranks_are_read_as_they_are_written(ranks: set[int]) -> None:
    assert ranks_of(ranks_text(ranks)) == tuple(sorted(ranks))


def test_ranks_as_people_write_them() -> None:
    assert ranks_of("8-11, 3,9") == (3, 8, 9, 10, 11)
    assert ranks_text([11, 3, 8, 9, 10]) == "3,8-11"


def test_a_grid_is_read_as_it_is_written() -> None:
    for grid in (
        Grid(8),
        Grid(64, tp=2, pp=4, ep=8, etp=1, vpp=2),
        Grid(16, tp=4, cp=2, first_rank=8),
        Grid(16, tp=2, ep=2, pp=2, order="tp-ep-dp-cp-pp"),
    ):
        assert grid_of(grid.text()) == grid
    assert Grid(64, tp=2, pp=4).text() == "world=64,tp=2,pp=4"
    assert grid_of(" world = 8 , tp=2") == Grid(8, tp=2)
