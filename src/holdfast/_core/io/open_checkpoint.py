"""Open any source of loads: a committed Holdfast checkpoint, one of torch DCP or megatron-core's
`torch_dist`, a folder that Hugging Face's libraries wrote, or a slice that was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib import import_module

import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.format import tensor_archive, torch_dist
from holdfast._core.format.columns import ITEMSIZE, Array, Columns
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index import Index
from holdfast._core.format.limits import METADATA_BYTES
from holdfast._core.format.names import IMPORTED_MODEL, METADATA, SLICE, is_marker
from holdfast._core.format.slice import CHECKPOINT, read_origin
from holdfast._core.io.index_file import open_index
from holdfast._core.io.open_files import OnDemand, OpenFiles
from holdfast._core.io.slice import Slice
from holdfast._core.io.small_files import read_file
from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import OBJECT, dtype_code
from holdfast._core.store.base import NotFound, Reader, Store
from holdfast.errors import CorruptCheckpoint, NotCommitted


@contextmanager
def open_source(store: Store) -> Iterator[Source]:
    """Open the checkpoint in a folder, and close it afterwards. NotCommitted if there is none."""
    with ExitStack() as opened:
        source: Source | None
        try:
            # The Holdfast index comes first: a folder with both is a Holdfast checkpoint with a marker for
            # tools of DCP.
            index = opened.enter_context(open_index(store))
            notes = index.about.get("notes")
            imported = isinstance(notes, dict) and notes.get("imported") == IMPORTED_MODEL
            source = _published(store, index) if imported else index
        except NotCommitted:
            fetched = _open_slice(store, opened)
            metadata = read_file(store, METADATA, METADATA_BYTES) if fetched is None else None
            if fetched is not None and read_origin(fetched.about, fetched.where).kind == CHECKPOINT:
                source = Slice(fetched)
            elif metadata is not None and not is_marker(metadata):
                source = opened.enter_context(closing(TorchDist(store, metadata)))
            else:
                source = _published(store, fetched)
            if source is None:  # the error of `open_index` explains what is in the folder instead
                raise
        assert source is not None
        yield source


def _published(store: Store, index: Index | None) -> Source | None:
    """Open the published model that an index describes or, without an index, the one in a folder.

    Imported by name, and only here: the core must not depend on the packages for published models.
    """
    source: Source | None = import_module("holdfast._models.views.sources").open_published(store, index)
    return source


def _open_slice(store: Store, opened: ExitStack) -> Index | None:
    try:
        reader = opened.enter_context(closing(store.open(SLICE)))
    except NotFound:
        return None
    return Index(reader.read, reader.size, f"{store.url}/{SLICE}")


class TorchDist:
    """A `torch_dist` folder. `select` reads only those parts of data files that locate the elements."""

    object_prefix = torch_dist.OBJECT_PREFIX
    fetched_for = ""

    def __init__(self, store: Store, metadata: bytes) -> None:
        self.where = f"{store.url}/{METADATA}"
        self.identity = hex_digest(digest(metadata))
        self.about: Message = {"step": None}
        self._store = store
        self._entries = torch_dist.read_metadata(metadata, self.where)
        self._row = {entry.name: row for row, entry in enumerate(self._entries)}
        self._files = OpenFiles(store)
        self.tensors = len(self._entries)
        self.bytes_read = len(metadata)

    def close(self) -> None:
        self._files.close()

    def names(self) -> list[str]:
        return [entry.name for entry in self._entries]

    def find(self, wanted: Sequence[str]) -> Array:
        return np.fromiter((self._row.get(name, -1) for name in wanted), np.int64, len(wanted))

    def find_one(self, name: str) -> int:
        return self._row.get(name, -1)

    def select(self, rows: Array | None = None) -> Columns:
        # Locating opens data files and reads a few small pieces of each chunk's archive, so it is done only
        # for selected rows.
        chosen = self._entries if rows is None else [self._entries[row] for row in rows.tolist()]
        columns = torch_dist.to_columns(
            chosen, [[self._locate(entry, chunk) for chunk in entry.chunks] for entry in chosen]
        )
        # The metadata lacks the sizes, which readers compare with those of the files that they open.
        columns.file_size = np.asarray([self._files.size(name) for name in columns.file_names], "<i8")
        return columns

    @property
    def entries(self) -> Sequence[torch_dist.MetadataEntry]:
        """All tensors and objects, as the metadata describes them, without a look at data files."""
        return self._entries

    def chunks(
        self,
    ) -> Iterator[
        tuple[torch_dist.MetadataEntry, tensor_archive.Chunk, tensor_archive.ChunkLocation, Reader]
    ]:
        """Yield every chunk, the position of its elements, and its file, which is opened when it is read."""
        for entry in self._entries:
            for chunk in entry.chunks:
                yield entry, chunk, self._locate(entry, chunk), OnDemand(self._files, chunk.file)

    def empty(self) -> list[torch_dist.MetadataEntry]:
        """Return the tensors without elements, which have no chunks."""
        return [entry for entry in self._entries if not entry.chunks]

    def _locate(
        self, entry: torch_dist.MetadataEntry, chunk: tensor_archive.Chunk
    ) -> tensor_archive.ChunkLocation:
        if chunk.start + chunk.length > self._files.size(chunk.file):
            raise CorruptCheckpoint(
                f"{self._store.url}/{chunk.file} ends before the part of {entry.name!r} that {self.where} "
                f"says it holds.",
                details={"file": chunk.file, "tensor": entry.name},
            )
        if entry.kind == OBJECT:
            # An object is the whole archive: `torch_objects` reads it.
            return tensor_archive.ChunkLocation(chunk.start, chunk.length, 0, False)
        itemsize = int(ITEMSIZE[dtype_code(entry.dtype, repr(entry.name))])
        read = self._files.reader(chunk.file).read
        return tensor_archive.locate(read, chunk, entry.dtype, itemsize, entry.name, self._store.url)
