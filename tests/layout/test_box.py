"""Box arithmetic, against sets of NumPy indices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, from_flat_range, whole
from holdfast.errors import BadInput

SPAN = 7


@st.composite
def boxes(draw: st.DrawFn, dims: int | None = None) -> Box:
    n = draw(st.integers(0, 3)) if dims is None else dims
    pairs = [(draw(st.integers(0, SPAN)), draw(st.integers(0, SPAN))) for _ in range(n)]
    return Box(tuple(min(p) for p in pairs), tuple(abs(a - b) for a, b in pairs))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    n = draw(st.integers(0, 3))
    return draw(boxes(n)), draw(boxes(n))


def cells(*some: Box) -> np.ndarray:
    """How many of the boxes hold each index."""
    counts = np.zeros((SPAN,) * len(some[0].shape), np.int64)
    for box in some:
        counts[box.slices()] += 1
    return counts


@given(two_boxes())
def test_intersect_is_the_common_indices(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    both = (cells(a) > 0) & (cells(b) > 0)
    if common is None:
        assert not both.any()
    else:
        assert (cells(common) == both).all()
        assert common.volume == both.sum()
    assert a.intersect(b) == b.intersect(a)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_at_most_2n_minus_1_boxes_in_flat_order(
    shape: list[int], data: st.DataObject
) -> None:
    volume = int(np.prod(shape))
    start = data.draw(st.integers(0, volume))
    stop = data.draw(st.integers(start, volume))
    found = from_flat_range(tuple(shape), start, stop)
    flat = np.arange(volume).reshape(shape)
    listed = [int(i) for box in found for i in flat[box.slices()].ravel()]
    assert listed == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


def test_2n_minus_1_boxes_are_needed_and_reached() -> None:
    assert len(from_flat_range((4, 4, 4), 5, 59)) == 5


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_flat_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(BadInput, match=r"does not lie in a tensor of shape \(3, 4\)"):
        from_flat_range((3, 4), start, stop)


def test_a_0d_box_is_one_element() -> None:
    point = whole(())
    assert point.volume == 1
    assert point.intersect(point) == point
    assert point.within(())
    assert from_flat_range((), 0, 1) == [point]
    assert from_flat_range((), 0, 0) == []


def test_an_empty_box_meets_nothing() -> None:
    empty = Box((2, 0), (0, 4))
    assert empty.volume == 0
    assert empty.intersect(whole((4, 4))) is None


@given(two_boxes())
def test_within_and_relative_to(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.within((SPAN,) * len(a.shape))
    assert a.relative_to(a.offset).offset == (0,) * len(a.shape)
    assert a.relative_to(b.offset).shape == a.shape
    inside = all(o + s <= w for o, s, w in zip(a.offset, a.shape, b.shape, strict=True))
    assert a.within(b.shape) == inside
    assert not a.within((*b.shape, 9))


def test_a_negative_place_is_not_within() -> None:
    assert not Box((-1,), (1,)).within((4,))
    assert not Box((1,), (-1,)).within((4,))
