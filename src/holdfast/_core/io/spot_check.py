"""Spot check of linked files: a save reads back a share of the bytes that it is about to link.

Linked bytes are never written again, so damage in them would otherwise be noticed only by a load.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from holdfast._core.format.columns import Array, expand_ranges
from holdfast._core.format.digest import digest
from holdfast._core.io.host_memory import ReportBytes
from holdfast._core.store.local import LocalReader
from holdfast.errors import StorageError

LEAST, MOST, SAVES = 16 << 20, 1 << 30, 16
"""Each save of a rank reads 1/SAVES of the linked bytes, but at least LEAST and at most MOST bytes."""


class Blocks(NamedTuple):
    """Blocks in files, with their expected digests: one row per block, sorted by file and position."""

    file: Array
    start: Array
    """Position in the file."""
    nbytes: Array
    digest: Array
    chunk: Array


def blocks_of(
    chunk: Array,
    file: Array,
    position: Array,
    nbytes: Array,
    block: Array,
    digests: tuple[Array, Array, Array],
) -> Blocks:
    """Return the blocks of chunks. digests: for each chunk, the index of its first digest and their number;
    then the digests of all chunks."""
    first, count, values = digests
    number = expand_ranges(np.zeros_like(count), count)
    of = np.repeat(np.arange(len(chunk)), count)
    start = position[of] + number * block[of]
    length = np.minimum(block[of], nbytes[of] - number * block[of])
    order = np.lexsort((start, file[of]))
    return Blocks(
        *(a[order] for a in (file[of], start, length, values[expand_ranges(first, count)], chunk[of]))
    )


def spot_check(
    blocks: Blocks, turn: int, open_: Callable[[int], LocalReader], progress: ReportBytes
) -> dict[int, tuple[int, str]]:
    """Read and verify this turn's share of the blocks; consecutive turns read consecutive shares.

    Returns, for each bad file, the first damaged chunk and ""; if the file can't be read, a chunk and the
    reason.
    """
    total = int(blocks.nbytes.sum())
    most = min(max(LEAST, total // SAVES), MOST)
    begins = np.cumsum(blocks.nbytes) - blocks.nbytes
    chosen = np.flatnonzero((begins - turn * most) % max(total, 1) < most)
    bad: dict[int, tuple[int, str]] = {}
    for file in np.unique(blocks.file[chosen]).tolist():
        mine = chosen[blocks.file[chosen] == file]
        try:
            reader = open_(file)
            try:
                wrong = _first_wrong(reader, blocks, mine, progress)
            finally:
                reader.close()
            if wrong is not None:
                bad[file] = wrong, ""
        except StorageError as error:
            bad[file] = int(blocks.chunk[mine[0]]), error.message
    return bad


def _first_wrong(reader: LocalReader, blocks: Blocks, rows: Array, progress: ReportBytes) -> int | None:
    """Return the chunk of the first block whose digest differs; None if there is none."""
    start, stop = int(blocks.start[rows[0]]), int((blocks.start[rows] + blocks.nbytes[rows]).max())
    # Drop the file's pages from the page cache; otherwise they would be read instead of the disk.
    os.posix_fadvise(reader.fd, start, stop - start, os.POSIX_FADV_DONTNEED)
    for row in rows.tolist():
        begin, nbytes, value = (int(column[row]) for column in (blocks.start, blocks.nbytes, blocks.digest))
        if digest(reader.read(begin, nbytes)) != value:
            return int(blocks.chunk[row])
        progress(0)
    return None
