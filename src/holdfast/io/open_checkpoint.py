"""Open any source of loads: a committed Holdfast checkpoint, one of torch DCP or megatron-core's
`torch_dist`, a folder that Hugging Face's libraries wrote, or a slice that was fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np

from holdfast.errors import CorruptCheckpoint, NotCommitted
from holdfast.format import tensor_archive, torch_dist
from holdfast.format.columns import ITEMSIZE, Array, Columns
from holdfast.format.digest import digest, hex_digest
from holdfast.format.index import Index
from holdfast.format.limits import METADATA_BYTES
from holdfast.format.marker import is_marker
from holdfast.format.names import METADATA, SLICE
from holdfast.format.slice import CHECKPOINT
from holdfast.io.hugging_face import HuggingFaceFolder
from holdfast.io.index_file import open_index
from holdfast.io.indexed_model import IndexedModel, is_imported
from holdfast.io.slice import Slice, slice_of
from holdfast.io.small_files import read_file
from holdfast.io.source import Source
from holdfast.layout.tensor import OBJECT, dtype_code
from holdfast.store.base import NotFound, Reader, Store
from holdfast.values import Buffer

OPEN_FILES = 256
"""Limit of files of a `torch_dist` checkpoint that are open at once."""


@contextmanager
def open_source(store: Store) -> Iterator[Source]:
    """Open the checkpoint in a folder, and close it afterwards. NotCommitted if there is none."""
    with ExitStack() as opened:
        source: Source
        try:
            # The Holdfast index comes first: a folder with both is a Holdfast checkpoint with a marker for
            # tools of DCP.
            index = opened.enter_context(open_index(store))
            source = IndexedModel(store, index) if is_imported(index) else index
        except NotCommitted:
            fetched = _open_slice(store, opened)
            metadata = read_file(store, METADATA, METADATA_BYTES) if fetched is None else None
            if fetched is not None:
                source = fetched
            elif metadata is not None and not is_marker(metadata):
                source = opened.enter_context(closing(TorchDist(store, metadata)))
            elif HuggingFaceFolder.is_one(store):
                source = HuggingFaceFolder(store)
            else:  # the error of `open_index` explains what is in the folder instead
                raise
        yield source


def _open_slice(store: Store, opened: ExitStack) -> Slice | None:
    try:
        reader = opened.enter_context(closing(store.open(SLICE)))
    except NotFound:
        return None
    return slice_of(store, Index(reader.read, reader.size, f"{store.url}/{SLICE}"))


@contextmanager
def open_own(store: Store) -> Iterator[Index | Slice]:
    """Open a committed Holdfast checkpoint, or a slice of one, and close it afterwards. NotCommitted if there
    is neither."""
    with ExitStack() as opened:
        try:
            yield opened.enter_context(open_index(store))
        except NotCommitted:
            fetched = _open_slice(store, opened)
            if fetched is None or fetched.origin.kind != CHECKPOINT:
                raise
            yield fetched


class TorchDist:
    """A `torch_dist` folder. A selection reads only those parts of data files that locate its elements."""

    object_prefix = torch_dist.OBJECT_PREFIX
    fetched_for = ""

    def __init__(self, store: Store, metadata: bytes) -> None:
        self.where = f"{store.url}/{METADATA}"
        self.identity = hex_digest(digest(metadata))
        self.about: dict[str, Any] = {"step": None}
        self._store = store
        self._entries = torch_dist.read_metadata(metadata, self.where)
        self._row = {entry.name: row for row, entry in enumerate(self._entries)}
        self._readers: dict[str, Reader] = {}
        """The most recently used readers, the latest last."""
        self._sizes: dict[str, int] = {}
        self.tensors = len(self._entries)
        self.bytes_read = len(metadata)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

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
        columns.file_size = np.asarray([self.size(name) for name in columns.file_names], "<i8")
        return columns

    def chunks(self) -> Iterator[tuple[torch_dist.Entry, torch_dist.Chunk, torch_dist.Member, Reader]]:
        """Yield every chunk, the position of its elements, and its file, which is opened when it is read."""
        for entry in self._entries:
            for chunk in entry.chunks:
                yield entry, chunk, self._locate(entry, chunk), _OnDemand(self, chunk.file)

    def empty(self) -> list[torch_dist.Entry]:
        """Return the tensors without elements, which have no chunks."""
        return [entry for entry in self._entries if not entry.chunks]

    def _locate(self, entry: torch_dist.Entry, chunk: torch_dist.Chunk) -> torch_dist.Member:
        if chunk.start + chunk.length > self.size(chunk.file):
            raise CorruptCheckpoint(
                f"{self._store.url}/{chunk.file} ends before the part of {entry.name!r} that {self.where} "
                f"says it holds.",
                details={"file": chunk.file, "tensor": entry.name},
            )
        if entry.kind == OBJECT:
            # An object is the whole archive: `object_check` checks it, then torch reads it.
            return torch_dist.Member(chunk.start, chunk.length, 0, False)
        itemsize = int(ITEMSIZE[dtype_code(entry.dtype, repr(entry.name))])
        read = self.reader(chunk.file).read
        return tensor_archive.locate(read, chunk, entry.dtype, itemsize, entry.name, self._store.url)

    def reader(self, name: str) -> Reader:
        """Return an open reader of a file."""
        reader = self._readers.pop(name, None) or self._store.open(name)
        # Every rank of the save wrote files, and the limit of open files may be as low as 1024.
        if len(self._readers) >= OPEN_FILES:
            self._readers.pop(next(iter(self._readers))).close()
        self._readers[name] = reader
        self._sizes[name] = reader.size
        return reader

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        if name not in self._sizes:
            self.reader(name)
        return self._sizes[name]


class _OnDemand:
    """A file of a `torch_dist` folder, reopened if it was closed to make room for others."""

    def __init__(self, source: TorchDist, name: str) -> None:
        self._source, self._name = source, name
        self.size = source.size(name)

    def read(self, start: int, length: int) -> bytes:
        return self._source.reader(self._name).read(start, length)

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        return self._source.reader(self._name).read_into(start, buffers)

    def close(self) -> None:
        """Do nothing: the folder closes its files."""
