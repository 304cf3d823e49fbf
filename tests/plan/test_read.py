"""The join of wanted boxes with stored chunks: all pairs that meet, and not every pair looked at."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.layout.box import Box, from_flat_range, whole
from holdfast._core.plan import read
from holdfast._core.plan.read import Overlaps, overlaps
from tests.support.boxes import split


def numbers(boxes: list[Box], dims: int) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.asarray([b.offset for b in boxes], np.int64).reshape(len(boxes), dims),
        np.asarray([b.shape for b in boxes], np.int64).reshape(len(boxes), dims),
    )


def join(tensors: int, wanted: list[tuple[int, Box]], stored: list[tuple[int, Box]], dims: int) -> Overlaps:
    stored = sorted(stored)
    return overlaps(
        tensors,
        np.asarray([t for t, _ in wanted], np.int64),
        *numbers([b for _, b in wanted], dims),
        np.asarray([t for t, _ in stored], np.int64),
        *numbers([b for _, b in stored], dims),
    )


def check(tensors: int, wanted: list[tuple[int, Box]], stored: list[tuple[int, Box]], dims: int) -> None:
    """The join is what comparing all pairs gives, in the order of chunks."""
    found = join(tensors, wanted, stored, dims)
    got = np.column_stack([found.chunk, found.wanted, found.offset, found.size])
    wt, ct = (np.asarray([t for t, _ in rows], np.int64) for rows in (wanted, sorted(stored)))
    (wo, ws), (co, cs) = (numbers([b for _, b in rows], dims) for rows in (wanted, sorted(stored)))
    low = np.maximum(wo[None], co[:, None])
    high = np.minimum((wo + ws)[None], (co + cs)[:, None])
    chunk, want = np.nonzero((low < high).all(axis=2) & (wt[None] == ct[:, None]))
    low, size = low[chunk, want], (high - low)[chunk, want]
    expected = np.column_stack([chunk, want, low, size])
    assert got[:, 0].tolist() == expected[:, 0].tolist()  # ordered by chunk
    assert got[np.lexsort(got[:, 1::-1].T)].tolist() == expected.tolist()


def tiling(random: np.random.Generator, shape: tuple[int, ...], parts: int) -> list[Box]:
    """A random partition: boxes cut again and again."""
    boxes = [whole(shape)]
    for _ in range(parts * 2):
        if len(boxes) >= parts:
            break
        box = boxes.pop(int(random.integers(len(boxes))))
        axis = int(random.integers(len(shape)))
        cut = int(random.integers(0, box.shape[axis] + 1))
        for low, high in ((0, cut), (cut, box.shape[axis])):
            offset, size = list(box.offset), list(box.shape)
            offset[axis] += low
            size[axis] = high - low
            if high > low:
                boxes.append(Box(tuple(offset), tuple(size)))
    return boxes


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    boxes = [whole(shape)]
    for axis, count in enumerate(parts):
        boxes = [piece for box in boxes for piece in split(box, axis, count)]
    return boxes


def flat(shape: tuple[int, ...], cuts: list[int]) -> list[Box]:
    edges = [0, *sorted(cuts), int(np.prod(shape))]
    return [b for low, high in pairwise(edges) for b in from_flat_range(shape, low, high)]


def boxes_by(kind: str, random: np.random.Generator, shape: tuple[int, ...], many: int) -> list[Box]:
    if kind == "grid":
        return grid(shape, tuple(int(random.integers(1, max(2, many // 4))) for _ in shape))
    if kind == "tiling":
        return tiling(random, shape, many)
    if kind == "flat":
        return flat(shape, random.integers(0, int(np.prod(shape)) + 1, many // 3).tolist())
    offsets = [tuple(int(random.integers(0, s)) for s in shape) for _ in range(many)]
    return [
        Box(o, tuple(int(random.integers(0, s - a + 1)) for s, a in zip(shape, o, strict=True)))
        for o in offsets
    ]


KINDS = ("grid", "tiling", "flat", "overlapping")


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.integers(1, 120),
    st.integers(0, 2**32),
)
def test_the_join_is_brute_force(
    shape: list[int], stored: str, wanted: str, tensors: int, many: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    s = tuple(shape)
    kept = [(t, b) for t in range(tensors) for b in boxes_by(stored, random, s, many) if b.volume]
    asked = [(t, b) for t in range(tensors) for b in boxes_by(wanted, random, s, many)]
    random.shuffle(asked)  # type: ignore[arg-type]
    check(tensors, [(int(t), Box(tuple(b[0]), tuple(b[1]))) for t, b in asked], kept, len(s))


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("shape", [(400,), (60, 40), (12, 20, 9)])
def test_many_boxes_take_the_join_and_agree_with_brute_force(
    stored: str, wanted: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng([KINDS.index(stored), KINDS.index(wanted), len(shape)])
    joined = []
    original = read.candidate_pairs
    monkeypatch.setattr(read, "candidate_pairs", lambda *args: joined.append(1) or original(*args))
    monkeypatch.setattr(read, "DIRECT", 1)
    kept = [(0, b) for b in boxes_by(stored, random, shape, 150) if b.volume]
    asked = [(0, b) for b in boxes_by(wanted, random, shape, 150)]
    check(1, asked, kept, len(shape))
    assert joined or len(kept) < 3 or len(asked) < 3


def test_0d_tensors_and_nothing() -> None:
    check(1, [(0, whole(()))], [(0, whole(()))], 0)
    check(2, [(0, whole(())), (1, whole(()))], [(1, whole(()))], 0)
    check(2, [], [(0, whole((3,)))], 1)
    check(2, [(0, whole((3,)))], [], 1)
    check(1, [(0, Box((1,), (0,)))], [(0, whole((3,)))], 1)


def candidates(monkeypatch: pytest.MonkeyPatch, wanted: list[Box], stored: list[Box]) -> tuple[int, int]:
    """(pairs looked at, pairs found) of one join."""
    looked = []
    original = read.candidate_pairs

    def counting(*args: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pairs = original(*args)
        looked.append(len(pairs[0]))
        return pairs

    monkeypatch.setattr(read, "candidate_pairs", counting)
    dims = len(stored[0].shape)
    found = join(1, [(0, b) for b in wanted], [(0, b) for b in stored], dims)
    assert looked, "the join was not used"
    return sum(looked), len(found.chunk)


LARGE = {
    "grid to another grid": lambda: (grid((960, 840), (60, 40)), grid((960, 840), (48, 70))),
    "grid to flat ranges": lambda: (grid((960, 84), (60, 42)), flat((960, 84), list(range(0, 960 * 84, 31)))),
    "flat ranges to flat ranges": lambda: (
        flat((500, 90), list(range(0, 45_000, 17))),
        flat((500, 90), list(range(0, 45_000, 23))),
    ),
    "flat ranges of three dimensions": lambda: (
        flat((50, 30, 30), list(range(0, 45_000, 17))),
        flat((50, 30, 30), list(range(0, 45_000, 23))),
    ),
    "experts to experts": lambda: (grid((512, 64, 64), (512, 8, 1)), grid((512, 64, 64), (64, 1, 8))),
    "rows to columns": lambda: (grid((2000, 8), (2000, 1)), grid((2000, 8), (500, 8))),
    "vector": lambda: (grid((90_000,), (7000,)), grid((90_000,), (9000,))),
    "halves cut unlike each other": lambda: (
        grid((2, 12_000), (1, 3000)),
        [
            *grid((1, 12_000), (1, 4000)),
            *(Box((1, b.offset[1]), b.shape) for b in grid((1, 12_000), (1, 2400))),
        ],
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_many_by_many_does_not_look_at_every_pair(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, stored = LARGE[case]()
    looked, found = candidates(monkeypatch, wanted, stored)
    assert len(wanted) * len(stored) > 10 * looked
    assert looked <= 4 * (found + len(wanted) + len(stored)), (looked, found, len(wanted), len(stored))
