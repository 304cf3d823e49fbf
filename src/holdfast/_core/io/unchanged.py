"""Find the chunks that are unchanged since the last save, and link its files into the new step.

A chunk is unchanged if the digests of all its blocks are. The new step gets a hard link to the file that
holds the chunk, so every step's folder is complete by itself, and readers need no special case. An object
store has no links: there the new step refers to the file (`references`). The digests of the last save are
read from the embedded indexes of its files; only the names of these files are kept in memory
(docs/decisions/0028-unchanged-bytes-are-linked.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from contextlib import closing, suppress
from typing import NamedTuple, cast

import numpy as np

from holdfast._core.base.options import Options
from holdfast._core.format.columns import Array, Columns, counts_of, expand_ranges
from holdfast._core.format.container import read_header
from holdfast._core.format.digest import digest
from holdfast._core.format.names import (
    DATA,
    EMBEDDED,
    WrittenFile,
    data_file,
    is_data_file,
    linked_file,
    reference,
    split_reference,
)
from holdfast._core.io.host_memory import ReportBytes, even_ranges
from holdfast._core.io.index_file import embedded_index
from holdfast._core.io.on_threads import on_threads
from holdfast._core.io.references import by_folder, can_refer, claim_files, name_of_folder, release
from holdfast._core.io.spot_check import blocks_of, spot_check
from holdfast._core.io.stream import ChunkSource, simple_addresses
from holdfast._core.plan.agreement import box_keys
from holdfast._core.plan.blocks import widen
from holdfast._core.plan.shard_table import PlannedRows, SavePlan, ShardTable
from holdfast._core.store.base import Kind, LinkingStore, Store, capabilities, parent
from holdfast._core.store.local import LocalReader, open_local
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import HoldfastError, StorageError

log = logging.getLogger("holdfast")
LINKS = 16
"""Maximum number of files that a rank links. A load has to open each, so chunks of further files are written
again."""
RUNS = 1024
"""Maximum number of (run, rank) pairs whose last save is remembered: folders whose names differ in other
numbers than step numbers count as separate runs."""
_STEP = re.compile(
    r"(?i)(?P<word>(?:step|iter|iteration|epoch)s?[-_=]?|(?:checkpoint|ckpt)[-_=]|/(?=[0-9]+\Z))[0-9]+"
)
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*\Z)")


class Earlier(NamedTuple):
    """The last committed save of a rank into a run."""

    folder: str
    """URL of the step's folder."""
    files: list[WrittenFile]
    """The files that the rank wrote, in order."""
    turn: int = 0
    """Number of earlier saves of this run in this process."""


_last: dict[tuple[str, int], Earlier] = {}


def remember(store: Store, rank: int, files: list[WrittenFile]) -> None:
    """Record a committed save, for the next one of the same run in this process."""
    before = _last.get(key := (_run_of(store), rank))
    _last[key] = Earlier(store.url, files, 0 if before is None else before.turn + 1)
    while len(_last) > RUNS:
        _last.pop(next(iter(_last)), None)


def remember_loaded(store: Store, rank: int, attempt: object) -> None:
    """Record the files that a rank wrote of a loaded step, if any, for the next save of the same run.
    attempt: that in the step's index."""
    files: list[WrittenFile] = []
    with suppress(HoldfastError):  # usually NotFound, after the last file
        while is_data_file(name := data_file(str(attempt), rank, len(files))):
            with closing(store.open(name)) as reader:
                header = read_header(reader.read, reader.size, name)
            if EMBEDDED not in header.entries:
                break
            start, stop = (header.data_start + offset for offset in header.entries[EMBEDDED].data_offsets)
            files.append(WrittenFile(name, stop, start, stop - start))
    if files:
        remember(store, rank, files)


def forget(store: Store, rank: int) -> None:
    """Forget the last save of this run, because a step is damaged: other steps may share its files, so the
    next save writes everything."""
    _last.pop((_run_of(store), rank), None)


