"""Write one rank's data files: stream, hash and sync. No torch, so the writer process can do it.

Bytes go from their memory to the file in batches that are small enough to be hashed and written while in
cache. A file is `header | chunks | embedded index`. The header's content is known in advance. Only the
digests are not, and they are in the embedded index at the end, so a file is written from front to back.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import compress
from operator import ne
from typing import NamedTuple

import numpy as np

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.options import Options
from holdfast._core.base.values import Message
from holdfast._core.format.columns import Array, Columns, expand_ranges, unpad
from holdfast._core.format.container import encode_header
from holdfast._core.format.digest import block_counts, digest, digest_many
from holdfast._core.format.index_layout import lay_out
from holdfast._core.format.names import (
    DATA,
    EMBEDDED,
    FORMAT,
    WrittenFile,
    data_file,
    name_of_chunk,
    split_reference,
)
from holdfast._core.io.host_memory import ReportBytes
from holdfast._core.io.references import by_folder, release
from holdfast._core.io.stream import ChunkSource, stream_chunks
from holdfast._core.io.unchanged import Earlier, Linked, all_changed, link_unchanged
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.plan.merge import reordered
from holdfast._core.plan.shard_table import PlannedRows, SavePlan, ShardTable
from holdfast._core.store.base import Store, Writer, bounded, capabilities, create_sized

CHUNKS_PER_FILE = 200_000
"""Limit of chunks, so that the header stays below DATA_HEADER_BYTES with names of up to 400 bytes."""
DISCARDED_WITHIN = 20.0
"""Seconds for the requests that delete a rank's files after a failure."""


About = Message
"""Metadata of a data file: attempt, step, grid, notes, ranks. JSON values."""
Witnessed = dict[tuple[int, bytes], tuple[int, int]]
"""(block, digest) of witnesses, by `witness_key`."""
Indexes = dict[str, tuple[bytes, Columns]]
"""The embedded index of each data file, by file name: as encoded bytes and as columns."""


def split_files(plan: SavePlan, options: Options) -> list[tuple[int, int]]:
    """Return the rows (start, stop) of each file: consecutive chunks up to `max_file_bytes`, at least one,
    and not more than a header can list. Every rank has a file, because a rank without chunks still reports
    names and witnesses."""
    nbytes, limit = plan.chunks.nbytes, options.max_file_bytes
    ends = nbytes.cumsum()
    cuts, start = [], 0
    while start < len(nbytes):
        before = int(ends[start - 1]) if start else 0
        # A chunk that exceeds the limit gets its own file, because a chunk is never split over files.
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        stop = min(stop, start + CHUNKS_PER_FILE)
        cuts.append((start, stop))
        start = stop
    return cuts or [(0, 0)]


class WriteRequest(NamedTuple):
    """The arguments of one rank's write."""

    store: Store
    table: ShardTable
    plan: SavePlan
    about: About
    """Metadata of the files: attempt, step, grid, notes, ranks."""
    options: Options
    progress: ReportBytes
    witnessed: Witnessed = {}  # noqa: RUF012 (never changed)
    """Digests that are already computed, of shards that other ranks write."""
    only: int | None = None
    """Number of the only file to write; None for all."""
    earlier: Earlier | None = None
    """The earlier save; chunks that have not changed since are linked to its files."""
    indexes: Indexes | None = None
    """Receives the embedded index of each file."""


def write_files(request: WriteRequest) -> list[WrittenFile]:
    """Write all files of the plan. On failure no file remains."""
    store, attempt, linked = request.store, request.about["attempt"], all_changed(request.plan)
    # With `only`, the bytes of other files are not in memory, and can't be compared.
    if request.earlier is not None and request.only is None:
        plan, linked = link_unchanged(
            store, request.table, request.plan, request.earlier, attempt, request.options, request.progress
        )
        request = request._replace(plan=plan)
    plan = request.plan
    cuts = split_files(plan, request.options)
    files: list[WrittenFile] = []
    for part, (start, stop) in enumerate(cuts):
        if request.only not in (None, part):
            continue
        writer = None
        try:
            name = data_file(attempt, request.table.rank, part)
            chunks = PlannedRows(*(column[start:stop] for column in plan.chunks))
            writer = create_sized(store, name, int(chunks.nbytes.sum()))
            # The first file's index lists all links, so that each is listed once.
            links = linked if part == 0 else all_changed(plan)
            files.append(_write_file(writer, request, chunks, links, name, (part, len(cuts))))
            writer.finish()
        except BaseException:
            if writer is not None:
                writer.discard()
            discard(store, [*names_of(files), *linked.names], (attempt, request.table.rank))
            raise
    return files


