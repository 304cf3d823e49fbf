"""Check the data files of a checkpoint against its index: their headers, embedded indexes and blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast._core.base.values import ReportProgress
from holdfast._core.existing.target import is_unanswered, number
from holdfast._core.format.columns import Array, Columns, unpad
from holdfast._core.format.container import Header, HeaderEntry, read_header
from holdfast._core.format.digest import digest
from holdfast._core.format.names import (
    EMBEDDED,
    FORMAT,
    is_link_to,
    name_of_chunk,
    split_reference,
    without_offset,
)
from holdfast._core.io.index_file import embedded_index
from holdfast._core.io.on_threads import on_threads
from holdfast._core.layout.tensor import DTYPES
from holdfast._core.store.base import NotFound, Reader, Store
from holdfast.errors import CorruptCheckpoint, HoldfastError

BATCH = 4 << 20
"""Maximum bytes of neighbouring blocks in one read."""
SPAN = 256 << 20
"""Approximate bytes per task of a thread."""


class Damage(msgspec.Struct, frozen=True):
    """A finding. `start` and `stop`: byte range in the file, or None."""

    file: str
    problem: str
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None


class _Block(NamedTuple):
    position: int
    length: int
    digest: int
    chunk: int


class FilesCheck:
    def __init__(
        self, store: Store, columns: Columns, about: Mapping[str, object], damage: list[Damage]
    ) -> None:
        """about: the metadata of the index."""
        self.store, self.columns, self.damage = store, columns, damage
        self.step, self.attempt = number(about.get("step")), about.get("attempt")
        self.moved: set[int] = set()
        """Chunks whose offset was computed at the commit, so that the header of their file has an old one."""
        self.linked: set[int] = set()
        """Hard links to files of earlier steps; the index lists only their unchanged chunks."""
        self.tensor = columns.tensor_of_chunk()
        self.nbytes = columns.chunk_bytes()
        order = np.lexsort((columns.position, columns.file))
        bounds = np.searchsorted(columns.file[order], np.arange(len(columns.file_names) + 1))
        self.chunks_of = [order[low:high] for low, high in pairwise(bounds.tolist())]
        self.read_of = [chunks[self._is_first(chunks)] for chunks in self.chunks_of]
        """Chunks to verify per file: only the first of several chunks that share the same bytes."""
        self.readable: list[int] = []
        self.lock = threading.Lock()
        self.done = 0

    def _is_first(self, chunks: Array) -> Array:
        """Return a mask over chunks sorted by position: False where a chunk begins at its predecessor's
        position."""
        first: Array = np.diff(self.columns.position[chunks], prepend=-1) > 0
        return first

    def file(self, file: int) -> None:
        """Check everything in a file except the data."""
        name, size = self.columns.file_names[file], int(self.columns.file_size[file])
        try:
            reader = self.store.open(name)
        except HoldfastError as error:
            if is_unanswered(error):
                raise
            is_own = split_reference(name) is None
            problem = "the file is missing" if isinstance(error, NotFound) and is_own else error.message
            self.damage.append(Damage(name, problem))
            self._beyond(file, 0)
            return
        try:
            with closing(reader):
                # Also if its size is wrong: the blocks that exist are still compared.
                self.readable.append(file)
                if reader.size != size:
                    low, high = sorted((reader.size, size))
                    text = f"the file has {reader.size} bytes, but was written with {size}"
                    self.damage.append(Damage(name, text, None, low, high))
                    self._beyond(file, reader.size)
                # The header of a truncated file is usually intact. It is read with the larger size, because
                # otherwise it is refused for chunks beyond the end, which `_beyond` reports better.
                header = read_header(reader.read, max(reader.size, size), name)
                # First, because it finds the chunks that the commit has moved (`moved`); the header has
                # their old offsets.
                self._embedded(file, reader, header)
                self._header(file, header)
        except HoldfastError as error:
            if is_unanswered(error):
                raise
            self.damage.append(Damage(name, error.message))

    def _beyond(self, file: int, size: int) -> None:
        """Report the chunks of a file that end beyond its actual size."""
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk])
            stop = start + int(self.nbytes[chunk])
            if stop > size:
                self._report(chunk, "these bytes are not there", max(start, size), stop)

    def _report(self, chunk: int, problem: str, start: int | None = None, stop: int | None = None) -> None:
        """Report damage of a chunk; default: its whole byte range."""
        position = int(self.columns.position[chunk])
        self.damage.append(
            Damage(
                self.columns.file_names[int(self.columns.file[chunk])],
                problem,
                self.columns.names[int(self.tensor[chunk])],
                position if start is None else start,
                position + int(self.nbytes[chunk]) if stop is None else stop,
            )
        )

    def _header(self, file: int, header: Header) -> None:
        """Compare a data file's header with the index, because no digest covers it."""
        name, rank = self.columns.file_names[file], str(int(self.columns.file_rank[file]))
        stated = {key: header.metadata.get(key) for key in ("format", "rank")}
        if stated != {"format": FORMAT, "rank": rank}:
            text = f"the header says {stated}, which is not what rank {rank} wrote"
            self.damage.append(Damage(name, text, None, 0, header.data_start))
        # By offsets, not by name: the names of two entries may differ only by apostrophes.
        listed = {entry.data_offsets: (key, entry) for key, entry in header.entries.items()}
        found, others = set[tuple[int, int]](), list[tuple[int, tuple[int, int]]]()
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk]) - header.data_start
            place = start, start + int(self.nbytes[chunk])
            if place in listed and self._as_written(chunk, *listed[place]):
                found.add(place)
            else:
                others.append((chunk, place))
        for chunk, place in others:
            if place not in found:  # of tied tensors, the header lists one
                self._report(chunk, "the file's header does not list this part as it was written")
        for key, entry in (row for place, row in listed.items() if place not in found):
            is_empty = entry.data_offsets[0] == entry.data_offsets[1]
            if key != EMBEDDED and not is_empty and file not in self.linked:
                text = f"the file's header lists {key!r}, which the index does not know"
                self.damage.append(Damage(name, text))

    def _as_written(self, chunk: int, name: str, entry: HeaderEntry) -> bool:
        """Return whether the header's entry has the name, dtype and shape that a writer gives this chunk."""
        columns, row = self.columns, int(self.tensor[chunk])
        ndim, dtype = int(columns.ndim[row]), DTYPES[int(columns.dtype[row])]
        shape, expected = unpad(columns.size[chunk], ndim), columns.names[row]
        if shape != columns.shape_of(row):
            expected = name_of_chunk(expected, unpad(columns.offset[chunk], ndim))
        if chunk in self.moved:  # its rank put the offset known at that time into the name
            name, expected = without_offset(name), without_offset(columns.names[row])
        stored = shape if dtype.extra == 1 else (*shape, dtype.extra)
        # The writer appends apostrophes to a name that is taken already.
        same_name = name.startswith(expected) and not name[len(expected) :].strip("'")
        return same_name and (entry.dtype, entry.shape) == (dtype.tag, stored)

    # -- the embedded index ---------------------------------------------------------------

    def _embedded(self, file: int, reader: Reader, header: Header) -> None:
        name, size = self.columns.file_names[file], int(self.columns.file_size[file])
        entry = header.entries.get(EMBEDDED)
        if entry is None or header.data_start + entry.data_offsets[1] != size:
            text = "the file's header does not place an embedded index at its end"
            self.damage.append(Damage(name, text, None, 0, header.data_start))
            return
        start = header.data_start + entry.data_offsets[0]
        if (entry.dtype, entry.shape) != ("U8", (size - start,)):
            text = f"the file's header lists {EMBEDDED!r} as {entry.dtype}{list(entry.shape)}"
            self.damage.append(Damage(name, text, None, 0, header.data_start))
        if reader.size < size:
            return  # reported already: the file is truncated
        try:
            index = embedded_index(reader, start, size, name)
            embedded = index.embedded()
        except CorruptCheckpoint as error:
            self.damage.append(Damage(name, error.message, None, start, size))
            return
        step, attempt = number(index.about.get("step")), index.about.get("attempt")
        own = embedded.file_names[:1]
        # The file may be intact, but belong to another checkpoint.
        if own and is_link_to(name, own[0]):
            self.linked.add(file)
        elif (
            own != [name]
            or embedded.file_size[:1].tolist() != [size]
            or step != self.step
            or (self.attempt is not None and attempt != self.attempt)
        ):
            text = (
                f"the embedded index is of {embedded.file_names[:1]}, step {step} and attempt {attempt}, not "
                "of this file and checkpoint"
            )
            self.damage.append(Damage(name, text, None, start, size))
        self._compare(file, embedded, start, size)

    def _compare(self, file: int, embedded: Columns, start: int, stop: int) -> None:
        """Compare the rows of a file's chunks in its embedded index with those in the main index."""
        name, ours = self.columns.file_names[file], self.chunks_of[file]
        # Both in the order of the file, because the embedded index sorts its rows by its own tensors.
        theirs = np.argsort(embedded.position, kind="stable")
        theirs = theirs[embedded.file[theirs] == 0]  # the others are in linked files
        if file in self.linked:
            ours, theirs = self._in_both(ours, embedded, theirs)
        if len(ours) != len(theirs):
            text = f"the embedded index lists {len(theirs)} chunks, the main index {len(ours)} of this file"
            self.damage.append(Damage(name, text, None, start, stop))
            return
        late = embedded.chunk_late[theirs] if len(embedded.chunk_late) else np.full(len(theirs), -1)
        bound = np.flatnonzero(late >= 0)  # the commit has computed their offset along one axis
        axis = embedded.late_axis[late[bound]] - embedded.ndim[embedded.late_tensor[late[bound]]].astype(
            np.int64
        )
        placed = self.columns.offset[ours[bound], axis]
        moved = (embedded.late_start[late[bound]] == -1) | (embedded.offset[theirs[bound], axis] != placed)
        self.moved |= set(ours[bound[moved]].tolist())
        # A copy, because the array may be a read-only view of the file's bytes.
        embedded.offset = embedded.offset.copy()
        embedded.offset[theirs[bound], axis] = placed
        rows = _rows(self.columns, self.tensor, ours), _rows(embedded, embedded.tensor_of_chunk(), theirs)
        for chunk, mine, other in zip(ours.tolist(), *rows, strict=True):
            if mine != other:
                self._report(chunk, "the embedded index and the main index describe this part differently")

    def _in_both(self, ours: Array, embedded: Columns, theirs: Array) -> tuple[Array, Array]:
        """Return the chunks of a linked file that both indexes list. Either may list more: chunks that have
        changed since, and weights that were tied in only one of the two steps."""
        columns, tensor = self.columns, embedded.tensor_of_chunk()
        mine = [(columns.position[at], columns.names[self.tensor[at]]) for at in ours]
        others = [(embedded.position[at], embedded.names[tensor[at]]) for at in theirs]
        both = {*mine} & {*others}
        known = {position for position, _ in both}
        # Keep a position that only the main index has: it is damage.
        kept = [key in both or key[0] not in known for key in mine]
        return ours[np.asarray(kept, bool)], theirs[np.asarray([key in both for key in others], bool)]

    # -- data -----------------------------------------------------------------------------

    def read(self, threads: int, progress: ReportProgress) -> int:
        """Compare every block of every chunk with its digest. Return the bytes checked."""
        total = sum(int(self.nbytes[self.read_of[file]].sum()) for file in self.readable)

        def tell(moved: int) -> None:
            with self.lock:
                self.done += moved
                progress(self.done, total)

        # In the order of the spans, so that a report does not depend on the speed of threads.
        for damage in on_threads(
            threads, "holdfast-verify", lambda span: self._span(*span, tell), self._spans()
        ):
            self.damage += damage
        return self.done

    def _spans(self) -> Iterator[tuple[int, list[int]]]:
        """Group neighbouring chunks of one file into tasks of about SPAN bytes."""
        for file in self.readable:
            span, size = list[int](), 0
            for chunk in self.read_of[file].tolist():
                span.append(chunk)
                size += int(self.nbytes[chunk])
                if size >= SPAN:
                    yield file, span
                    span, size = [], 0
            if span:
                yield file, span

    def _span(self, file: int, chunks: list[int], tell: Callable[[int], None]) -> list[Damage]:
        # Opened per span, because a checkpoint may have more files than a process may have open.
        name, bad = self.columns.file_names[file], list[tuple[_Block, str]]()
        try:
            with closing(self.store.open(name)) as reader:
                for batch in _batches(self._blocks(chunk) for chunk in chunks):
                    bad += _check_batch(reader, batch)
                    tell(sum(block.length for block in batch))
        except HoldfastError as error:
            if is_unanswered(error):
                raise
            return [Damage(name, error.message)]
        return self._joined(name, bad)

    def _blocks(self, chunk: int) -> list[_Block]:
        position, nbytes = int(self.columns.position[chunk]), int(self.nbytes[chunk])
        block = int(self.columns.block[chunk])
        return [
            _Block(position + index * block, min(block, nbytes - index * block), wanted, chunk)
            for index, wanted in enumerate(self.columns.digests_of(chunk).tolist())
        ]

    def _joined(self, name: str, bad: list[tuple[_Block, str]]) -> list[Damage]:
        """Join neighbouring bad blocks of one chunk into one finding."""
        out: list[Damage] = []
        last: tuple[int, str] | None = None
        for block, problem in bad:
            stop = block.position + block.length
            if out and last == (block.chunk, problem) and out[-1].stop == block.position:
                out[-1] = msgspec.structs.replace(out[-1], stop=stop)
            else:
                tensor = self.columns.names[int(self.tensor[block.chunk])]
                out.append(Damage(name, problem, tensor, block.position, stop))
            last = block.chunk, problem
        return out


