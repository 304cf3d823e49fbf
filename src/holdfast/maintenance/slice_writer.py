"""Copy what ranks need of a source into a folder, which a load reads as a slice.

Boxes are read with the reader of a load, which verifies the digests of a checkpoint, and written as data
files with digests of their own. A file gets its name once it is whole, and the slice's index is written last.
So an interrupted copy can't be loaded, and the same fetch continues it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import BadInput, CorruptCheckpoint
from holdfast.format import hugging_face as hf
from holdfast.format.columns import ITEMSIZE, Array, Columns
from holdfast.format.digest import digest, hex_digest
from holdfast.format.index import Index, encode
from holdfast.format.names import CONFIG, DATA, SLICE, data_file, is_fetched, name_of_fetch
from holdfast.format.slice import ABOUT, PUBLISHED, Origin, read_origin
from holdfast.io.file_reader import plan_read, read_into
from holdfast.io.file_writer import WriteRequest, write_files
from holdfast.io.host_memory import HostMemory
from holdfast.io.open_checkpoint import open_source
from holdfast.io.small_files import read_file
from holdfast.io.source import Source
from holdfast.layout.box import Box, cut
from holdfast.layout.tensor import TensorSpec
from holdfast.maintenance.reindex import WholeFile, look
from holdfast.options import Options
from holdfast.plan.merge import Merger
from holdfast.plan.save import plan_save
from holdfast.plan.shard_table import ShardTable
from holdfast.store.base import Store, replace_file, storage_errors
from holdfast.store.filesystem import sync_folder
from holdfast.store.local import LocalStore, LocalWriter
from holdfast.views.needs import Needs

FILE_BYTES = 256 << 20
"""Bytes of elements per file of a slice; a file is in memory while it is made."""
MOST_PIECES = 50_000
"""Pieces per file, at most."""
_ALIGN = 64
_THREADS = 4
_OPTIONS = Options(check_replicas="off", max_file_bytes=1 << 62)
Piece = tuple[TensorSpec, Box]
"""A box that is written as one chunk."""


class Fetched(NamedTuple):
    """What is fetched, from which source."""

    kind: str
    ranks: str
    grid: str
    columns: Columns
    """Rows of the whole source."""
    specs: dict[str, TensorSpec]
    needs: Needs


class SliceWriter:
    """One fetch. progress: called with the bytes done and the bytes in all."""

    def __init__(
        self,
        store: Store,
        opened: Source,
        out: LocalStore,
        what: Fetched,
        progress: Callable[[int, int], None],
    ) -> None:
        self._store, self._opened, self._out, self._what = store, opened, out, what
        self._progress = progress
        self.url = out.url
        pieces = list(_pieces(what))
        self._files = list(_batches(pieces))
        # Part of the file names, so that the same command finds its files again.
        identity = repr((opened.identity, what.kind, what.ranks, what.grid, pieces))
        self._fetch = hex_digest(digest(identity.encode()))
        self._total, self._done = sum(map(_nbytes, pieces)), 0
        self._slab: Array = np.zeros(0, np.uint8)
        self._carried = hf.carried_files(_names(store)) if what.kind == PUBLISHED else [CONFIG]

    def write(self) -> int:
        """Copy. Return the bytes of elements that were written."""
        if self._is_done():
            return 0
        written = 0
        merger = Merger()
        merger.add(0, _all_names(self._what.columns))
        for number, pieces in enumerate(self._files):
            columns, size = self._file(number, pieces)
            merger.add(0, columns)
            written += size
        self._refuse_replaced()
        for name in self._out.list(DATA):
            if name.startswith(".") and is_fetched(name, self._fetch):
                self._out.delete(f"{DATA}/{name}")
        for name in self._carried:
            data = read_file(self._store, name, hf.WEIGHTS_INDEX_BYTES)
            if data is not None:
                replace_file(self._out, name, data)
        origin = Origin(
            self._opened.identity,
            self._what.kind,
            self._store.url,
            self._what.ranks,
            self._what.grid,
            self._fetch,
        )
        about = {**self._opened.about, ABOUT: msgspec.to_builtins(origin)}
        self._out.publish(SLICE, encode(merger.finish(is_slice=True), about), None)
        return written

    def _is_done(self) -> bool:
        """Make the folder. Return whether it has all of this fetch; raise BadInput if it has another one."""
        with storage_errors("Making", self._out.url):
            os.makedirs(self._out.url, exist_ok=True)
        names = self._out.list()
        if SLICE in names:
            with closing(self._out.open(SLICE)) as reader:
                index = Index(reader.read, reader.size, f"{self._out.url}/{SLICE}")
                origin = read_origin(index.about, index.where)
            if origin.fetch == self._fetch:
                return True
            raise BadInput(
                f"{self._out.url} holds what was fetched from {origin.source} for {origin.fetched_for}.",
                hint="Fetch into a new folder.",
            )
        strange = [
            name
            for name in names
            if name != f"{DATA}/" and name not in self._carried and not name.startswith(".")
        ]
        strange += [f"{DATA}/{name}" for name in self._out.list(DATA) if not is_fetched(name, self._fetch)]
        if strange:
            raise BadInput(
                f"{self._out.url} holds {strange[0]}, which is not of this fetch.",
                hint="Fetch into a new folder, or that of the same fetch, of the same version.",
            )
        return False

    def _file(self, number: int, pieces: Sequence[Piece]) -> tuple[Columns, int]:
        """Write a data file, unless it exists. Return its embedded index, and the bytes written."""
        attempt = name_of_fetch(self._fetch, number)
        name = data_file(attempt, 0, 0)
        size = sum(map(_nbytes, pieces))
        written = 0
        if self._out.stat(name) is None:
            table = self._read(pieces)
            plan = plan_save(table, [(0, 1)] * len(table), _OPTIONS)
            about = {"attempt": attempt, "step": None, "grid": None, "notes": None}
            write_files(
                WriteRequest(_WholeFiles(self._out.root), table, plan, about, _OPTIONS, lambda moved: None)
            )
            written = size
        file = look(self._out, name)
        if not isinstance(file, WholeFile):
            raise CorruptCheckpoint(
                f"{self._out.url}/{name} is damaged: {file.why}.", hint="Delete it, and fetch again."
            )
        self._done += size
        self._progress(self._done, self._total)
        return file.columns, written

    def _read(self, pieces: Sequence[Piece]) -> ShardTable:
        """Read pieces into memory, which the next call uses again."""
        table = ShardTable()
        offset = 0
        wanted = sum(_aligned(_nbytes(piece)) for piece in pieces)
        if len(self._slab) < wanted:
            self._slab = np.zeros(wanted, np.uint8)
        for spec, box in pieces:
            size = _nbytes((spec, box))
            memory = HostMemory(box, int(ITEMSIZE[spec.dtype]), self._slab[offset : offset + size])
            table.add(spec, box, (0, 1), False, memory)
            offset += _aligned(size)
        rows = self._opened.find([spec.name for spec, _ in pieces])
        chosen, position = np.unique(rows, return_inverse=True)
        columns = self._opened.select(chosen)
        plan = plan_read(table, position, columns, self._opened.where)
        read_into(self._store, table, columns, plan, _THREADS, lambda moved: None)
        return table

    def _refuse_replaced(self) -> None:
        with open_source(self._store) as again:
            if again.identity != self._opened.identity:
                raise BadInput(f"{self._store.url} was replaced while it was fetched.", hint="Fetch again.")


def _names(store: Store) -> list[str]:
    return [name for name in store.list() if not name.endswith("/")]


def _nbytes(piece: Piece) -> int:
    spec, box = piece
    return box.volume * int(ITEMSIZE[spec.dtype])


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _pieces(what: Fetched) -> Iterator[Piece]:
    """Cut all boxes into parts that fit into a file, in the source's order: it is read from front to back."""
    columns = what.columns
    first = np.concatenate([[0], columns.chunk_end[:-1]]) if len(columns.names) else np.zeros(0, np.int64)
    has_chunks = np.flatnonzero(first < columns.chunk_end)
    chunk = first[has_chunks]
    order = has_chunks[np.lexsort((columns.position[chunk], columns.file[chunk]))]
    for row in order.tolist():
        name = columns.names[row]
        spec = what.specs[name]
        for box in what.needs.boxes.get(name, ()):
            for part in cut(box, max(FILE_BYTES // int(ITEMSIZE[spec.dtype]), 1)):
                if part.volume:
                    yield spec, part


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into files."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        nbytes = _nbytes(piece)
        if batch and (size + nbytes > FILE_BYTES or len(batch) >= MOST_PIECES):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += nbytes
    if batch:
        yield batch


def _all_names(columns: Columns) -> Columns:
    """Return all rows of the source without their chunks.

    With them a load can tell what is not in the source from what was not fetched.
    """
    rows, dims = len(columns.names), columns.dims
    return Columns(
        names=columns.names,
        dtype=columns.dtype,
        kind=columns.kind,
        ndim=columns.ndim,
        shape=columns.shape,
        chunk_end=np.zeros(rows, "<i8"),
        offset=np.zeros((0, dims), "<i8"),
        size=np.zeros((0, dims), "<i8"),
    )


class _WholeFiles(LocalStore):
    """A folder in which a file gets its name once it is whole."""

    def create(self, path: str) -> LocalWriter:
        folder, _, name = path.rpartition("/")
        hidden = self._for_writing(f"{folder}/.{name}.{secrets.token_hex(4)}.partial")
        return _Renamed(hidden, self._for_writing(path))


class _Renamed(LocalWriter):
    def __init__(self, hidden: str, path: str) -> None:
        super().__init__(hidden)
        self._hidden, self._final = hidden, path

    def finish(self) -> None:
        super().finish()
        with storage_errors("Renaming", self._hidden):
            os.replace(self._hidden, self._final)
            sync_folder(os.path.dirname(self._final))
