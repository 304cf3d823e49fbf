"""Read the boxes that a rank wants directly into their targets, and verify every byte.

A block that is contiguous in both file and target is read into the target, and hashed there while it is in
cache. Any other block with wanted bytes is read into a scratch buffer and hashed; then its wanted part is
copied. Blocks without wanted bytes are not read. `plan.blocks` plans that, before the first byte is read.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import Array, Columns, unpad
from holdfast._core.format.digest import digest
from holdfast._core.io.host_memory import BATCH, BATCH_BUFFERS, ReportBytes, ScratchBuffer, even_ranges
from holdfast._core.io.on_threads import on_threads
from holdfast._core.layout.box import Box, from_flat_range
from holdfast._core.layout.coverage import first_problem
from holdfast._core.plan.blocks import plan_copies, plan_runs, widen
from holdfast._core.plan.read import Overlaps, overlaps
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import OtherSize, Reader, Store, capabilities, open_known
from holdfast.errors import CorruptCheckpoint, MissingTensors

REQUESTS = 4
"""Number of reads at once from a store whose reads are requests."""


class ReadPlan(NamedTuple):
    """The pairs of boxes to copy, and the number of bytes."""

    pairs: Overlaps
    bytes_needed: int

    def without(self, rows: Collection[int], table: ShardTable) -> ReadPlan:
        """Return the plan without the reads for some rows of the shard table."""
        if not rows:
            return self
        kept = np.isin(self.pairs.wanted, [*rows], invert=True)
        return _planned(Overlaps(*(column[kept] for column in self.pairs)), table)


def plan_read(
    table: ShardTable, rows: Array, columns: Columns, where: str, fetched_for: str = ""
) -> ReadPlan:
    """Plan which chunks fill which rows of the shard table.

    rows: the tensor in `columns` of each row. fetched_for: the ranks that a slice was fetched for, or whose
    state a local copy holds; "" if the checkpoint is complete.

    CorruptCheckpoint if the chunks of a tensor do not tile it exactly once; MissingTensors if a slice does
    not hold all of a row.
    """
    arrays = table.arrays()
    dims = max(arrays.dims, columns.dims)
    offset, size = widen(columns.offset, dims, 0), widen(columns.size, dims, 1)
    origin, wanted = widen(arrays.offset, dims, 0), widen(arrays.size, dims, 1)
    tensor = columns.tensor_of_chunk()
    # Before any byte is read. Chunks that tile a tensor exactly once fill every element of a target, so no
    # old element remains.
    problem = None if fetched_for else first_problem(widen(columns.shape, dims, 1), tensor, offset, size)
    if problem is not None:
        name = columns.names[problem.tensor]
        raise CorruptCheckpoint(
            f"{where} does not describe {name!r} completely: {problem.kind} from index "
            f"{list(unpad(np.asarray(problem.place), int(columns.ndim[problem.tensor])))} on.",
            details={"tensor": name},
        )
    pairs = overlaps(len(columns.names), rows, origin, wanted, tensor, offset, size)
    if fetched_for:
        # The chunks of a slice have gaps; only the wanted boxes must be covered, exactly once.
        problem = first_problem(wanted, pairs.wanted, pairs.offset - origin[pairs.wanted], pairs.size)
        if problem is not None:
            name = table.specs[problem.tensor].name
            raise MissingTensors(
                f"{where} was made for {fetched_for}, and does not hold all of {name!r} that rank "
                f"{table.rank} asks for.",
                hint="Load the whole checkpoint, or fetch for this rank, with the grid that it runs in.",
                details={"missing": [name]},
            )
    return _planned(pairs, table)


def _planned(pairs: Overlaps, table: ShardTable) -> ReadPlan:
    itemsize = table.arrays().itemsize[pairs.wanted]
    return ReadPlan(pairs, int((np.prod(pairs.size, axis=1) * itemsize).sum()))


@dataclass
class _Job:
    """One execution of a read plan: the state that its threads share.

    Lists, because the loops below read single items, for each of which NumPy would create an object.
    """

    store: Store
    table: ShardTable
    columns: Columns
    plan: ReadPlan
    progress: ReportBytes

    def run(self, threads: int) -> int:
        """Read everything; return the number of bytes read from data files."""
        columns, pairs = self.columns, self.plan.pairs
        if not len(pairs.chunk):
            return 0
        memory, wanted = self.table.memory, pairs.wanted.tolist()
        address = np.asarray([memory[row].address for row in wanted], np.int64)
        copies = plan_copies(columns, pairs, self.table.arrays(), address)
        self.batch = capabilities(self.store).reads
        runs = plan_runs(columns, pairs, copies, self.batch)
        self.copies = [column.tolist() for column in copies]
        self.wanted: list[int] = wanted
        # `overlaps` orders pairs by chunk, so those of one chunk are consecutive.
        self.first: list[int] = np.searchsorted(pairs.chunk, runs.chunk).tolist()
        self.last: list[int] = np.searchsorted(pairs.chunk, runs.chunk, side="right").tolist()
        position = columns.position[runs.chunk] + runs.start
        self.position: list[int] = position.tolist()
        self.chunk: list[int] = runs.chunk.tolist()
        self.start: list[int] = runs.start.tolist()
        self.length: list[int] = runs.length.tolist()
        self.target: list[int] = runs.target.tolist()
        self.kinds = {size: ctypes.c_ubyte * size for size in {*self.length}}
        self.block: list[int] = columns.block[runs.chunk].tolist()
        self.digest: list[int] = runs.digest.tolist()
        self.digests: list[int] = columns.digests.tolist()
        self.tensor = columns.tensor_of_chunk()
        self.itemsize: list[int] = columns.itemsizes().tolist()
        self.lock = threading.Lock()
        if self.batch > BATCH:
            # Reads are requests, and this process waits for most of their time. Each has bytes enough.
            threads = max(threads, min(-(-sum(self.length) // self.batch), REQUESTS))
        files = columns.file[runs.chunk]
        done = 0
        # Not `np.unique`: it imports numpy.ma, which noticeably delays the start of `holdfast inspect`.
        for file in sorted(set(files.tolist())):
            low, high = np.searchsorted(files, [file, file + 1]).tolist()
            name = columns.file_names[file]
            size, first, length = (
                int(columns.file_size[file]),
                self.position[low],
                self._first_stretch(low, high),
            )
            ranges = [(0, high - low)]
            if threads > 1 and high - low > 1:
                ranges = list(even_ranges(runs.length[low:high], threads))
            parts = [(low + begin, low + end) for begin, end in ranges]
            try:
                with closing(open_known(self.store, name, size, first, length)) as reader:
                    # Before any of its bytes are read into a target.
                    if reader.size != size:
                        raise OtherSize.of(reader.size)
                    work = partial(self._some, reader, name)
                    done += sum(on_threads(threads, "holdfast-read", work, parts))
            except OtherSize as error:
                raise CorruptCheckpoint(
                    f"{self.store.url}/{name} has {error.size} bytes, but was written with {size}: it is "
                    "truncated or replaced.",
                    details={"file": name},
                ) from None
        return done

    def _first_stretch(self, low: int, high: int) -> int:
        """Return how many bytes the runs from `low` on have up to the first gap between them."""
        position, length = self.position, self.length
        run = low + 1
        while run < high and position[run - 1] + length[run - 1] == position[run]:
            run += 1
        return position[run - 1] + length[run - 1] - position[low]

    def _some(self, reader: Reader, name: str, part: tuple[int, int]) -> int:
        """Read runs of one file in order, in batches of neighbours."""
        position, length = self.position, self.length
        # A batch has to fit, each of its buffers up to a multiple of 64 bytes.
        scratch = ScratchBuffer(self.batch + 64 * BATCH_BUFFERS)
        begin, end = part
        first, size, total = begin, 0, 0
        for run in range(begin, end):
            # A batch is one system call, so it has no gaps, and fewer buffers than IOV_MAX.
            if run > first and (
                size + length[run] > self.batch
                or run - first >= BATCH_BUFFERS
                or position[run - 1] + length[run - 1] != position[run]
            ):
                total += self._flush(reader, name, range(first, run), scratch)
                first, size = run, 0
            size += length[run]
        return total + self._flush(reader, name, range(first, end), scratch)

    def _flush(self, reader: Reader, name: str, batch: range, scratch: ScratchBuffer) -> int:
        """Read a batch, verify every block, and copy what was read into scratch to its targets."""
        first, kinds, lengths, targets = batch[0], self.kinds, self.length, self.target
        buffers: list[Buffer] = []
        staged: list[tuple[int, memoryview]] = []
        for run in batch:
            if targets[run]:
                buffers.append(kinds[lengths[run]].from_address(targets[run]))
            else:
                view = scratch.take(lengths[run])
                assert view is not None
                staged.append((run, view))
                buffers.append(view)
        wanted = self.position[batch[-1]] + lengths[batch[-1]] - self.position[first]
        # A direct read fills the target before the bytes are verified. If they are damaged, the load raises
        # on all ranks, and the state is partly overwritten (docs/failure-model.md).
        got = reader.read_into(self.position[first], buffers)
        if got != wanted:
            raise CorruptCheckpoint(
                f"{self.store.url}/{name} ends {wanted - got} bytes too early: it is truncated.",
                details={"file": name},
            )
        if self.digests:  # files of other formats have none
            for run, buffer in zip(batch, buffers, strict=True):
                block, at = self.block[run], self.digest[run]
                if lengths[run] <= block:
                    found = [digest(buffer)]
                else:
                    view = memoryview(buffer)
                    found = [digest(view[low : low + block]) for low in range(0, lengths[run], block)]
                written = self.digests[at : at + len(found)]
                if found != written:
                    number = [a == b for a, b in zip(found, written, strict=True)].index(False)
                    raise self._damaged(run, number * block, name)
        # Only after the whole batch is verified.
        for run, view in staged:
            self._hand_out(run, view)
        scratch.reset()
        # `progress` belongs to the caller, and may not be thread-safe.
        with self.lock:
            self.progress(wanted)
        return wanted

    def _damaged(self, run: int, low: int, name: str) -> CorruptCheckpoint:
        tensor = self.columns.names[int(self.tensor[self.chunk[run]])]
        start, length = self.position[run] + low, min(self.block[run], self.length[run] - low)
        return CorruptCheckpoint(
            f"{self.store.url}/{name} is damaged: bytes {start} to {start + length}, part of {tensor!r}, do "
            "not match the digest they were written with.",
            hint="Load an older step, or another copy of this one; `holdfast verify` lists all damage.",
            details={"file": name, "tensor": tensor, "position": start},
        )

    def _hand_out(self, run: int, data: memoryview) -> None:
        """Copy the wanted parts of verified bytes of a chunk into their targets."""
        for pair in range(self.first[run], self.last[run]):
            start, stop, row, rows, step, target, target_step = (column[pair] for column in self.copies)
            if not rows or not target:
                self._scatter(self.chunk[run], pair, self.start[run], data)
            elif self.start[run] < stop and start < self.start[run] + len(data):
                copy_rows(data, start - self.start[run], row, rows, step, target, target_step)

    def _scatter(self, chunk: int, pair: int, start: int, data: memoryview) -> None:
        """Copy elements that have no address, or no equal distances."""
        tensor = int(self.tensor[chunk])
        ndim, itemsize = int(self.columns.ndim[tensor]), self.itemsize[tensor]
        shape, origin = unpad(self.columns.size[chunk], ndim), unpad(self.columns.offset[chunk], ndim)
        box = Box(unpad(self.plan.pairs.offset[pair], ndim), unpad(self.plan.pairs.size[pair], ndim))
        inner, row = box.relative_to(origin), self.wanted[pair]
        outer = self.table.boxes[row]
        # Blocks contain whole elements: multiples of 16 bytes, whole rows, or the whole chunk.
        low, high = start // itemsize, (start + len(data)) // itemsize
        done = 0
        for part in from_flat_range(shape, low, high):
            piece = data[done : done + part.volume * itemsize]
            done += len(piece)
            common = part.intersect(inner) if shape else part
            if common is None:
                continue
            place = Box(tuple(a + b for a, b in zip(common.offset, origin, strict=True)), common.shape)
            self.table.memory[row].scatter(
                place.relative_to(outer.offset), piece, part.shape, common.relative_to(part.offset)
            )


def copy_rows(
    data: memoryview, start: int, row: int, rows: int, step: int, target: int, target_step: int
) -> None:
    """Copy `rows` rows of `row` bytes from `data`, a part of a chunk, to the address `target`.

    start: of the first row, relative to `data`. The first and the last row may be only partly in `data`.
    """
    number = max(-start // step, 0) if rows > 1 else 0
    while number < rows and (low := start + number * step) < len(data):
        count = min((len(data) - low - row) // step + 1, rows - number) if low >= 0 else 0
        # Not a whole row: copy the part of it that is in `data`.
        begin, size = (low, row) if count > 0 else (max(low, 0), min(low + row, len(data)) - max(low, 0))
        count = max(count, 1)
        if size > 0:
            into = target + number * target_step + begin - low
            memory = (ctypes.c_ubyte * ((count - 1) * target_step + size)).from_address(into)
            strided = np.ndarray((count, size), np.uint8, memoryview(memory), 0, (target_step, 1))
            strided[:] = np.ndarray((count, size), np.uint8, data, begin, (step, 1))
        number += count


def read_into(
    store: Store, table: ShardTable, columns: Columns, plan: ReadPlan, threads: int, progress: ReportBytes
) -> int:
    """Execute a plan; return the number of bytes read from data files."""
    return _Job(store, table, columns, plan, progress).run(threads)
