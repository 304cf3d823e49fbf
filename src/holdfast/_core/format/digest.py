"""Digests: xxh3-64 over blocks, so that a part of a chunk can be verified without reading all of it.

xxh3 detects accidental damage (all but 2^-64 of it), not forgery. It runs at 10 GB/s per core or more, and
releases the GIL.

A chunk is cut into blocks of equal size; the last one may be shorter. A fixed rule gives the size, so that
writer and witness need not exchange it; a reader finds it in the index. It is the chunk divided by a power of
two, so that the usual tensor-parallel slices (halves, quarters, eighths, also of gate and up) end on block
boundaries: 64 parts, fewer if a block had less than 64 KiB, more if it had more than 256 KiB. That is rounded
up to a multiple of 16 bytes (the widest element), and where rows are small, to whole rows. So a rank that
reads a sixth of a chunk reads little more than it needs (docs/decisions/0002-column-panels-on-request.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast._core.base.values import Buffer

MIN_BLOCK, MAX_BLOCK = 64 << 10, 256 << 10
PARTS = 64


digest: Callable[[Buffer], int] = xxhash.xxh3_64_intdigest
"""Return the xxh3-64 of the bytes. Not a function of ours: it is called for every block."""


def digest_many(digests: npt.NDArray[np.uint64]) -> int:
    """Return one digest of several digests, in their order."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests, "<u8").tobytes())


def block_sizes(nbytes: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes per block of chunks of `nbytes` whose rows (along their first axis) have `rows`
    bytes."""
    # Integer arithmetic only: writer and witness must get the same result.
    parts = np.ones_like(nbytes)
    for _ in range(40):
        more = (nbytes >= 2 * parts * MIN_BLOCK) & ((parts < PARTS) | (nbytes > parts * MAX_BLOCK))
        if not more.any():
            break
        parts[more] *= 2
    size = -(-nbytes // (16 * parts)) * 16
    fits = (rows > 0) & (rows <= MAX_BLOCK)
    row = np.where(fits, rows, 1)
    return np.where(parts == 1, np.maximum(nbytes, 1), np.where(fits, -(-size // row) * row, size))


def block_counts(nbytes: npt.NDArray[np.int64], blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of blocks of each chunk; an empty chunk has none."""
    return -(-nbytes // blocks)


def hex_digest(value: int) -> str:
    return f"{value:016x}"