def names_of(files: list[WrittenFile]) -> list[str]:
    """Return the names of a rank's files, and of their links and references."""
    return [name for file in files for name in (file.name, *file.links)]


def discard(store: Store, names: list[str], claimed: tuple[str, int] | None = None) -> None:
    """Delete this rank's files of a failed save, and their folder if it is then empty. Never raises.

    claimed: the attempt and the rank that refer to files of earlier steps, if there are such names.
    """
    # The deadline of the save may have passed.
    store = bounded(store, Deadline(DISCARDED_WITHIN))
    if claimed is not None:
        release(store, by_folder(names), *claimed)
    for name in names:
        if not split_reference(name):
            with suppress(Exception):
                store.delete(name)
    with suppress(Exception):
        store.child(DATA).remove()  # not `delete`: a foreign file or link may have that name


def _write_file(
    writer: Writer,
    request: WriteRequest,
    chunks: PlannedRows,
    linked: Linked,
    name: str,
    number: tuple[int, int],
) -> WrittenFile:
    """Write one data file. linked: chunks in linked files, which the embedded index also lists. number:
    (number of this file, number of files).

    `chunks`, `starts`, `digests` and `sums` are in file order (widest elements first, see `plan_save`),
    followed by the linked chunks. `named` additionally has the chunks of tied rows; `source` gives, for each
    chunk of `named`, the number of the chunk whose bytes it shares. `columns` are in index order (by name and
    offset); `order` is the permutation from file order.
    """
    table, plan, (part, parts) = request.table, request.plan, number
    about = request.about | {"rank": table.rank, "part": part, "parts": parts}
    first = part == 0
    named, source = _with_tied(
        table, PlannedRows(*map(np.concatenate, zip(chunks, linked.chunks, strict=True)))
    )
    columns, order = embedded_columns(table, plan, named, name, first)
    columns.shared = len(source) > len(chunks.row) + len(linked.chunks.row)
    source = source[order]
    columns.file[:] = np.concatenate([np.zeros(len(chunks.row), "<i4"), linked.file + 1])[source]
    columns.file_names = [name, *linked.names]
    columns.file_rank = np.full(len(columns.file_names), table.rank, "<i4")
    columns.file_size = np.asarray([0, *linked.sizes], "<i8")
    # With a deferred offset the index of an element, and so its weight, is not known yet.
    if request.options.fingerprint and not any(table.deferred):
        columns.fingerprint_first = np.zeros(len(order), "<u8")
        columns.fingerprint_second = np.zeros(len(order), "<u8")
    # All positions depend on the size of the index, so it is laid out before they are filled in.
    embedded = lay_out(columns, about)
    header = encode_header(
        _entries(table, chunks, embedded.nbytes), {"format": FORMAT, "rank": str(table.rank)}
    )
    starts = len(header) + chunks.nbytes.cumsum() - chunks.nbytes
    index_start = len(header) + int(chunks.nbytes.sum())
    columns.position[:] = np.concatenate([starts, linked.position])[source]
    columns.file_size[0] = index_start + embedded.nbytes

    writer.write_at(0, [header])
    if linked.names:
        request.progress(int(linked.chunks.nbytes.sum()))
    sums = np.zeros((len(chunks.row), 2), np.uint64) if len(columns.fingerprint_first) else None
    threads, progress = request.options.writer_threads, request.progress
    in_turns = not capabilities(request.store).any_order
    digests = stream_chunks(writer, table, chunks, starts, threads, progress, sums, in_turns)
    if sums is not None:
        columns.fingerprint_first[:], columns.fingerprint_second[:] = np.concatenate([sums, linked.sums])[
            source
        ].T
    digests, written = np.concatenate([digests, linked.digests]), len(chunks.row) + len(linked.chunks.row)
    counts = block_counts(named.nbytes[:written], named.block[:written])
    columns.digests[:] = reordered(digests, counts, source)
    if first:
        _fill_witnesses(columns, table, plan, request.witnessed, request.progress)
    sealed = embedded.sealed()
    writer.write_at(index_start, [sealed])
    if request.indexes is not None:
        request.indexes[name] = (sealed, columns)
    end = index_start + embedded.nbytes
    return WrittenFile(name, end, index_start, embedded.nbytes, tuple(linked.names))


