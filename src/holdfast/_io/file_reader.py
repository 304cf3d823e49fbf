"""Read the boxes that a rank wants directly into their targets, and verify every byte.

A block that is contiguous in both file and target is read into the target, and hashed there while it is in
cache. Any other block with wanted bytes is read into a scratch buffer and hashed; then its wanted part is
copied. Blocks without wanted bytes are not read.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from holdfast._format.columns import Array, Columns, unpad
from holdfast._format.digest import digest
from holdfast._io.host_memory import BATCH, BATCH_BUFFERS, ReportBytes, ScratchBuffer, even_ranges
from holdfast._io.on_threads import on_threads
from holdfast._layout.box import Box, from_flat_range
from holdfast._layout.coverage import first_problem
from holdfast._plan.read import Overlaps, overlaps, touched_blocks
from holdfast._plan.shard_table import ShardTable, contiguous_at
from holdfast._store.base import Reader, Store
from holdfast._values import Buffer
from holdfast.errors import CorruptCheckpoint, MissingTensors


class ReadPlan(NamedTuple):
    """The pairs of boxes to copy, and the number of bytes."""

    pairs: Overlaps
    bytes_needed: int


def plan_read(
    table: ShardTable, rows: Array, columns: Columns, where: str, fetched_for: str = ""
) -> ReadPlan:
    """Plan which chunks fill which rows of the shard table.

    rows: the tensor in `columns` of each row. fetched_for: the ranks that a slice was fetched for; "" if the
    checkpoint is complete.

    CorruptCheckpoint if the chunks of a tensor do not tile it exactly once; MissingTensors if a slice does
    not hold all of a row.
    """
    arrays = table.arrays()
    dims = max(arrays.dims, columns.dims)
    offset, size = _widen(columns.offset, dims, 0), _widen(columns.size, dims, 1)
    origin, wanted = _widen(arrays.offset, dims, 0), _widen(arrays.size, dims, 1)
    tensor = columns.tensor_of_chunk()
    # Before any byte is read. Chunks that tile a tensor exactly once fill every element of a target, so no
    # old element remains.
    problem = None if fetched_for else first_problem(_widen(columns.shape, dims, 1), tensor, offset, size)
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
                f"{where} was fetched for {fetched_for}, and does not hold all of {name!r} that rank "
                f"{table.rank} asks for.",
                hint="Fetch for this rank, with the grid that it runs in, or load from the whole folder.",
                details={"missing": [name]},
            )
    return ReadPlan(pairs, int((np.prod(pairs.size, axis=1) * arrays.itemsize[pairs.wanted]).sum()))


def _widen(values: Array, dims: int, fill: int) -> Array:
    missing = dims - values.shape[1]
    return np.pad(values, ((0, 0), (missing, 0)), constant_values=fill) if missing else values


class _Run(NamedTuple):
    """Consecutive digest blocks of a chunk, to be read at once."""

    position: int
    length: int
    buffer: Buffer | None
    """The target's own memory; None: the bytes go through a scratch buffer."""
    chunk: int
    start: int
    """Bytes from the start of the chunk; a multiple of its block."""