def recall(store: Store, rank: int) -> Earlier | None:
    """Return the last save of a step's run that this process has made or loaded."""
    return _last.get((_run_of(store), rank))


def _run_of(store: Store) -> str:
    """Return the path without step numbers (or, if it has none, without its last number), to identify the run
    of steps such as `run/step-7/part-1` or `run/global_step_7`."""
    without, found = _STEP.subn(r"\g<word>#", store.url)
    return without if found else _LAST_NUMBER.sub("#", store.url)


class Linked(NamedTuple):
    """The unchanged chunks of a plan, and the links to the files that hold them."""

    chunks: PlannedRows
    file: Array
    """For each chunk, the row of its file in `names`."""
    position: Array
    digests: Array
    """Digests of the blocks of all chunks."""
    sums: Array
    """(chunks, 2): the fingerprint of each chunk; zeros if the save computes none."""
    names: list[str]
    sizes: list[int]


def all_changed(plan: SavePlan) -> Linked:
    """Return an empty result: no chunk is linked."""
    empty = np.zeros(0, np.int64)
    none = PlannedRows(*(column[:0] for column in plan.chunks))
    return Linked(none, empty, empty, np.zeros(0, "<u8"), np.zeros((0, 2), "<u8"), [], [])


def link_unchanged(
    store: Store,
    table: ShardTable,
    plan: SavePlan,
    earlier: Earlier,
    attempt: str,
    options: Options,
    progress: ReportBytes,
) -> tuple[SavePlan, Linked]:
    """Link files of an earlier save into a step. Return the plan of the remaining writes, and the linked
    chunks.

    Nothing is linked if the earlier files are gone, or if the file system does not support links.
    """
    folder = ""
    if not capabilities(store).links:
        run, _, folder = earlier.folder.rstrip("/").rpartition("/")
        if not can_refer(store) or run != parent(store).url or not is_spelled_as_ours(folder):
            return plan, all_changed(plan)
    try:
        held = _Held(table, plan.chunks, earlier, options, store, folder)
    except HoldfastError as error:
        log.debug("%s: all is written, because of the step before: %s", store.url, error)
        return plan, all_changed(plan)
    held.compare(options.writer_threads, progress)
    if folder:
        names = held.refer(attempt)
    else:
        held.check_stored(earlier.turn, progress)
        names = held.link(cast("LinkingStore", store), attempt)
    files = sorted(names)
    is_linked = np.isin(held.file, files)
    chosen = np.flatnonzero(is_linked)
    linked = Linked(
        chunks=PlannedRows(*(column[chosen] for column in plan.chunks)),
        file=np.searchsorted(files, held.file[chosen]),
        position=held.position[chosen],
        digests=held.digests[expand_ranges(held.first[chosen], held.count[chosen])],
        sums=held.sums[chosen],
        names=[names[file] for file in files],
        sizes=[held.sizes[file] for file in files],
    )
    return plan._replace(chunks=PlannedRows(*(column[~is_linked] for column in plan.chunks))), linked


