"""Copies the parts of a source that ranks need into a folder, which a load reads as a slice.

Boxes are read with the reader of a load, which verifies the digests of a checkpoint, and written as data
files with new digests. A file gets its name once it is complete, and the slice's index is written last. So an
interrupted copy can't be loaded, and the same fetch continues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast._core.base.options import Options
from holdfast._core.base.reporting import Meter
from holdfast._core.base.values import ReportProgress
from holdfast._core.existing.reindex import WholeFile, look
from holdfast._core.format.columns import ITEMSIZE, Columns
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index import Index
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import CONFIG, DATA, SLICE, data_file, is_fetched, name_of_fetch
from holdfast._core.format.slice import ABOUT, PUBLISHED, SliceOrigin, read_origin
from holdfast._core.io.file_writer import WriteRequest, write_files
from holdfast._core.io.host_memory import HostMemory, ScratchBuffer, batches
from holdfast._core.io.missing_files import reading
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.io.raw_read import fill_rows
from holdfast._core.io.source import Source
from holdfast._core.layout.box import Box, cut
from holdfast._core.layout.tensor import TensorSpec
from holdfast._core.plan.merge import Merger
from holdfast._core.plan.save import plan_save
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.store.base import Store, storage_errors
from holdfast._core.store.filesystem import make_durably
from holdfast._core.store.local import LocalStore
from holdfast._models.conversion.folder import (
    check_finished,
    left_in,
    put_files,
    put_missing,
    read_files,
    refuse_changed,
)
from holdfast._models.huggingface.whole_files import WholeFiles
from holdfast._models.views import hub_format as hf
from holdfast._models.views.needs import Needs
from holdfast.errors import BadInput, CorruptCheckpoint

FILE_BYTES = 256 << 20
"""Bytes of elements per file of a slice; a file is in memory while it is made."""
MOST_PIECES = 50_000
"""Maximum number of pieces per file."""
_ALIGN = 64
"""Bytes to which `ScratchBuffer` aligns."""
_THREADS = 4
_OPTIONS = Options(check_replicas="off", max_file_bytes=1 << 62)


class SliceChunk(NamedTuple):
    """A box that is written as one chunk."""

    spec: TensorSpec
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.volume * int(ITEMSIZE[self.spec.dtype])


class Fetched(NamedTuple):
    """The content of a fetch, and its source."""

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
        progress: ReportProgress,
    ) -> None:
        self._store, self._opened, self._out, self._what = store, opened, out, what
        pieces = list(_pieces(what))
        self._files = list(batches(pieces, FILE_BYTES, MOST_PIECES))
        # Part of the file names, so that the same command finds its files again.
        identity = repr((opened.identity, what.kind, what.ranks, what.grid, pieces))
        self._fetch = hex_digest(digest(identity.encode()))
        self._meter = Meter(progress, sum(piece.nbytes for piece in pieces))
        needed = [sum(piece.nbytes + _ALIGN for piece in file) for file in self._files]
        self._slab = ScratchBuffer(max(needed, default=0))
        self._carried = list(filter(hf.is_carried, store.list())) if what.kind == PUBLISHED else [CONFIG]

    def write(self) -> int:
        """Copy. Return the bytes of elements that were written."""
        if self._is_done():
            return 0
        written, merger = 0, Merger()
        merger.add(0, _all_names(self._what.columns))
        with reading(self._store, self._opened.identity):
            for number, pieces in enumerate(self._files):
                columns, size = self._file(number, pieces)
                merger.add(0, columns)
                written += size
        with open_source(self._store) as again:
            if again.identity != self._opened.identity:
                raise BadInput(f"{self._store.url} was replaced while it was fetched.", hint="Fetch again.")
        for name in self._out.list(DATA):
            if name.startswith(".") and is_fetched(name, self._fetch):
                self._out.delete(f"{DATA}/{name}")
        put_files(self._out, read_files(self._store, self._carried))
        origin = SliceOrigin(
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
        """Make the folder. Return whether this fetch is complete; raise BadInput if it has another one."""
        with storage_errors("Making", self._out.url):
            make_durably(self._out.root)
        if self._out.stat(SLICE) is not None:
            with closing(self._out.open(SLICE)) as reader:
                index = Index(reader.read, reader.size, f"{self._out.url}/{SLICE}")
                origin = read_origin(index.about, index.where)
                if origin.fetch == self._fetch:
                    check_finished(self._out, index, "fetch")
                    carried = read_files(self._store, self._carried)
                    refuse_changed(self._out, carried)
                    put_missing(self._out, carried)
                    return True
            raise BadInput(
                f"{self._out.url} holds what was fetched from {origin.source} for {origin.fetched_for}.",
                hint="Fetch into a new folder.",
            )
        left_in(
            self._out,
            lambda path: is_fetched(path.removeprefix(f"{DATA}/"), self._fetch),
            self._carried,
            "a fetch",
        )
        there = self._out.list()
        refuse_changed(self._out, read_files(self._store, (name for name in self._carried if name in there)))
        return False

    def _file(self, number: int, pieces: Sequence[SliceChunk]) -> tuple[Columns, int]:
        """Write a data file, unless it exists. Return its embedded index, and the bytes written."""
        attempt = name_of_fetch(self._fetch, number)
        name = data_file(attempt, 0, 0)
        size, written = sum(piece.nbytes for piece in pieces), 0
        if self._out.stat(name) is None:
            table = self._read(pieces)
            plan = plan_save(table, [(0, 1)] * len(table), _OPTIONS)
            about = {"attempt": attempt, "step": None, "grid": None, "notes": None}
            write_files(
                WriteRequest(WholeFiles(self._out.root), table, plan, about, _OPTIONS, lambda moved: None)
            )
            written = size
        file = look(self._out, name)
        if not isinstance(file, WholeFile):
            raise CorruptCheckpoint(
                f"{self._out.url}/{name} is damaged: {file.why}.", hint="Delete it, and fetch again."
            )
        self._meter.moved(size)
        return file.columns, written

    def _read(self, pieces: Sequence[SliceChunk]) -> ShardTable:
        """Read pieces into memory, which the next call reuses."""
        table = ShardTable()
        self._slab.reset()
        for piece in pieces:
            view = self._slab.take(piece.nbytes)
            assert view is not None
            memory = HostMemory(piece.box, int(ITEMSIZE[piece.spec.dtype]), np.frombuffer(view, np.uint8))
            table.add(piece.spec, piece.box, (0, 1), False, memory)
        fill_rows(self._store, self._opened, table, _THREADS)
        return table


def _pieces(what: Fetched) -> Iterator[SliceChunk]:
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
                    yield SliceChunk(spec, part)


def _all_names(columns: Columns) -> Columns:
    """Return all rows of the source without their chunks.

    With them a load can tell what is not in the source from what was not fetched.
    """
    return Columns(
        names=columns.names,
        dtype=columns.dtype,
        kind=columns.kind,
        ndim=columns.ndim,
        shape=columns.shape,
        chunk_end=np.zeros(len(columns.names), "<i8"),
    )