def _batches(chunks: Iterator[list[_Block]]) -> Iterator[list[_Block]]:
    """Group blocks that follow each other in the file, to be read at once."""
    # Small chunks are neighbours in a file, and one read for each would mostly be overhead.
    batch, size = list[_Block](), 0
    for blocks in chunks:
        for block in blocks:
            if batch and (size >= BATCH or batch[-1].position + batch[-1].length != block.position):
                yield batch
                batch, size = [], 0
            batch.append(block)
            size += block.length
    if batch:
        yield batch


def _check_batch(reader: Reader, batch: list[_Block]) -> Iterator[tuple[_Block, str]]:
    """Find the bad blocks of a batch, each with its problem."""
    start = batch[0].position
    try:
        data = memoryview(reader.read(start, batch[-1].position + batch[-1].length - start))
    except HoldfastError as error:
        if is_unanswered(error):
            raise
        yield from ((block, error.message) for block in batch)
        return
    for block in batch:
        part = data[block.position - start : block.position - start + block.length]
        # A block that is cut short was reported already (`_beyond`).
        if len(part) == block.length and digest(part) != block.digest:
            yield block, "the bytes do not match the digest they were written with"


def _rows(columns: Columns, tensor: Array, chunks: Array) -> Iterator[tuple[object, ...]]:
    """Yield the index entries of these chunks. tensor: the row of each chunk's tensor."""
    for chunk in chunks.tolist():
        row = int(tensor[chunk])
        # Unpadded, because an index pads to its widest tensor, which a file may not have.
        ndim = int(columns.ndim[row])
        yield (
            *columns.spec_of(row),
            unpad(columns.offset[chunk], ndim),
            unpad(columns.size[chunk], ndim),
            int(columns.position[chunk]),
            int(columns.block[chunk]),
            columns.digests_of(chunk).tobytes(),
        )