class _Held:
    """The chunks of a plan, as found in the files of an earlier save: a row for each chunk."""

    def __init__(
        self,
        table: ShardTable,
        chunks: PlannedRows,
        earlier: Earlier,
        options: Options,
        store: Store,
        folder: str,
    ) -> None:
        """Find the chunks by tensor and box. Raises a HoldfastError if an earlier file can't be read.

        store: of the new step. folder: that of the earlier step, if the new one may refer to it; "" for
            links.
        """
        rows = len(chunks.row)
        self._table, self._chunks, self._folder = table, chunks, folder
        self._step = store
        self._store = store if folder else open_local(earlier.folder, "link_unchanged")
        self.file = np.full(rows, -1, np.int64)
        """For each chunk, the number of the file that holds it unchanged; -1 if there is none."""
        self.position = np.zeros(rows, np.int64)
        self.first, self.count = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        """For each chunk, the index of its first digest, and the number of its digests."""
        self.sums = np.zeros((rows, 2), "<u8")
        self.sizes: list[int] = []
        self._paths: list[str] = []
        self._names: list[str] = []
        self._origins: list[str] = []
        """The name, without folder, under which each file was originally written."""
        digests, shared = list[Array](), False
        for written in earlier.files:
            columns = self._index(written)
            shared |= columns.shared
            chunk = np.flatnonzero((row := _rows_of(columns, table, chunks)) >= 0)
            if options.fingerprint and not len(columns.fingerprint_first):
                chunk = chunk[:0]
            row = row[chunk]
            self.file[chunk] = columns.file[row] + len(self._paths)
            self.position[chunk] = columns.position[row]
            counts = counts_of(columns.digest_end)
            self.first[chunk] = (columns.digest_end - counts)[row] + sum(map(len, digests))
            self.count[chunk] = counts[row]
            if options.fingerprint:
                self.sums[chunk, 0] = columns.fingerprint_first[row]
                self.sums[chunk, 1] = columns.fingerprint_second[row]
            digests.append(columns.digests)
            own, *links = columns.file_names
            before = own.removesuffix(".safetensors") + "-"
            self._names += map(self._name, columns.file_names)
            self._paths += [os.path.join(earlier.folder, name) for name in columns.file_names]
            self._origins += [own.removeprefix(f"{DATA}/"), *(name.removeprefix(before) for name in links)]
            self.sizes += columns.file_size.tolist()
        self.digests: Array = np.concatenate(digests)
        if shared:  # tensors that are not tied any more: only one of them keeps these bytes
            _, one = np.unique(np.stack([self.file, self.position]), axis=1, return_index=True)
            self.file[np.isin(np.arange(rows), one, invert=True)] = -1

    def _name(self, name: str) -> str:
        """Return the name of a file of the earlier step, as `_store` opens it."""
        return name if not self._folder or split_reference(name) else reference(self._folder, name)

    def _index(self, written: WrittenFile) -> Columns:
        with closing(self._store.open(self._name(written.name))) as reader:
            stop = written.index_start + written.index_size
            return embedded_index(
                reader, written.index_start, stop, f"{self._store.url}/{written.name}"
            ).embedded()

    def compare(self, threads: int, progress: ReportBytes) -> None:
        """Compare digests with the present bytes; set `file` to -1 where they differ."""
        chunks, lock = self._chunks, threading.Lock()
        found = np.flatnonzero(self.file >= 0)
        addresses = simple_addresses(self._table, chunks)
        nbytes, blocks = chunks.nbytes.tolist(), chunks.block.tolist()

        def is_same(index: int) -> bool:
            first = int(self.first[index])
            wanted = self.digests[first : first + int(self.count[index])].tolist()
            if addresses[index]:
                same: bool = (
                    digest((ctypes.c_ubyte * nbytes[index]).from_address(addresses[index])) == wanted[0]
                )
                return same
            source = ChunkSource(self._table, chunks, index, nbytes[index], blocks[index])
            # Of a changed chunk, usually only one block is read.
            return all(digest(source.one_block(number)) == value for number, value in enumerate(wanted))

        def work(part: tuple[int, int]) -> None:
            for number, index in enumerate(found[slice(*part)].tolist()):
                if not is_same(index):
                    self.file[index] = -1
                if number % 64 == 0:
                    with lock:  # `progress` belongs to the caller, and may not be thread-safe
                        progress(0)  # comparing moves no bytes, but the rank is not stalled

        if len(found):
            on_threads(threads, "holdfast-compare", work, even_ranges(chunks.nbytes[found], threads))

    def check_stored(self, turn: int, progress: ReportBytes) -> None:
        """Spot-check the files; set `file` to -1 for all chunks of a file that is damaged or can't be
        read."""
        found, chunks = np.flatnonzero(self.file >= 0), self._chunks
        places = self.file[found], self.position[found], chunks.nbytes[found], chunks.block[found]
        blocks = blocks_of(found, *places, (self.first[found], self.count[found], self.digests))
        for file, (chunk, why) in spot_check(
            blocks, turn, lambda file: cast("LocalReader", self._store.open(self._names[file])), progress
        ).items():
            if why:
                log.warning("%s can't be read back, and is not linked again: %s", self._paths[file], why)
            else:
                log.warning(
                    "%s is damaged: it holds other bytes than were written, at least in %r. This save writes "
                    "anew what it would have linked of it. Steps that share the file are damaged, too: "
                    "`holdfast verify` of the run names them.",
                    self._paths[file],
                    self._table.specs[int(chunks.row[chunk])].name,
                )
            self.file[self.file == file] = -1

    def _worth(self) -> list[int]:
        """Return the numbers of the files that hold enough unchanged bytes."""
        used = np.flatnonzero(self.file >= 0)
        live = np.bincount(self.file[used], self._chunks.nbytes[used], len(self.sizes))
        # At least half of the file, so that a step never takes more than twice its own bytes.
        return [
            file
            for file in np.argsort(-live, kind="stable")[:LINKS].tolist()
            if live[file] and 2 * live[file] >= self.sizes[file]
        ]

    def refer(self, attempt: str) -> dict[int, str]:
        """Claim the files that hold enough unchanged bytes; return the names of the references, by file
        number."""
        worth = {self._names[file]: file for file in self._worth()}
        names: dict[int, str] = {}
        for folder, files in by_folder(worth).items():
            if folder == name_of_folder(self._step):
                continue  # this save replaces that step
            numbers = {path: worth[reference(folder, path)] for path in files}
            sizes = {path: self.sizes[file] for path, file in numbers.items()}
            try:
                free = claim_files(self._step, folder, sizes, attempt, self._table.rank)
            except StorageError as error:
                log.debug("%s: what %s holds is written anew: %s", self._step.url, folder, error)
                continue
            if not free:
                release(self._step, [folder], attempt, self._table.rank)
            names |= {numbers[path]: reference(folder, path) for path in files if path in free}
        return names

    def link(self, store: LinkingStore, attempt: str) -> dict[int, str]:
        """Link the files that hold enough unchanged bytes; return the names of the links, by file number."""
        names: dict[int, str] = {}
        for file in self._worth():
            name = linked_file(attempt, self._table.rank, self._origins[file])
            try:
                store.link(name, self._paths[file])
                if (entry := store.stat(name)) is None or entry[:2] != (Kind.FILE, self.sizes[file]):
                    raise StorageError(f"{self._paths[file]} is not as it was written.")
            except StorageError as error:
                log.debug("%s: its bytes are written anew: %s", name, error)
                with suppress(StorageError):
                    store.delete(name)
                continue
            names[file] = name
        return names


