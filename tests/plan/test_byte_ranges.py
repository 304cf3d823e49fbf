"""Byte ranges of boxes, against indices that NumPy counts one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, cut, union
from holdfast._models.conversion.byte_ranges import ByteRange, _joined, runs_of


@st.composite
def shapes_and_boxes(draw: st.DrawFn, most: int = 4) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    boxes = []
    for _ in range(draw(st.integers(1, most))):
        cuts = [sorted((draw(st.integers(0, side)), draw(st.integers(0, side)))) for side in shape]
        box = Box(tuple(low for low, _ in cuts), tuple(high - low for low, high in cuts))
        if box.volume:
            boxes.append(box)
    return shape, boxes


def held(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:  # type: ignore[type-arg]
    """How many of the boxes hold each element."""
    found = np.zeros(shape, np.int64)
    for box in boxes:
        found[box.slices()] += 1
    return found


def bytes_of(runs: list[ByteRange]) -> list[int]:
    return [
        run.start + at * run.step + byte
        for run in runs
        for at in range(run.count)
        for byte in range(run.length)
    ]


@given(shapes_and_boxes(most=1), st.sampled_from([1, 2, 4]))
def test_runs_are_the_bytes_of_a_box(case: tuple[tuple[int, ...], list[Box]], itemsize: int) -> None:
    shape, boxes = case
    for box in boxes:
        where = np.arange(int(np.prod(shape)) * itemsize).reshape(*shape, itemsize) + 100
        runs = runs_of(shape, box, itemsize, 100)
        assert sorted(bytes_of(runs)) == sorted(where[box.slices()].ravel().tolist())
        assert sorted(bytes_of(_joined(sorted(runs, key=lambda run: run.start)))) == sorted(bytes_of(runs))


def test_columns_are_one_range_that_repeats() -> None:
    assert runs_of((6, 8), Box((0, 4), (6, 4)), 2, 10) == [ByteRange(18, 8, 16, 6)]
    assert runs_of((3, 6, 8), Box((1, 0, 4), (2, 6, 4)), 2, 0) == [ByteRange(96 + 8, 8, 16, 12)]
    assert runs_of((6, 8), Box((2, 0), (3, 8)), 2, 0) == [ByteRange(32, 48, 48, 1)]
    assert runs_of((), Box((), ()), 4, 7) == [ByteRange(7, 4, 4, 1)]


@given(shapes_and_boxes())
def test_a_union_holds_each_index_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    assert np.array_equal(held(shape, union(boxes)), np.minimum(held(shape, boxes), 1))


@given(shapes_and_boxes(most=1), st.integers(1, 30))
def test_a_box_is_cut_into_parts_of_at_most_so_many_elements(
    case: tuple[tuple[int, ...], list[Box]], most: int
) -> None:
    shape, boxes = case
    for box in boxes:
        parts = list(cut(box, most))
        assert all(part.volume <= most for part in parts)
        assert np.array_equal(held(shape, parts), held(shape, [box]))


def test_neighbours_become_one() -> None:
    rows = [Box((0, 0), (2, 8)), Box((2, 0), (2, 8)), Box((3, 0), (4, 8))]
    assert union(rows) == [Box((0, 0), (7, 8))]
    assert union([Box((), ()), Box((), ())]) == [Box((), ())]
