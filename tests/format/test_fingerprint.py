"""Fingerprints add up over any cut, are what docs/format.md says, and see what differs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._core.format.fingerprint import box_sums, nothing, text_of
from holdfast._core.layout.box import Box, from_flat_range, whole

MASK = (1 << 64) - 1
SIZES = (1, 2, 4, 8, 16)


def weight(lane: int, axis: int, place: int) -> int:
    """As docs/format.md says, with Python's numbers."""
    z = ((256 * lane + axis << 48) + place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def by_hand(data: np.ndarray, itemsize: int, box: Box) -> str:  # type: ignore[type-arg]
    """Byte by byte: each adds itself, where it stands in its word, times the weight of the word."""
    sums = [0, 0]
    shape, offset = box.shape or (1,), box.offset or (0,)
    data = data.reshape(*shape, itemsize)
    for place in product(*map(range, shape)):
        *lead, last = (a + b for a, b in zip(place, offset, strict=True))
        for byte in range(itemsize):
            word, inside = divmod(last * itemsize + byte, 8)
            for lane in range(2):
                value = int(data[(*place, byte)]) << 8 * (7 - inside if lane else inside)
                value *= weight(lane, 0, word % 4096) * weight(lane, 255, word // 4096)
                for axis, index in enumerate(lead):
                    value *= weight(lane, len(lead) - axis, index)
                sums[lane] = sums[lane] + value & MASK
    return "".join(f"{number:016x}" for number in sums)


def some_bytes(count: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


boxes = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4).map(
    lambda sides: Box(tuple(low for low, _ in sides), tuple(many for _, many in sides))
)


@settings(max_examples=60)
@given(boxes, st.sampled_from(SIZES))
def test_it_is_what_the_page_says(box: Box, itemsize: int) -> None:
    data = some_bytes(box.volume * itemsize)
    assert text_of(box_sums(data.data, itemsize, box)) == by_hand(data, itemsize, box)


@pytest.mark.parametrize("low", [0, 1, 4095 * 4, 4096 * 4 + 2])
@pytest.mark.parametrize("rows", [1, 2])
def test_long_lines_are_what_the_page_says(low: int, rows: int) -> None:
    box = Box((5, low), (rows, 3 * 4096 * 4 + 3))
    data = some_bytes(box.volume * 2)
    data.reshape(-1, 2)[np.random.default_rng(1).random(box.volume) > 0.002] = 0  # for by_hand's sake
    assert text_of(box_sums(data.data, 2, box)) == sparse(data, 2, box)


def sparse(data: np.ndarray, itemsize: int, box: Box) -> str:  # type: ignore[type-arg]
    """By hand, of the elements that are not zero: zeros add nothing."""
    total = [0, 0]
    values = data.reshape(box.volume, itemsize)
    for at in np.flatnonzero(values.any(axis=1)).tolist():
        (part,) = from_flat_range(box.shape, at, at + 1)
        offset = tuple(a + b for a, b in zip(part.offset, box.offset, strict=True))
        found = by_hand(values[at], itemsize, Box(offset, part.shape))
        total = [total[0] + int(found[:16], 16) & MASK, total[1] + int(found[16:], 16) & MASK]
    return "".join(f"{number:016x}" for number in total)


@settings(max_examples=200)
@given(boxes, st.sampled_from(SIZES), st.data())
def test_parts_add_up(box: Box, itemsize: int, draw: st.DataObject) -> None:
    values = some_bytes(box.volume * itemsize).reshape(*box.shape, itemsize)
    expected = box_sums(values.tobytes(), itemsize, box)
    parts = [box]
    for axis in range(len(box.shape)):
        cut = draw.draw(st.integers(0, box.shape[axis]))
        for part in list(parts):
            parts.remove(part)
            for low, high in ((0, cut), (cut, box.shape[axis])):
                if low < high:
                    offset = (*part.offset[:axis], part.offset[axis] + low, *part.offset[axis + 1 :])
                    shape = (*part.shape[:axis], high - low, *part.shape[axis + 1 :])
                    parts.append(Box(offset, shape))
    found = nothing()
    for part in parts:
        data = values[part.relative_to(box.offset).slices()].tobytes()
        middle = draw.draw(st.integers(0, part.volume))
        with np.errstate(over="raise"):
            found += box_sums(data[: middle * itemsize], itemsize, part)
            found += box_sums(data[middle * itemsize :], itemsize, part, middle)
    assert text_of(found) == text_of(expected)


def test_what_differs_is_seen() -> None:
    """Every bit of a small tensor, and rows, columns and halves exchanged."""
    box = whole((48, 40))
    values = some_bytes(48 * 40 * 2).reshape(48, 40, 2)
    known = {text_of(box_sums(values.tobytes(), 2, box))}
    tried = 1
    for at in range(48 * 40 * 16):
        other = values.copy()
        other.reshape(-1)[at // 8] ^= 1 << at % 8
        known.add(text_of(box_sums(other.tobytes(), 2, box)))
        tried += 1
    for axis, side in ((0, 48), (1, 40)):
        for one, another in zip(range(side), range(1, side), strict=False):
            order = np.arange(side)
            order[[one, another]] = another, one
            known.add(text_of(box_sums(np.take(values, order, axis).tobytes(), 2, box)))
            tried += 1
    known.add(text_of(box_sums(values.transpose(1, 0, 2).tobytes(), 2, whole((40, 48)))))
    assert len(known) == tried + 1


def test_signs_that_change_places_are_seen() -> None:
    """What one sum alone misses: words that differ in their highest bit only."""
    values = np.full((64, 4), 1.0, "<f2")
    values[::2, 3] = -1.0
    known = {text_of(box_sums(values.tobytes(), 2, whole(values.shape)))}
    for one in range(63):
        other = values.copy()
        other[[one, one + 1]] = other[[one + 1, one]]
        known.add(text_of(box_sums(other.tobytes(), 2, whole(values.shape))))
    assert len(known) == 64