def _rows_of(columns: Columns, table: ShardTable, chunks: PlannedRows) -> Array:
    """Return, for each planned chunk, the row of the chunk in an index with the same tensor, box and block
    size; -1 if there is none."""
    none = np.full(len(chunks.row), -1, np.int64)
    if not len(columns.file) or not len(none):
        return none
    place = {spec: row for row, spec in enumerate(columns.specs())}
    # Before its offset is known, a deferred box does not identify a shard.
    late = [offset is not None and offset.start == -1 for offset in table.deferred]
    tensor = np.where(late, -1, [place.get(spec, -1) for spec in table.specs])
    dims = max(columns.dims, chunks.offset.shape[1])
    offset, size = widen(chunks.offset, dims, 0), widen(chunks.size, dims, 1)
    theirs = widen(columns.offset, dims, 0), widen(columns.size, dims, 1)
    keys = box_keys(columns.tensor_of_chunk(), *theirs)
    order = np.argsort(keys)
    wanted = box_keys(tensor[chunks.row], offset, size)
    row = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    is_same = (
        (columns.tensor_of_chunk()[row] == tensor[chunks.row])
        & (theirs[0][row] == offset).all(axis=1)
        & (theirs[1][row] == size).all(axis=1)
        & (columns.block[row] == chunks.block)
    )
    return np.where(is_same, row, -1)