@dataclass
class _Job:
    """One execution of a read plan: the state that its threads share."""

    store: Store
    table: ShardTable
    columns: Columns
    plan: ReadPlan
    progress: ReportBytes
    asked: tuple[int, tuple[tuple[int, ...], Box, int]] | None = None

    def run(self, threads: int) -> int:
        """Read everything; return the number of bytes read from data files."""
        columns, pairs = self.columns, self.plan.pairs
        if not len(pairs.chunk):
            return 0
        # `overlaps` orders pairs by chunk, so those of one chunk are consecutive: [first, last).
        chunks, first = np.unique(pairs.chunk, return_index=True)
        self.first = dict(zip(chunks.tolist(), first.tolist(), strict=True))
        self.last = dict(zip(chunks.tolist(), [*first[1:].tolist(), len(pairs.chunk)], strict=True))
        self.tensor = columns.tensor_of_chunk()
        self.nbytes = columns.chunk_bytes()
        # Lists, because the loops below read single items, for each of which NumPy would create an object.
        self.itemsize: list[int] = columns.itemsizes().tolist()
        self.digest_start = np.concatenate([[0], columns.digest_end[:-1]])
        self.lock = threading.Lock()
        self.digests: list[int] = columns.digests.tolist()
        self.block: list[int] = columns.block.tolist()
        self.simple = self._find_simple(chunks, first)
        # By file, then by position, so that neighbours are read at once (lexsort's last key is its first).
        order = chunks[np.lexsort((columns.position[chunks], columns.file[chunks]))]
        done = 0
        # Not by `np.unique`, which would import numpy.ma: a fifth of the start of `holdfast inspect`.
        for file in sorted(set(columns.file[order].tolist())):
            mine = order[columns.file[order] == file]
            name = columns.file_names[file]
            with closing(self.store.open(name)) as reader:
                # Before any of its bytes are read into a target.
                if reader.size != int(columns.file_size[file]):
                    raise CorruptCheckpoint(
                        f"{self.store.url}/{name} has {reader.size} bytes, but was written with "
                        f"{int(columns.file_size[file])}: it is truncated or replaced.",
                        details={"file": name},
                    )
                done += self._file(reader, name, mine, threads)
        return done

    def _find_simple(self, chunks: Array, first: Array) -> dict[int, _Run]:
        """Find the chunks that fill one contiguous piece of one target: nearly all chunks if the layout is
        that of the save, or is cut along the first axis. The test is vectorized."""
        columns, pairs, arrays = self.columns, self.plan.pairs, self.table.arrays()
        nbytes, wanted = self.nbytes[chunks], pairs.wanted[first]
        itemsize = arrays.itemsize[wanted]
        dims = pairs.size.shape[1]
        outer, origin = _widen(arrays.size, dims, 1)[wanted], _widen(arrays.offset, dims, 0)[wanted]
        alone = np.diff(np.append(first, len(pairs.chunk))) == 1
        whole_chunk = np.prod(pairs.size[first], axis=1) * itemsize == nbytes
        together, start = _contiguous(outer, pairs.offset[first] - origin, pairs.size[first])
        # Larger chunks go through `_runs`, which cuts them into batches.
        rows = np.flatnonzero(alone & whole_chunk & together & (nbytes <= BATCH))
        memory = self.table.memory
        return {
            chunk: _Run(
                position,
                size,
                (ctypes.c_ubyte * size).from_address(memory[target].address + offset),
                chunk,
                0,
            )
            for chunk, position, size, target, offset in zip(
                chunks[rows].tolist(),
                columns.position[chunks[rows]].tolist(),
                nbytes[rows].tolist(),
                wanted[rows].tolist(),
                (start * itemsize)[rows].tolist(),
                strict=True,
            )
            # Without an address (on a GPU, not row-major, another dtype) bytes go through a scratch buffer.
            if memory[target].address
        }

    def _file(self, reader: Reader, name: str, chunks: Array, threads: int) -> int:
        if threads == 1 or len(chunks) < 2:
            return self._some(reader, name, chunks)
        parts = [chunks[low:high] for low, high in even_ranges(self.nbytes[chunks], threads)]
        return sum(on_threads(threads, "holdfast-read", lambda part: self._some(reader, name, part), parts))

    def _some(self, reader: Reader, name: str, chunks: Array) -> int:
        """Read chunks of one file in order, in batches of neighbouring blocks."""
        batch: list[_Run] = []
        scratch = ScratchBuffer()
        size, total = 0, 0
        for chunk in chunks.tolist():
            simple = self.simple.get(chunk)
            for run in (simple,) if simple is not None else self._runs(chunk):
                # A batch is one system call, so it has no gaps, and fewer buffers than IOV_MAX.
                if batch and (
                    size + run.length > BATCH
                    or len(batch) >= BATCH_BUFFERS
                    or batch[-1].position + batch[-1].length != run.position
                ):
                    total += self._flush(reader, name, batch, scratch)
                    batch, size = [], 0
                batch.append(run)
                size += run.length
        return total + (self._flush(reader, name, batch, scratch) if batch else 0)

    def _runs(self, chunk: int) -> Iterator[_Run]:
        """Yield the blocks of a chunk that hold wanted bytes, in runs that are read and copied as one."""
        position, block = int(self.columns.position[chunk]), self.block[chunk]
        nbytes = int(self.nbytes[chunk])
        first, last = self.first[chunk], self.last[chunk]
        # With several targets, more than one may want parts of a block, so only a single one is read into.
        target = self._direct(chunk, first) if last - first == 1 else None
        touched = [touched_blocks(*self._relative(chunk, pair), block) for pair in range(first, last)]
        numbers = touched[0] if last - first == 1 else np.unique(np.concatenate(touched))
        starts = numbers * block
        stops = np.minimum(starts + block, nbytes)
        inside = np.zeros(len(starts), bool)
        if target is not None:
            # A block can be read directly only if all of it lies inside the target: its digest covers all of
            # it, and memory beside the target is not ours.
            inside = (target[1] <= starts) & (stops <= target[2])
        # A run ends where blocks are left out, or where reading changes between direct and scratch.
        apart = (starts[1:] != stops[:-1]) | (inside[1:] != inside[:-1])
        heads = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
        step = max(BATCH // block, 1) * block
        for head, end in pairwise(heads):
            for low in range(int(starts[head]), int(stops[end - 1]), step):
                length = min(step, int(stops[end - 1]) - low)
                buffer: Buffer | None = None
                if target is not None and inside[head]:
                    buffer = (ctypes.c_ubyte * length).from_address(target[0] + low - target[1])
                yield _Run(position + low, length, buffer, chunk, low)

    def _relative(self, chunk: int, pair: int) -> tuple[tuple[int, ...], Box, int]:
        """Return the chunk's shape, the common box in it, and the element size. Cached for repeated calls."""
        last = self.asked
        if last is not None and last[0] == pair:
            return last[1]
        tensor = int(self.tensor[chunk])
        ndim = int(self.columns.ndim[tensor])
        shape = unpad(self.columns.size[chunk], ndim)
        box = Box(unpad(self.plan.pairs.offset[pair], ndim), unpad(self.plan.pairs.size[pair], ndim))
        relative = shape, box.relative_to(unpad(self.columns.offset[chunk], ndim)), self.itemsize[tensor]
        self.asked = (pair, relative)
        return relative

    def _direct(self, chunk: int, pair: int) -> tuple[int, int, int] | None:
        """Return (address, start, stop): bytes [start, stop) of the chunk are contiguous in the target."""
        row = int(self.plan.pairs.wanted[pair])
        memory = self.table.memory[row]
        if not memory.address:
            return None
        shape, inner, itemsize = self._relative(chunk, pair)
        start = contiguous_at(shape, inner)
        if start is None:
            return None
        outer = self.table.boxes[row]
        ndim = len(outer.shape)
        box = Box(unpad(self.plan.pairs.offset[pair], ndim), inner.shape).relative_to(outer.offset)
        target_start = contiguous_at(outer.shape, box)
        if target_start is None:
            return None
        return memory.address + target_start * itemsize, start * itemsize, (start + inner.volume) * itemsize

    def _flush(self, reader: Reader, name: str, batch: list[_Run], scratch: ScratchBuffer) -> int:
        """Read a batch, verify every block, and copy what was read into scratch to its targets."""
        buffers: list[Buffer] = []
        staged: list[tuple[_Run, memoryview]] = []
        for run in batch:
            view = run.buffer
            if view is None:
                view = scratch.take(run.length)
                assert view is not None
                staged.append((run, view))
            buffers.append(view)
        wanted = batch[-1].position + batch[-1].length - batch[0].position
        # A direct read fills the target before the bytes are verified. If they are damaged, the load raises
        # on all ranks, and the state is partly overwritten (docs/failure-model.md).
        got = reader.read_into(batch[0].position, buffers)
        if got != wanted:
            raise CorruptCheckpoint(
                f"{self.store.url}/{name} ends {wanted - got} bytes too early: it is truncated.",
                details={"file": name},
            )
        digests = self.digests
        for run, buffer in zip(batch, buffers, strict=True):
            if not digests:  # files of other formats have none
                break
            block = self.block[run.chunk]
            digest_row = int(self.digest_start[run.chunk]) + run.start // block
            if run.length <= block:
                if digest(buffer) != digests[digest_row]:
                    raise self._damaged(run, 0, name)
                continue
            view = memoryview(buffer)
            for low in range(0, run.length, block):
                if digest(view[low : low + block]) != digests[digest_row]:
                    raise self._damaged(run, low, name)
                digest_row += 1
        # Only after the whole batch is verified.
        for run, view in staged:
            self._scatter(run.chunk, run.start, view)
        scratch.reset()
        # `progress` belongs to the caller, and may not be thread-safe.
        with self.lock:
            self.progress(wanted)
        return wanted

    def _damaged(self, run: _Run, low: int, name: str) -> CorruptCheckpoint:
        tensor = self.columns.names[int(self.tensor[run.chunk])]
        start, length = run.position + low, min(self.block[run.chunk], run.length - low)
        return CorruptCheckpoint(
            f"{self.store.url}/{name} is damaged: bytes {start} to {start + length}, part of {tensor!r}, do "
            "not match the digest they were written with.",
            hint="Load an older step, or another copy of this one; `holdfast verify` lists all damage.",
            details={"file": name, "tensor": tensor, "position": start},
        )

    def _scatter(self, chunk: int, start: int, data: memoryview) -> None:
        """Copy the wanted parts of verified bytes of a chunk into their targets."""
        for pair in range(self.first[chunk], self.last[chunk]):
            shape, inner, itemsize = self._relative(chunk, pair)
            row = int(self.plan.pairs.wanted[pair])
            outer = self.table.boxes[row]
            origin = unpad(self.columns.offset[chunk], len(shape))
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


def _contiguous(shape: Array, offset: Array, size: Array) -> tuple[Array, Array]:
    """Return per row whether the box is contiguous in a row-major tensor of `shape`, and its first element.

    It is contiguous if every axis either has a single index or is followed by whole axes only.
    """
    full = (size == shape)[:, ::-1]
    after = np.ones_like(full)
    after[:, 1:] = np.logical_and.accumulate(full, axis=1)[:, :-1]
    stride = np.ones_like(shape)
    stride[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return (after[:, ::-1] | (size == 1)).all(axis=1), (offset * stride).sum(axis=1)


def read_into(
    store: Store, table: ShardTable, columns: Columns, plan: ReadPlan, threads: int, progress: ReportBytes
) -> int:
    """Execute a plan; return the number of bytes read from data files."""
    return _Job(store, table, columns, plan, progress).run(threads)
