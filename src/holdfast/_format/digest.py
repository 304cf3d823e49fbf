"""Digests: xxh3-64 over blocks, so that a part of a chunk can be verified without reading all of it.

xxh3 detects accidental damage (all but 2^-64 of it), not forgery. It runs at 10 GB/s per core or more, and
releases the GIL.

A chunk is cut into blocks of equal size; the last one may be shorter. A fixed rule gives the size, so that
writer, witness and reader need not exchange it: an eighth of the chunk (a quarter below 512 KiB, a half below
256 KiB, all of it below 128 KiB), rounded up to a multiple of 16 bytes (the widest element), 4 MiB at most;
then, where rows are small, rounded up to whole rows (rounded down at 4 MiB). With eighths, the usual
tensor-parallel slices (halves, quarters, eighths, also of gate and up) end on block boundaries.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast._values import Buffer

MIN_BLOCK, MAX_BLOCK = 64 << 10, 4 << 20


digest: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""Return the xxh3-64 of the bytes. The library's own function, so that `map(digest, ...)` stays in C."""


def digest_many(digests: npt.NDArray[np.uint64]) -> int:
    """Return one digest of several digests, in their order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests, "<u8").tobytes())


def block_sizes(nbytes: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes per block of chunks of `nbytes` whose rows (along their first axis) have `rows`
    bytes."""
    # Rounded up, so a chunk below the bound has at most `parts` blocks. Integer arithmetic only: writer and
    # witness must get the same result.
    parts = np.select([nbytes >= count * MIN_BLOCK for count in (8, 4, 2)], [8, 4, 2], 1)
    size = np.minimum(-(-nbytes // (16 * parts)) * 16, MAX_BLOCK)
    fits = (rows > 0) & (rows <= MAX_BLOCK)
    row = np.where(fits, rows, 1)
    whole = np.where(size >= MAX_BLOCK, np.maximum(size // row, 1) * row, -(-size // row) * row)
    return np.where(parts == 1, np.maximum(nbytes, 1), np.where(fits, whole, size))


def block_counts(nbytes: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of blocks of each chunk; an empty chunk has none."""
    return -(-nbytes // blocks)


def hex_digest(value: int) -> str:
    return f"{value:016x}"
