"""Fingerprints: 128 bits of a tensor that do not depend on how it is sharded.

A fingerprint consists of two sums, modulo 2^64, over all elements. Each element is multiplied by a weight,
which depends on its index in the global tensor. So the sums of disjoint boxes add up to those of the tensor,
in any layout. Eight bytes along the last axis are one number (a word); its weight is a product of one weight
per axis. All weights are odd, so a change of a single word always changes the sums. The second sum takes the
bytes in reverse order: the first is weak in the highest bits, some of which an even difference of weights
loses, and the second is strong there.

Zeros add nothing, so padding with zeros changes no fingerprint. It detects accidents, not forgery. No torch.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from holdfast._core.base.values import Buffer
from holdfast._core.layout.box import Box, from_flat_range

Sums = npt.NDArray[np.uint64]
"""Two numbers."""
_WORD = 8
_LINE = 4096
"""Words per line. A word's weight along the last axis is the product of its weight in the line and the
line's weight."""
_TILE = 1 << 17
"""Words per step, so few that they are in cache for the second sum."""
_TILE_COLUMNS, _TILE_ROWS = 16, 4096
"""Words along the last axis, and rows, that are put together at a time where memory has columns."""
_REVERSED = np.dtype(">u8")
_ROWS = 1 << 16
"""Weights per axis that are cached."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LAST, _LINES = 0, 255
"""Axis numbers for the weights of words in a line, and of lines. Other axes are counted from the end."""


def nothing() -> Sums:
    """Return the sums of an empty box."""
    return np.zeros(2, np.uint64)


def text_of(sums: Sums) -> str:
    """Return the sums as 32 hex digits."""
    return f"{int(sums[0]):016x}{int(sums[1]):016x}"


def box_sums(data: Buffer, itemsize: int, box: Box, first: int = 0) -> Sums:
    """Return the sums of consecutive elements of a row-major box.

    data: the bytes of the elements. itemsize: bytes per element: 1, 2, 4, 8 or a multiple of 8.
    box: in the global tensor. first: row-major index of the first element in the box.
    """
    count = len(memoryview(data).cast("B")) // itemsize
    sums, done = nothing(), 0
    with np.errstate(over="ignore"):  # the sums are modulo 2^64
        for part in from_flat_range(box.shape, first, first + count):
            size = part.volume * itemsize
            offset = tuple(a + b for a, b in zip(part.offset, box.offset, strict=True))
            raw = np.frombuffer(data, np.uint8, size, done)
            sums += _dense(raw, itemsize, Box(offset, part.shape))
            done += size
    return sums


def sums_of_each(data: Buffer, itemsize: int, box: Box) -> Sums:
    """Return the sums of several tensors of one shape, of the same box of each: (tensors, 2).

    data: the boxes' bytes, one after the other. Many small tensors take far less time together.
    """
    with np.errstate(over="ignore"):
        return _dense(np.frombuffer(data, np.uint8), itemsize, box, one=False).reshape(-1, 2)


def sums_by_columns(columns: npt.NDArray[np.unsignedinteger], box: Box) -> Sums:
    """Return the sums of a box that lies in memory column by column.

    columns: its elements as unsigned integers: (columns, rows). box: has one index on all but two axes.
    """
    each = _WORD // columns.itemsize
    width, height = columns.shape
    first, before = divmod(box.offset[-1], each)
    many = -(-(before + width) // each)
    places = np.arange(first, first + many)
    lines = places // _LINE
    of_words = _weights(_LAST, 0, _LINE)[:, places % _LINE]
    of_words = of_words * _weights(_LINES, lines[0], lines[-1] + 1)[:, lines - lines[0]]
    of_rows = _row_weights(box)
    sums = nothing()
    tile = np.empty((_TILE_COLUMNS, min(height, _TILE_ROWS), each), columns.dtype)
    for start in range(0, many, _TILE_COLUMNS):
        stop = min(start + _TILE_COLUMNS, many)
        for row in range(0, height, _TILE_ROWS):
            rows = slice(row, min(row + _TILE_ROWS, height))
            words = tile[: stop - start, : rows.stop - row]
            if start == 0 or stop == many:
                words[:] = 0  # the box may hold only a part of the first or last word of a row
            for place in range(each):
                # Words of which the box has the element at this place.
                low = max(start, -((place - before) // each))
                high = min(stop, -(-(width + before - place) // each))
                column = low * each + place - before
                words[low - start : high - start, :, place] = columns[
                    column : column + (high - low) * each : each, rows
                ]
            products = _products(words.view("<u8")[:, :, 0], of_rows[:, rows])
            sums += np.einsum("sw,sw->s", of_words[:, start:stop], products)
    return sums


def _dense(raw: npt.NDArray[np.uint8], itemsize: int, box: Box, one: bool = True) -> Sums:
    """Return the sums of a whole box; if not `one`, of this box of each of several tensors."""
    if not box.shape:
        box = Box((0,), (1,))
    width, low = box.shape[-1], box.offset[-1]
    if itemsize > _WORD:
        width, low, itemsize = width * (itemsize // _WORD), low * (itemsize // _WORD), _WORD
    each = _WORD // itemsize
    before = low % each
    many = -(-(before + width) // each)
    if before or (before + width) % each:
        # The box holds only a part of the first or last word of a row. The rest of that word counts as zero.
        filled = np.zeros((len(raw) // (width * itemsize), many * _WORD), np.uint8)
        filled[:, before * itemsize : (before + width) * itemsize] = raw.reshape(len(filled), -1)
        raw = filled.reshape(-1)
    words = raw.view("<u8").reshape(-1, many)
    rows = _row_weights(box)
    if not one:
        lines = _lines(words, low // each).reshape(2, -1, rows.shape[1])
        separate: Sums = np.einsum("str,sr->ts", lines, rows)
        return separate
    if len(words) == 1:
        return _line(words[0], low // each) * rows[:, 0]
    return np.asarray(
        [np.dot(weights, sums) for weights, sums in zip(rows, _lines(words, low // each), strict=True)]
    )


def _lines(words: npt.NDArray[np.uint64], first: int) -> Sums:
    """Return the sums of each row of (rows, words), without row weights. first: the first word's column."""
    sums = np.zeros((2, len(words)), np.uint64)
    start = 0
    while start < words.shape[1]:
        line, column = divmod(first + start, _LINE)
        stop = min(start + _LINE - column, words.shape[1])
        weights = _weights(_LAST, column, column + stop - start)
        whole = _weights(_LINES, line, line + 1)
        step = max(_TILE // (stop - start), 1)
        for row in range(0, len(words), step):
            part = words[row : row + step, start:stop]
            sums[:, row : row + step] += _products(part, weights) * whole
        start = stop
    return sums


def _line(words: npt.NDArray[np.uint64], first: int) -> Sums:
    """Return the sums of one row of any length: its whole lines are summed as rows of a matrix."""
    head = min(-first % _LINE, len(words))
    lines = (len(words) - head) // _LINE
    sums = nothing()
    if head:
        sums += _lines(words[None, :head], first)[:, 0]
    if lines:
        body = words[head : head + lines * _LINE].reshape(lines, _LINE)
        inside = _weights(_LAST, 0, _LINE)
        line = (first + head) // _LINE
        for row in range(0, lines, _TILE // _LINE):
            part = body[row : row + _TILE // _LINE]
            whole = _weights(_LINES, line + row, line + row + len(part))
            sums += np.einsum("sl,sl->s", whole, _products(part, inside))
    rest = head + lines * _LINE
    if rest < len(words):
        sums += _lines(words[None, rest:], first + rest)[:, 0]
    return sums


def _products(part: npt.NDArray[np.uint64], weights: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return both sums of each row of (rows, words), without the weights of lines and rows: (2, rows)."""
    # einsum multiplies integers 1.5 times as fast as `dot` does, and swaps bytes piece by piece, in cache.
    sums = np.empty((2, len(part)), np.uint64)
    np.einsum("ij,j->i", part, weights[0], out=sums[0])
    np.einsum("ij,j->i", part.view(_REVERSED), weights[1], out=sums[1])
    return sums


def _row_weights(box: Box) -> npt.NDArray[np.uint64]:
    """Return the weights of all rows of a box, row-major: (2, rows)."""
    weights = np.ones((2, 1), np.uint64)
    axes = len(box.shape) - 1
    for axis in range(axes):
        low = box.offset[axis]
        # Counted from the end. Axes beyond 254 would share weights; no tensor has them.
        more = _weights(axes - axis, low, low + box.shape[axis])
        weights = (weights[:, :, None] * more[:, None, :]).reshape(2, -1)
    return weights


def _weights(axis: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """Return odd weights for the indices `start` to `stop` of an axis: (2, stop - start)."""
    if stop <= _ROWS:
        return _kept(axis)[:, start:stop]
    return _made(axis, start, stop)


@lru_cache(maxsize=32)
def _kept(axis: int) -> npt.NDArray[np.uint64]:
    return _made(axis, 0, _LINE if axis == _LAST else _ROWS)


def _made(axis: int, start: int, stop: int) -> npt.NDArray[np.uint64]:
    # splitmix64 of the index, with a seed for each axis and each of the two sums.
    seeds = np.asarray([axis << 48, 256 + axis << 48], np.uint64)
    indices = np.arange(start + 1, stop + 1, dtype=np.uint64)
    z: npt.NDArray[np.uint64] = np.add(seeds[:, None], indices, dtype=np.uint64)
    z *= _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: npt.NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return weights
