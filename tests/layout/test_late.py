"""Offsets that only all lengths together tell, against adding them up one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.late import Late, place

Row = tuple[int, Late]


def placed(rows: list[Row]) -> tuple[list[int], tuple[int, int] | None, list[tuple[int, int, int]]]:
    table = np.asarray([(tensor, *late) for tensor, late in rows], np.int64).reshape(-1, 6)
    found = place(*table.T)
    return found.shift.tolist(), found.differ, found.totals


@st.composite
def lines(draw: st.DrawFn) -> list[Row]:
    """Lines of shards, each of one tensor, axis and lane; some have replicas, some know (rightly or not) where they begin."""
    rows: list[Row] = []
    for tensor, axis, lane in product(
        range(draw(st.integers(1, 3))), range(2), range(draw(st.integers(1, 2)))
    ):
        at = 0
        for position in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 9))
            for _ in range(draw(st.integers(1, 2))):
                start = draw(st.sampled_from([-1, at, 3]))
                rows.append((tensor, Late(axis, lane, position, length, start)))
            at += length
    return draw(st.permutations(rows))


@given(lines())
def test_every_shard_begins_where_those_before_it_end(rows: list[Row]) -> None:
    shifts, differ, totals = placed(rows)
    assert differ is None
    expected_totals = set()
    for (tensor, late), shift in zip(rows, shifts, strict=True):
        line = [o for t, o in rows if (t, o.axis, o.lane) == (tensor, late.axis, late.lane)]
        if all(other.start >= 0 for other in line):
            assert shift == 0  # nobody asks
            continue
        lengths = {other.position: other.length for other in line}
        begin = sum(length for position, length in lengths.items() if position < late.position)
        assert max(late.start, 0) + shift == begin
        expected_totals.add((tensor, late.axis, late.lane, sum(lengths.values())))
    assert sorted(totals) == sorted((t, a, total) for t, a, _, total in expected_totals)


def test_replicas_of_different_length_are_told() -> None:
    rows = [(0, Late(0, 0, 0, 4, -1)), (0, Late(0, 0, 1, 3, 4)), (0, Late(0, 0, 1, 2, -1))]
    _, differ, _ = placed(rows)
    assert differ is not None
    assert {rows[at][1].length for at in differ} == {2, 3}
