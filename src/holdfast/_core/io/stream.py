"""Stream memory to a file: gather bytes that are not contiguous, hash and write, in batches that fit in
cache."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

import numpy as np

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import Array, unpad
from holdfast._core.format.digest import block_counts, digest
from holdfast._core.format.fingerprint import Sums, box_sums
from holdfast._core.io.host_memory import BATCH, BATCH_BUFFERS, ReportBytes, ScratchBuffer, even_ranges
from holdfast._core.io.on_threads import on_threads
from holdfast._core.layout.box import Box, from_flat_range
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.plan.shard_table import PlannedRows, ShardTable, contiguous_at
from holdfast._core.store.base import Writer

SUMMED = 8
TURN = 4 << 20
"""Bytes of a thread's turn, about, where a file is written in order."""
"""Number of buffers per task of computing sums, for memory laid out as in the file: usually 16 MiB."""


class ChunkSource:
    """The bytes of one planned chunk in memory."""

    __slots__ = ("_box", "_itemsize", "_memory", "address", "block", "nbytes", "whole")

    def __init__(self, table: ShardTable, plan: PlannedRows, index: int, nbytes: int, block: int) -> None:
        row = int(plan.row[index])
        spec, outer, self._memory = table.specs[row], table.boxes[row], table.memory[row]
        ndim = len(spec.shape)
        self.whole = Box(unpad(plan.offset[index], ndim), unpad(plan.size[index], ndim))
        """The chunk's box in the global tensor."""
        self._box = self.whole.relative_to(outer.offset)
        self._itemsize = DTYPES[spec.dtype].size
        self.nbytes, self.block = nbytes, block
        start = contiguous_at(outer.shape, self._box) if self._memory.address else None
        self.address = 0 if start is None else self._memory.address + start * self._itemsize

    def direct(self, low: int, length: int) -> Buffer:
        """Return bytes in place, without a copy. Only if there is an address."""
        # Cheaper than a NumPy array; the shard table keeps the memory alive.
        return (ctypes.c_ubyte * length).from_address(self.address + low)

    def sums(self, low: int, data: Buffer) -> Sums:
        """Return the contribution of `data`, at byte `low` of the chunk, to the fingerprint."""
        return box_sums(data, self._itemsize, self.whole, low // self._itemsize)

    def gather(self, low: int, out: memoryview) -> None:
        """Copy the bytes from `low` on into a buffer."""
        done = 0
        for part in from_flat_range(
            self._box.shape, low // self._itemsize, (low + len(out)) // self._itemsize
        ):
            size = part.volume * self._itemsize
            moved = Box(tuple(a + b for a, b in zip(part.offset, self._box.offset, strict=True)), part.shape)
            self._memory.gather(moved, out[done : done + size])
            done += size

    def one_block(self, number: int) -> Buffer:
        low = number * self.block
        length = min(self.block, self.nbytes - low)
        if self.address:
            return self.direct(low, length)
        out = memoryview(bytearray(length))
        self.gather(low, out)
        return out


class Stream:
    """Hashes and writes consecutive chunks, batch by batch while they are in cache."""

    def __init__(self, writer: Writer, position: int, progress: ReportBytes, beside: Executor | None) -> None:
        """Start at `position` of the file. beside: computes sums while this thread writes; None: this thread
        computes them."""
        self._writer, self._position, self._progress = writer, position, progress
        self._beside = beside
        self._unsummed: list[_Unsummed] = []
        self._summing: list[tuple[Future[None], list[_Unsummed]]] = []
        self._batch: list[Buffer] = []
        self._size = 0
        self._scratch = ScratchBuffer()
        self.digests: list[int] = []

    def small(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Add contiguous chunks of one block each, of which MoE models have thousands."""
        kinds = {size: ctypes.c_ubyte * size for size in {*sizes}}
        first, last = 0, len(sizes)
        for stop, size in enumerate(sizes, 1):
            self._size += size
            is_full = self._size >= BATCH or stop - first >= BATCH_BUFFERS
            if is_full or stop == last:
                some = zip(sizes[first:stop], addresses[first:stop], strict=True)
                buffers = [kinds[size].from_address(address) for size, address in some]
                self.digests += map(digest, buffers)
                self._batch += buffers
                first = stop
                if is_full or len(self._batch) >= BATCH_BUFFERS:
                    self.flush()

    def flush(self) -> None:
        if self._batch:
            self._begin_sums()
            self._writer.write_at(self._position, self._batch)
            self._position += self._size
            self._progress(self._size)
            self._batch, self._size = [], 0
        if self._scratch.is_used:
            self._end_sums()
            self._scratch.reset()

    def end(self) -> None:
        """Write remaining buffers, and wait for all sums."""
        self.flush()
        self._end_sums()

    def _begin_sums(self) -> None:
        unsummed, self._unsummed = self._unsummed, []
        if unsummed and self._beside is not None:
            self._summing.append((self._beside.submit(_sum, unsummed), unsummed))
        else:
            _sum(unsummed)

    def _end_sums(self) -> None:
        # From the end, while the other thread works from the start. So this waits for at most one running
        # task: milliseconds of arithmetic, over some 18 MiB of memory.
        while self._summing:
            summing, unsummed = self._summing.pop()
            if summing.cancel():
                _sum(unsummed)
            else:
                summing.result()

    def chunk(self, source: ChunkSource, sums: Sums | None) -> None:
        """Add a chunk; add its fingerprint to `sums`, if given."""
        nbytes, block = source.nbytes, source.block
        step = max(BATCH // block, 1) * block  # several blocks make one buffer, or are gathered by one copy
        if source.address:
            for low in range(0, nbytes, step):
                length = min(step, nbytes - low)
                if self._size + length > BATCH:
                    self.flush()
                if sums is not None and low % (SUMMED * step) == 0:
                    view = memoryview(source.direct(low, min(SUMMED * step, nbytes - low)))
                    self._unsummed.append(_Unsummed(sums, source, low, view))
                self.add_blocks(memoryview(source.direct(low, length)), block)
            return
        for low in range(0, nbytes, step):
            length = min(step, nbytes - low)
            room = self._scratch.take(length)
            if room is None:
                self.flush()
                room = self._scratch.take(length)
                assert room is not None
            source.gather(low, room)
            if sums is not None:
                self._unsummed.append(_Unsummed(sums, source, low, room))
            self.add_blocks(room, block)
            if self._size >= BATCH:
                self.flush()

    def add_blocks(self, view: memoryview, block: int) -> None:
        """Add a buffer of several blocks. The caller must flush, because the scratch buffer may be in use."""
        self.digests.extend([digest(view[low : low + block]) for low in range(0, len(view), block)])
        self._batch.append(view)
        self._size += len(view)


class _Unsummed(NamedTuple):
    """Bytes whose sums are not computed yet."""

    sums: Sums
    source: ChunkSource
    low: int
    data: memoryview


def _sum(unsummed: Sequence[_Unsummed]) -> None:
    for sums, source, low, data in unsummed:
        sums += source.sums(low, data)  # two numbers, so under the GIL: another thread may add to the same


def stream_chunks(
    writer: Writer,
    table: ShardTable,
    chunks: PlannedRows,
    starts: Array,
    threads: int,
    progress: ReportBytes,
    sums: Array | None = None,
    in_turns: bool = False,
) -> Array:
    """Hash and write all chunks; return the block digests in file order. Add the fingerprint of each chunk to
    `sums`, (chunks, 2), if given.

    in_turns: threads take turns of a few MiB from the front of the file on, for a writer that takes its bytes
        in order; otherwise each has a range of its own.
    """
    counts = block_counts(chunks.nbytes, chunks.block)
    ends = np.cumsum(counts)
    digests = np.zeros(int(counts.sum()), "<u8")
    lock, failed = threading.Lock(), list[BaseException]()
    nbytes, blocks = chunks.nbytes.tolist(), chunks.block.tolist()
    simple = simple_addresses(table, chunks) if sums is None else [0] * len(chunks.row)
    is_simple = [address != 0 for address in simple]

    # Each thread writes its own range of chunks, by positioned writes, and its own range of digests, so
    # threads need no other lock.
    def moved(size: int) -> None:
        with lock:  # `progress` belongs to the caller, and may not be thread-safe
            progress(size)

    def work(start: int, stop: int) -> None:
        try:
            write(start, stop)
        except BaseException as error:
            failed.append(error)
            if in_turns:
                writer.discard()  # wakes the threads that wait for these bytes; their errors say less
            raise failed[0] from None

    def write(start: int, stop: int) -> None:
        stream = Stream(writer, int(starts[start]), moved, beside)
        for alike, run in groupby(range(start, stop), is_simple.__getitem__):
            if alike:
                rows = [*run]
                some = slice(rows[0], rows[-1] + 1)
                stream.small(simple[some], nbytes[some])
                continue
            for index in run:
                source = ChunkSource(table, chunks, index, nbytes[index], blocks[index])
                stream.chunk(source, None if sums is None else sums[index])
        stream.end()
        first = int(ends[start] - counts[start])
        digests[first : first + len(stream.digests)] = np.asarray(stream.digests, "<u8")

    if not len(chunks.row):
        return digests
    with ExitStack() as stack:
        beside = _one_thread(stack) if sums is not None else None
        if threads == 1:
            work(0, len(chunks.row))
        else:
            turns = int(chunks.nbytes.sum()) // TURN if in_turns else 0
            ranges = even_ranges(chunks.nbytes, max(threads, turns // 4))
            on_threads(threads, "holdfast-write", lambda part: work(*part), ranges)
    return digests


def _one_thread(stack: ExitStack) -> Executor | None:
    """Start another thread, which ends with the stack; return None if it can't be started."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="holdfast-sums")
    try:
        # Start the thread now: if that failed later, the submitted work would stay in the queue.
        pool.submit(int)
    except RuntimeError:  # no more threads, or the process is about to end
        pool.shutdown(wait=False, cancel_futures=True)
        return None
    stack.callback(pool.shutdown, cancel_futures=True)  # after an error the sums are not needed
    return pool


def simple_addresses(table: ShardTable, chunks: PlannedRows) -> list[int]:
    """Return the addresses of chunks that are a single block and their whole shard; 0 for the others."""
    arrays = table.arrays()
    whole_shard = (chunks.nbytes == arrays.nbytes[chunks.row]) & (chunks.nbytes <= chunks.block)
    rows = zip(chunks.row.tolist(), whole_shard.tolist(), strict=True)
    return [table.memory[row].address if is_whole else 0 for row, is_whole in rows]