def _with_tied(table: ShardTable, chunks: PlannedRows) -> tuple[PlannedRows, Array]:
    """Add the chunks of tied rows, which share the bytes of other chunks. Also return, for each chunk, the
    number of the chunk that has its bytes."""
    source = np.arange(len(chunks.row))
    if not table.tied:
        return chunks, source
    row, first = np.asarray([*table.tied.items()], np.int64).T
    order = np.argsort(chunks.row, kind="stable")
    low, high = (np.searchsorted(chunks.row[order], first, side) for side in ("left", "right"))
    of = order[expand_ranges(low, high - low)]
    added = PlannedRows(*(column[of] for column in chunks))._replace(row=row.repeat(high - low))
    return PlannedRows(*map(np.concatenate, zip(chunks, added, strict=True))), np.concatenate([source, of])


def embedded_columns(
    table: ShardTable, plan: SavePlan, chunks: PlannedRows, name: str, first: bool
) -> tuple[Columns, Array]:
    """Return the embedded index without positions and digests, and the order of the chunks in it."""
    arrays = table.arrays()
    is_listed = np.zeros(len(table), bool)
    is_listed[chunks.row] = True
    if first:
        # Also list the tensors that this rank witnesses, and those with an empty shard here: the commit
        # compares their shapes, and an empty shard has neither chunk nor witness.
        is_listed[plan.witnesses.row] = True
        is_listed |= arrays.nbytes == 0
    listed = is_listed.nonzero()[0]
    # Python sorts text several times as fast as NumPy does.
    text = [table.specs[row].name for row in listed.tolist()]
    by_name = sorted(range(len(text)), key=text.__getitem__)
    in_order = [text[index] for index in by_name]
    # The first of several rows of a tensor represents it.
    is_new = np.fromiter(map(ne, in_order, [None, *in_order]), bool, len(in_order))
    tensor_of_row = np.full(len(table), -1, np.int64)
    tensor_of_row[listed[by_name]] = is_new.cumsum() - 1
    sorted_names, rows = [*compress(in_order, is_new)], listed[by_name][is_new]
    tensor = tensor_of_row[chunks.row]
    # By tensor, then by offset, as in any index; in the file, chunks are ordered by the width of elements.
    order = np.lexsort((*chunks.offset.T[::-1], tensor))
    counts = np.bincount(tensor, minlength=len(rows))
    blocks = block_counts(chunks.nbytes, chunks.block)
    witnesses = plan.witnesses if first else PlannedRows(*(column[:0] for column in plan.witnesses))
    late_of_row, late = _deferred_rows(table, (tensor_of_row >= 0).nonzero()[0])
    columns = Columns(
        names=sorted_names,
        dtype=arrays.dtype[rows],
        kind=arrays.kind[rows],
        ndim=arrays.ndim[rows],
        shape=arrays.shape[rows].astype("<i8"),
        chunk_end=counts.cumsum(dtype="<i8"),
        offset=chunks.offset[order].astype("<i8"),
        size=chunks.size[order].astype("<i8"),
        file=np.zeros(len(order), "<i4"),
        position=np.zeros(len(order), "<i8"),
        block=chunks.block[order].astype("<i8"),
        digest_end=blocks[order].cumsum(dtype="<i8"),
        digests=np.zeros(int(blocks.sum()), "<u8"),
        file_names=[name],
        file_size=np.zeros(1, "<i8"),
        file_rank=np.asarray([table.rank], "<i4"),
        witness_tensor=tensor_of_row[witnesses.row].astype("<i8"),
        witness_offset=witnesses.offset.astype("<i8"),
        witness_size=witnesses.size.astype("<i8"),
        witness_block=np.zeros(len(witnesses.row), "<i8"),
        witness_digest=np.zeros(len(witnesses.row), "<u8"),
        late_tensor=tensor_of_row[late[:, 0]],
        late_axis=late[:, 1],
        late_lane=late[:, 2],
        late_position=late[:, 3],
        late_length=late[:, 4],
        late_start=late[:, 5],
        chunk_late=late_of_row[chunks.row][order],
        witness_late=late_of_row[witnesses.row],
    )
    return columns, order


