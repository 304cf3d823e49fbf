"""Open any source of loads: a committed Holdfast checkpoint, one of torch DCP or megatron-core's
`torch_dist`, a folder that Hugging Face's libraries wrote, or a slice that was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.format import tensor_archive, torch_dist
from holdfast._core.format.columns import ITEMSIZE, Array, Columns
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index import Index
from holdfast._core.format.limits import METADATA_BYTES
from holdfast._core.format.local_copy import read_copy
from holdfast._core.format.names import IMPORTED_MODEL, INDEX, METADATA, SLICE, is_marker
from holdfast._core.format.slice import CHECKPOINT, read_origin
from holdfast._core.io import registered_openers
from holdfast._core.io.index_file import check_other_metadata
from holdfast._core.io.open_files import OnDemand, OpenFiles
from holdfast._core.io.slice import CopyOfStep, Slice
from holdfast._core.io.small_files import read_file
from holdfast._core.io.source import Source
from holdfast._core.layout.tensor import OBJECT, dtype_code
from holdfast._core.store.absence import nothing_there
from holdfast._core.store.base import NotFound, Reader, Store
from holdfast.errors import CorruptCheckpoint


@contextmanager
def open_source(store: Store) -> Iterator[Source]:
    """Open the checkpoint in a folder, and close it afterwards. NotCommitted if there is none."""
    with ExitStack() as opened:
        yield choose_source(store, opened)


def choose_source(store: Store, opened: ExitStack) -> Source:
    """Return the source of the checkpoint in a folder. Its files are closed with `opened`. NotCommitted if
    there is none."""
    # The index first: a folder that has one, and `.metadata`, is a Holdfast checkpoint with a marker for
    # tools of DCP.
    for find in (_checkpoint, _slice, _torch_dist, _registered):
        source = find(store, opened)
        if source is not None:
            return source
    raise nothing_there(store)


def _checkpoint(store: Store, opened: ExitStack) -> Source | None:
    """Return the Holdfast checkpoint, or the published model that was imported as one."""
    index = _index(store, INDEX, opened)
    if index is not None:
        check_other_metadata(store, index.about)
    notes = index.about.get("notes") if index is not None else None
    imported = isinstance(notes, dict) and notes.get("imported") == IMPORTED_MODEL
    if imported:
        return _registered(store, opened, index)
    copy = None if index is None else read_copy(index.about)
    return index if index is None or copy is None else CopyOfStep(index, copy)


def _slice(store: Store, opened: ExitStack) -> Source | None:
    """Return the parts of a checkpoint, or of a published model, that were fetched."""
    index = _index(store, SLICE, opened)
    if index is None:
        return None
    kind = read_origin(index.about, index.where).kind
    return Slice(index) if kind == CHECKPOINT else _registered(store, opened, index)


def _torch_dist(store: Store, opened: ExitStack) -> Source | None:
    """Return the checkpoint of torch DCP or megatron-core."""
    metadata = read_file(store, METADATA, METADATA_BYTES)
    if metadata is None or is_marker(metadata):
        return None
    return opened.enter_context(closing(TorchDist(store, metadata)))


def _registered(store: Store, opened: ExitStack, index: Index | None = None) -> Source | None:
    """Return the source of a registered format."""
    sources = (open_registered(store, index) for open_registered in registered_openers())
    return next((source for source in sources if source is not None), None)


def _index(store: Store, name: str, opened: ExitStack) -> Index | None:
    try:
        reader = opened.enter_context(closing(store.open(name)))
    except NotFound:
        return None
    return Index(reader.read, reader.size, f"{store.url}/{name}")


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
