"""Offsets that only all lengths together tell, against adding them up one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.layout.deferred_offset import DeferredOffset, place, told

Row = tuple[int, DeferredOffset]


def placed(
    rows: list[Row], size: int = -1
) -> tuple[list[int], tuple[int, int] | None, list[tuple[int, int, int]]]:
    table = np.asarray([(tensor, *late) for tensor, late in rows], np.int64).reshape(-1, 6)
    found = place(*table.T, np.full(len(rows), size))
    return found.shift.tolist(), found.differ, found.totals


@st.composite
def lines(draw: st.DrawFn) -> list[Row]:
    """Lines of shards, each of one tensor, axis and lane; some have replicas, some know (rightly or not)
    where they begin."""
    rows: list[Row] = []
    for tensor, axis, lane in product(
        range(draw(st.integers(1, 3))), range(2), range(draw(st.integers(1, 2)))
    ):
        at = 0
        for position in range(draw(st.integers(0, 4))):
            length = draw(st.integers(0, 9))
            for _ in range(draw(st.integers(1, 2))):
                start = draw(st.sampled_from([-1, at, 3]))
                rows.append((tensor, DeferredOffset(axis, lane, position, length, start)))
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
        if late.length:  # what is empty is nowhere
            assert max(late.start, 0) + shift == begin
        else:
            assert shift == 0
        expected_totals.add((tensor, late.axis, late.lane, sum(lengths.values())))
    assert sorted(totals) == sorted((t, a, total) for t, a, _, total in expected_totals)


def test_replicas_of_different_length_are_told() -> None:
    rows = [
        (0, DeferredOffset(0, 0, 0, 4, -1)),
        (0, DeferredOffset(0, 0, 1, 3, 4)),
        (0, DeferredOffset(0, 0, 1, 2, -1)),
    ]
    _, differ, _ = placed(rows)
    assert differ is not None
    assert {rows[at][1].length for at in differ} == {2, 3}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.data())
def test_who_knows_better_sets_the_others_right(lengths: list[int], data: st.DataObject) -> None:
    """One knows where its shard is; the others take their places in an even cut for their own."""
    begins = [sum(lengths[:at]) for at in range(len(lengths))]
    knows = data.draw(st.integers(0, len(lengths) - 1))
    starts = [data.draw(st.integers(0, 20)) for _ in lengths]
    starts[knows] = told(begins[knows])
    rows = [
        (0, DeferredOffset(0, 0, at, length, start))
        for at, (length, start) in enumerate(zip(lengths, starts, strict=True))
    ]
    shifts, _, totals = placed(rows, sum(lengths))
    assert totals == []
    for at, shift in enumerate(shifts):
        if lengths[at]:
            assert (begins[at] if at == knows else starts[at]) + shift == begins[at]
    assert not any(placed(rows, sum(lengths) + 1)[0])  # a part is not here: left to who checks coverage
