"""Read a part of the bytes that a save is about to link back from storage: linked bytes are never written
again, so nothing else finds damage of them before they are needed."""

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
"""Bytes that a save of a rank reads, at least and at most; between them so many that 16 saves read all."""


class Blocks(NamedTuple):
    """Bytes in files, and the digests that they must have. A row for each block, by file and place."""

    file: Array
    start: Array
    """In bytes from the file's begin."""
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
    """Return the blocks of chunks. digests: of each chunk the first row and their number; and all of them."""
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
    """Return, by file, the first chunk of this turn's share that storage does not hold as it was written, or
    that can't be read, and then why. Each share follows the one of the turn before."""
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
    """Return the chunk of the first block that has other bytes."""
    start, stop = int(blocks.start[rows[0]]), int((blocks.start[rows] + blocks.nbytes[rows]).max())
    # What this host has in memory of the file is dropped, else it would be read in place of the disk's.
    os.posix_fadvise(reader.fd, start, stop - start, os.POSIX_FADV_DONTNEED)
    for row in rows.tolist():
        begin, nbytes, value = (int(column[row]) for column in (blocks.start, blocks.nbytes, blocks.digest))
        if digest(reader.read(begin, nbytes)) != value:
            return int(blocks.chunk[row])
        progress(0)
    return None
