"""The tiling check, against counting."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, from_flat_range, whole
from holdfast._core.layout.coverage import first_problem
from tests.support.boxes import tiles


def rows(boxes: list[Box], dims: int) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.asarray([b.offset for b in boxes], np.int64).reshape(len(boxes), dims),
        np.asarray([b.shape for b in boxes], np.int64).reshape(len(boxes), dims),
    )


def counted(shape: tuple[int, ...], boxes: list[Box]) -> tuple[str, tuple[int, ...]] | None:
    """The first fault by counting each index."""
    counts = np.zeros(shape, np.int64)
    for box in boxes:
        counts[box.slices()] += 1
    wrong = np.flatnonzero(counts.ravel() != 1)
    if not len(wrong):
        return None
    place = tuple(int(i) for i in np.unravel_index(wrong[0], shape)) if shape else ()
    return ("overlap" if counts.ravel()[wrong[0]] > 1 else "gap"), place


@st.composite
def cases(draw: st.DrawFn, dims: int | None = None) -> tuple[tuple[int, ...], list[Box]]:
    """Boxes that nearly tile: a random partition, sometimes with one dropped, doubled or moved."""
    n = draw(st.integers(0, 3)) if dims is None else dims
    shape = tuple(draw(st.integers(0, 6)) for _ in range(n))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        if shape:
            axis = draw(st.integers(0, n - 1))
            cut = draw(st.integers(0, boxes[at].shape[axis]))
            box = boxes.pop(at)
            for low, high in ((0, cut), (cut, box.shape[axis])):
                o, s = list(box.offset), list(box.shape)
                o[axis], s[axis] = box.offset[axis] + low, high - low
                boxes.append(Box(tuple(o), tuple(s)))
    harm = draw(st.sampled_from(["none", "drop", "double", "shrink", "random"]))
    at = draw(st.integers(0, len(boxes) - 1))
    if harm == "drop":
        boxes.pop(at)
    elif harm == "double":
        boxes.append(boxes[at])
    elif harm == "shrink" and shape:
        box = boxes[at]
        boxes[at] = Box(box.offset, tuple(max(s - 1, 0) for s in box.shape))
    elif harm == "random":
        o = tuple(draw(st.integers(0, w)) for w in shape)
        boxes.append(Box(o, tuple(draw(st.integers(0, w - a)) for w, a in zip(shape, o, strict=True))))
    return shape, draw(st.permutations(boxes))


@settings(max_examples=500)
@given(cases())
def test_one_tensor_agrees_with_counting(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    offsets, sizes = rows(boxes, len(shape))
    found = first_problem(
        np.asarray([shape], np.int64).reshape(1, -1), np.zeros(len(boxes), int), offsets, sizes
    )
    expected = counted(shape, boxes)
    assert (None if found is None else (found.kind, found.place)) == expected
    assert tiles(shape, offsets, sizes) == (expected is None)


@settings(max_examples=150)
@given(st.integers(0, 3).flatmap(lambda d: st.lists(cases(d), min_size=1, max_size=5)), st.randoms())
def test_many_tensors_at_once(several: list[tuple[tuple[int, ...], list[Box]]], random: object) -> None:
    dims = len(several[0][0])
    pairs = [(at, box) for at, (_, boxes) in enumerate(several) for box in boxes]
    random.shuffle(pairs)  # type: ignore[attr-defined]
    offsets, sizes = rows([box for _, box in pairs], dims)
    shapes = np.asarray([shape for shape, _ in several], np.int64).reshape(len(several), dims)
    found = first_problem(shapes, np.asarray([at for at, _ in pairs], np.int64), offsets, sizes)
    faults = {at: fault for at, (shape, boxes) in enumerate(several) if (fault := counted(shape, boxes))}
    if found is None:
        assert not faults
    else:
        assert (found.kind, found.place) == faults[found.tensor]
        assert found.tensor == min(faults)


def test_a_box_outside_is_named_with_its_row() -> None:
    offsets, sizes = np.asarray([[0, 0], [2, 3]]), np.asarray([[2, 4], [2, 2]])
    found = first_problem(np.asarray([[4, 4]]), np.zeros(2, int), offsets, sizes)
    assert found is not None
    assert (found.kind, found.place, found.chunk) == ("outside", (2, 3), 1)


@pytest.mark.parametrize("offset", [-1, 2**63 - 1, 2**62])
@pytest.mark.parametrize("size", [1, 2**63 - 1])
def test_numbers_that_would_overflow_are_outside(offset: int, size: int) -> None:
    found = first_problem(np.asarray([[4]]), np.zeros(1, int), np.asarray([[offset]]), np.asarray([[size]]))
    assert found is not None
    assert found.kind == "outside"


def test_a_shape_whose_points_no_int64_can_number() -> None:
    shape = (1 << 40, 1 << 41, 1 << 39)
    half = shape[1] // 2
    good = [
        Box((0, 0, 0), (shape[0], half, shape[2])),
        Box((0, half, 0), (shape[0], shape[1] - half, shape[2])),
    ]
    upper = shape[1] - half
    corner = [  # all of good[1] but Box((5, half, 7), (1, 3, 2))
        Box((0, half, 0), (5, upper, shape[2])),
        Box((6, half, 0), (shape[0] - 6, upper, shape[2])),
        Box((5, half + 3, 0), (1, upper - 3, shape[2])),
        Box((5, half, 0), (1, 3, 7)),
        Box((5, half, 9), (1, 3, shape[2] - 9)),
    ]
    assert tiles(shape, *rows(good, 3))
    tensors = np.zeros(1 + len(corner), int)
    found = first_problem(np.asarray([shape]), tensors, *rows([good[0], *corner], 3))
    assert found is not None
    assert (found.kind, found.place) == ("gap", (5, half, 7))
    found = first_problem(np.asarray([shape]), np.zeros(3, int), *rows([*good, Box((9, 8, 7), (1, 1, 1))], 3))
    assert found is not None
    assert (found.kind, found.place) == ("overlap", (9, 8, 7))


def test_huge_and_small_tensors_together() -> None:
    shapes = np.asarray([[1 << 62, 1 << 62], [4, 4]])
    offsets = np.asarray([[0, 0], [1 << 61, 0], [0, 0], [2, 0]])
    sizes = np.asarray([[1 << 61, 1 << 62], [1 << 61, 1 << 62], [2, 4], [2, 3]])
    found = first_problem(shapes, np.asarray([0, 0, 1, 1]), offsets, sizes)
    assert found is not None
    assert (found.tensor, found.kind, found.place) == (1, "gap", (2, 3))


def test_dimensions_whose_product_no_float_holds() -> None:
    shape = (1 << 60,) * 20
    halves = [Box((0,) * 20, (1 << 59, *shape[1:])), Box((1 << 59, *(0,) * 19), (1 << 59, *shape[1:]))]
    assert tiles(shape, *rows(halves, 20))
    assert not tiles(shape, *rows(halves[:1], 20))


def test_0d_and_empty_tensors() -> None:
    point = np.zeros((1, 0), np.int64)
    nothing = np.zeros((0, 0), np.int64)
    assert tiles((), point, point)
    assert not tiles((), nothing, nothing)
    assert not tiles((), np.zeros((2, 0), int), np.zeros((2, 0), int))
    assert tiles((0, 4), np.zeros((0, 2), int), np.zeros((0, 2), int))
    assert tiles((0, 4), np.zeros((1, 2), int), np.asarray([[0, 4]]))
    assert not tiles((2, 4), np.zeros((0, 2), int), np.zeros((0, 2), int))


def test_flat_ranges_tile_whatever_the_cuts() -> None:
    random = np.random.default_rng(7)
    shape = (7, 5, 6)
    cuts = np.sort(random.integers(0, 210, 30)).tolist()
    boxes = [b for a, c in zip([0, *cuts], [*cuts, 210], strict=True) for b in from_flat_range(shape, a, c)]
    assert tiles(shape, *rows(boxes, 3))
    assert not tiles(shape, *rows(boxes[:-1], 3))


def test_a_hundred_thousand_chunks_take_no_pairs() -> None:
    side = 320
    at = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    begun = time.thread_time()
    assert tiles((side * 3, side * 5), at * [3, 5], np.tile([3, 5], (len(at), 1)))
    assert time.thread_time() - begun < 30  # pairs would be 10^10