def _deferred_rows(table: ShardTable, rows: Array) -> tuple[Array, Array]:
    """Return for every row of the shard table its index among the deferred rows, or -1; and the deferred rows
    of `rows`, each as (row, *DeferredOffset)."""
    late = [
        (row, *offset)
        for row in (rows.tolist() if any(table.deferred) else ())
        if (offset := table.deferred[row]) is not None
    ]
    deferred = np.asarray(late, "<i8").reshape(-1, 6)
    number = np.full(len(table), -1, "<i8")
    number[deferred[:, 0]] = np.arange(len(deferred))
    return number, deferred


def _entries(
    table: ShardTable, chunks: PlannedRows, embedded: int
) -> list[tuple[str, str, tuple[int, ...], int, int]]:
    """Return the header's rows. A chunk that is a whole tensor has the tensor's name."""
    specs = [table.specs[row] for row in chunks.row.tolist()]
    names, shapes = [spec.name for spec in specs], [spec.shape for spec in specs]
    is_part = (chunks.size != table.arrays().shape[chunks.row]).any(axis=1)
    for index in is_part.nonzero()[0].tolist():
        late, ndim = table.deferred[chunks.row[index]], len(shapes[index])
        shapes[index] = unpad(chunks.size[index], ndim)
        begin: list[int | str] = [*unpad(chunks.offset[index], ndim)]
        if late is not None and late.start == -1:
            begin[late.axis] = f"?{begin[late.axis]}"  # relative to the start of the shard
        names[index] = name_of_chunk(names[index], begin)
    dtypes = [DTYPES[spec.dtype] for spec in specs]
    tags = [dtype.tag for dtype in dtypes]
    shapes = [
        shape if dtype.extra == 1 else (*shape, dtype.extra)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    names, tags, shapes = [*_distinct(names), EMBEDDED], [*tags, "U8"], [*shapes, (embedded,)]
    ends = np.concatenate([[0], chunks.nbytes, [embedded]]).cumsum().tolist()
    return [*zip(names, tags, shapes, ends, ends[1:], strict=False)]


def _distinct(names: list[str]) -> list[str]:
    """Make the names distinct: the name of a tensor may equal that of a part of another one (`w@0,4`)."""
    taken = {EMBEDDED, "__metadata__"}
    if len(taken.union(names)) == len(taken) + len(names):
        return names
    for index, name in enumerate(names):
        while name in taken:
            name += "'"
        taken.add(name)
        names[index] = name
    return names


def _fill_witnesses(
    columns: Columns, table: ShardTable, plan: SavePlan, witnessed: Witnessed, progress: ReportBytes
) -> None:
    for index in range(len(plan.witnesses.row)):
        # An asynchronous save digests them when it copies, because the writer process has no copy of them.
        known = witnessed.get(witness_key(plan, index))
        columns.witness_block[index], columns.witness_digest[index] = known or witness(table, plan, index)
        if index % 64 == 0:
            progress(0)  # digesting moves no bytes, but the rank is not stalled


def witness_key(plan: SavePlan, index: int) -> tuple[int, bytes]:
    """Return the key of a witness of a plan: its row and its offset."""
    return int(plan.witnesses.row[index]), plan.witnesses.offset[index].tobytes()


def witness(table: ShardTable, plan: SavePlan, index: int) -> tuple[int, int]:
    """Digest a box that another rank writes. Return (-1, the digest of all digests), or (block, its digest).

    By default one block is compared. Its number is computed from the offset, so all ranks choose the same.
    """
    seen = plan.witnesses
    count = int(block_counts(seen.nbytes[index : index + 1], seen.block[index : index + 1])[0])
    source = ChunkSource(table, seen, index, int(seen.nbytes[index]), int(seen.block[index]))
    if plan.witness_full[index]:
        blocks = [digest(source.one_block(number)) for number in range(count)]
        return -1, digest_many(np.asarray(blocks, "<u8"))
    wanted = digest(seen.offset[index].tobytes()) % count
    return wanted, digest(source.one_block(wanted))
