"""Digests: xxh3-64 over blocks, so that a slice is verified without reading its whole chunk.

xxh3 detects accidents (2^-64 go unnoticed), not forgers. It runs at 10 GB/s a core or more and
releases the GIL.

A chunk is cut into blocks of equal size, its last one shorter. The size is a rule, not a choice,
so that writer, witness and reader agree without a word: an eighth of the chunk (a quarter below
512 KiB, a half below 256 KiB, all of it below 128 KiB), up to the next multiple of 16 bytes (no
element is wider), 4 MiB at most, then up to whole rows where rows are small (down to whole rows
at 4 MiB). Eighths keep the usual tensor-parallel slices (halves, quarters, eighths, of gate and
up as well) on block boundaries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.values import Buffer

MIN_BLOCK, MAX_BLOCK = 64 << 10, 4 << 20


def digest(data: Buffer) -> int:
    """xxh3-64 of the bytes."""
    return xxhash.xxh3_64_intdigest(data)


def digest_many(digests: npt.NDArray[np.uint64]) -> int:
    """One digest that stands for several, in order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests, "<u8").tobytes())


def block_size(nbytes: int, row: int) -> int:
    """Bytes of a block in a chunk of `nbytes` whose rows (along its first axis) have `row` bytes."""
    parts = next((parts for parts in (8, 4, 2) if nbytes >= parts * MIN_BLOCK), 1)
    if parts == 1:
        return max(nbytes, 1)
    # Rounded up, so a chunk below the bound has at most `parts` blocks. In whole numbers only, as writer and
    # witness must get the same.
    size = min(-(-nbytes // (16 * parts)) * 16, MAX_BLOCK)
    if 0 < row <= MAX_BLOCK:
        size = max(size // row, 1) * row if size >= MAX_BLOCK else -(-size // row) * row
    return size


# The rule of `block_size` a second time, because a loop over 100,000 chunks is too slow. A change there is a
# change here; tests/format/test_digest.py compares them.
def block_sizes(nbytes: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`block_size` for many chunks at once."""
    parts = np.select([nbytes >= count * MIN_BLOCK for count in (8, 4, 2)], [8, 4, 2], 1)
    size = np.minimum(-(-nbytes // (16 * parts)) * 16, MAX_BLOCK)
    fits = (rows > 0) & (rows <= MAX_BLOCK)
    row = np.where(fits, rows, 1)
    whole = np.where(size >= MAX_BLOCK, np.maximum(size // row, 1) * row, -(-size // row) * row)
    return np.where(parts == 1, np.maximum(nbytes, 1), np.where(fits, whole, size))


def block_counts(nbytes: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many blocks each chunk has; an empty chunk has none."""
    return -(-nbytes // blocks)


def hex_digest(value: int) -> str:
    return f"{value:016x}"
