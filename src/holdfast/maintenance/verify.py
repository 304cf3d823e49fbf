"""Re-read a checkpoint and report all damage, not only the first.

These are checked:

- the index: every page against its digest, then that its rows are valid and tile every tensor;
- each data file: that it exists, its size, and that its header lists exactly the chunks of the index;
- each file's embedded index: its own digests, then that it agrees with the main index;
- unless `quick`, every block of every chunk against its digest.

These checks cover every byte of a checkpoint, so any flipped bit is reported. Damage of one file never hides
that of another: what can't be read is a finding, and the check continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import CorruptCheckpoint, HoldfastError
from holdfast.format.columns import Array, Columns, expand_ranges, unpad
from holdfast.format.container import Entry, Header, read_header
from holdfast.format.digest import digest
from holdfast.format.index import PAGE, Index
from holdfast.format.names import EMBEDDED, FORMAT, INDEX, name_of_chunk, without_offset
from holdfast.io.index_file import embedded_index
from holdfast.layout.coverage import first_problem
from holdfast.layout.tensor import DTYPES
from holdfast.maintenance.target import Place, about, checkpoint_or_run, number
from holdfast.store.base import NotFound, Reader, Store
from holdfast.store.run_folder import own_steps

BATCH = 4 << 20
"""Bytes of neighbouring blocks that are read at once."""
SPAN = 256 << 20
"""Bytes of one task of a thread."""
MOST_GAPS = 100
"""Tensors that are not tiled are named up to this number."""
Progress = Callable[[int, int], None]
"""Called with the bytes checked so far, and the bytes in all."""


class Damage(msgspec.Struct, frozen=True):
    """One finding. `start` and `stop` are bytes of the file, None where no range can be given."""

    file: str
    problem: str
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None


class Verified(msgspec.Struct, frozen=True):
    """The findings of one checkpoint; it is whole if there are none."""

    path: str
    step: int | None
    quick: bool
    tensors: int
    chunks: int
    files: int
    bytes_checked: int
    """Bytes of data, without indexes and headers."""
    seconds: float
    whole: bool
    damage: tuple[Damage, ...]


class VerifiedRun(msgspec.Struct, frozen=True):
    """The findings of the committed steps of a run."""

    path: str
    whole: bool
    steps: tuple[Verified, ...]


def verify(
    path: Place, quick: bool = False, threads: int = 1, progress: Progress = lambda done, total: None
) -> Verified | VerifiedRun:
    """Check a checkpoint, or every committed step of a run folder."""
    store, is_run = checkpoint_or_run(path)
    if not is_run:
        return _verify(store, quick, threads, progress)
    # Without steps of other formats, because these have no digests.
    stores = [store.child(folder) for folder in own_steps(store).values()]
    steps = tuple(_verify(child, quick, threads, progress) for child in stores)
    return VerifiedRun(store.url, all(step.whole for step in steps), steps)


def _verify(store: Store, quick: bool, threads: int, progress: Progress) -> Verified:
    began, damage = time.monotonic(), list[Damage]()
    opened = _open_index(store, damage)
    if opened is None:
        return Verified(store.url, None, quick, 0, 0, 0, 0, time.monotonic() - began, False, tuple(damage))
    columns, step = opened
    _coverage(columns, damage)
    # Files before data, because `read` needs to know which files are missing or truncated.
    check = _Check(store, columns, step, damage)
    for file in range(len(columns.file_names)):
        check.file(file)
    checked = 0 if quick else check.read(threads, progress)
    return Verified(
        store.url,
        step,
        quick,
        len(columns.names),
        len(columns.file),
        len(columns.file_names),
        checked,
        time.monotonic() - began,
        not damage,
        tuple(damage),
    )


# -- the index ----------------------------------------------------------------------------


def _open_index(store: Store, damage: list[Damage]) -> tuple[Columns, int | None] | None:
    """Read all rows of the index, and its step. If it is damaged, add findings and return None."""
    try:
        reader = store.open(INDEX)
    except HoldfastError as error:
        damage.append(Damage(INDEX, error.message))
        return None
    try:
        with closing(reader):
            index = Index(reader.read, reader.size, f"{store.url}/{INDEX}")
            # Lists all bad pages; `select` would raise at the first.
            pages = list(_bad_pages(reader))
            damage += pages
            return None if pages else (index.select(), number(about(index).get("step")))
    except HoldfastError as error:
        damage.append(Damage(INDEX, error.message))
        return None


def _bad_pages(reader: Reader) -> Iterator[Damage]:
    """Find the pages of an index that do not match their digest. The seal of the index was verified."""
    header = read_header(reader.read, reader.size, INDEX)
    start, stop = header.entries["pages"].data_offsets
    digests = np.frombuffer(reader.read(header.data_start + start, stop - start), "<u8").tolist()
    for page, wanted in enumerate(digests):
        low, high = header.data_start + page * PAGE, header.data_start + min((page + 1) * PAGE, start)
        if digest(reader.read(low, high - low)) != wanted:
            yield Damage(INDEX, f"page {page} of the index does not match its digest", None, low, high)


def _coverage(columns: Columns, damage: list[Damage]) -> None:
    """Find tensors that are not tiled exactly once.

    `first_problem` returns one tensor, so it is called again without that tensor.
    """
    kept = np.ones(len(columns.names), bool)
    tensor = columns.tensor_of_chunk()
    # Bounded, because each call checks all tensors that are left, and takes as long as in a commit.
    while int((~kept).sum()) < MOST_GAPS:
        rows, mine = np.flatnonzero(kept), kept[tensor]
        renumber = np.cumsum(kept) - 1
        problem = first_problem(
            columns.shape[rows], renumber[tensor[mine]], columns.offset[mine], columns.size[mine]
        )
        if problem is None:
            return
        row = int(rows[problem.tensor])
        place = list(unpad(np.asarray(problem.place), int(columns.ndim[row])))
        damage.append(
            Damage(
                INDEX,
                f"the chunks do not tile the tensor: {problem.kind} from {place} on",
                columns.names[row],
            )
        )
        kept[row] = False
    damage.append(
        Damage(INDEX, f"more than {MOST_GAPS} tensors are not tiled; the others were not looked at")
    )


# -- files --------------------------------------------------------------------------------


class _Block(NamedTuple):
    position: int
    length: int
    digest: int
    chunk: int


class _Check:
    """Checks the files of one checkpoint against its index."""

    def __init__(self, store: Store, columns: Columns, step: int | None, damage: list[Damage]) -> None:
        self.store, self.columns, self.step, self.damage = store, columns, step, damage
        self.moved: set[int] = set()
        """Chunks whose offset the commit has computed; their file's header has an older one."""
        self.tensor = columns.tensor_of_chunk()
        self.nbytes = columns.chunk_bytes()
        self.counts = np.diff(columns.digest_end, prepend=0)
        order = np.lexsort((columns.position, columns.file))
        bounds = np.searchsorted(columns.file[order], np.arange(len(columns.file_names) + 1))
        self.chunks_of = [order[low:high] for low, high in pairwise(bounds.tolist())]
        self.readable: list[int] = []
        self.lock = threading.Lock()
        self.done = 0

    def file(self, file: int) -> None:
        """Check everything of a file but its data."""
        name, size = self.columns.file_names[file], int(self.columns.file_size[file])
        try:
            reader = self.store.open(name)
        except HoldfastError as error:
            self._lost(file, "the file is missing" if isinstance(error, NotFound) else error.message)
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
                # The header of a truncated file is mostly whole. It is read with the larger size, because
                # otherwise it is refused for chunks beyond the end, which `_beyond` reports better.
                header = read_header(reader.read, max(reader.size, size), name)
                # First, because it finds the chunks that the commit has moved (`moved`); the header has
                # their old offsets.
                self._embedded(file, reader, header)
                self._header(file, header)
        except HoldfastError as error:
            self.damage.append(Damage(name, error.message))

    def _lost(self, file: int, problem: str) -> None:
        """Report a file that can't be opened, and all its chunks."""
        self.damage.append(Damage(self.columns.file_names[file], problem))
        self._beyond(file, 0)

    def _beyond(self, file: int, size: int) -> None:
        """Report the chunks of a file that end beyond its actual size."""
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk])
            stop = start + int(self.nbytes[chunk])
            if stop > size:
                self._report(chunk, "these bytes are not there", max(start, size), stop)

    def _report(self, chunk: int, problem: str, start: int | None = None, stop: int | None = None) -> None:
        """Report damage of a chunk; by default of all its bytes."""
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
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk]) - header.data_start
            row = listed.pop((start, start + int(self.nbytes[chunk])), None)
            if row is None or not self._as_written(chunk, *row):
                self._report(chunk, "the file's header does not list this part as it was written")
        for key, entry in listed.values():
            if key != EMBEDDED and entry.data_offsets[0] < entry.data_offsets[1]:
                text = f"the file's header lists {key!r}, which the index does not know"
                self.damage.append(Damage(name, text))

    def _as_written(self, chunk: int, name: str, entry: Entry) -> bool:
        """Return whether the header's entry has the name, dtype and shape that a writer gives this chunk."""
        columns, row = self.columns, int(self.tensor[chunk])
        ndim, dtype = int(columns.ndim[row]), DTYPES[int(columns.dtype[row])]
        shape, expected = unpad(columns.size[chunk], ndim), columns.names[row]
        if shape != columns.shape_of(row):
            expected = name_of_chunk(expected, unpad(columns.offset[chunk], ndim))
        if chunk in self.moved:  # its rank named it by the offset that it knew then
            name, expected = without_offset(name), without_offset(columns.names[row])
        stored = shape if dtype.extra == 1 else (*shape, dtype.extra)
        # The writer appends apostrophes to a name that is taken already.
        same_name = name.startswith(expected) and not name[len(expected) :].strip("'")
        return same_name and (entry.dtype, entry.shape) == (dtype.tag, stored)

    # -- the embedded index ---------------------------------------------------------------

    def _embedded(self, file: int, reader: Reader, header: Header) -> None:
        """Check the embedded index of a file."""
        name, size = self.columns.file_names[file], int(self.columns.file_size[file])
        entry = header.entries.get(EMBEDDED)
        if entry is None or header.data_start + entry.data_offsets[1] != size:
            text = "the file's header does not place an embedded index at its end"
            self.damage.append(Damage(name, text, None, 0, header.data_start))
            return
        start = header.data_start + entry.data_offsets[0]
        if reader.size < size:
            return  # reported already: the file is truncated
        try:
            index = embedded_index(reader, start, size, name)
            embedded = index.embedded()
        except CorruptCheckpoint as error:
            self.damage.append(Damage(name, error.message, None, start, size))
            return
        step = number(about(index).get("step"))
        # A file of another checkpoint may have been put in this one's place, and be whole.
        if embedded.file_names != [name] or embedded.file_size.tolist() != [size] or step != self.step:
            text = (
                f"the embedded index is of {embedded.file_names[:1]} and step {step}, not of this file and "
                "checkpoint"
            )
            self.damage.append(Damage(name, text, None, start, size))
        self._compare(file, embedded, start, size)

    def _compare(self, file: int, embedded: Columns, start: int, stop: int) -> None:
        """Compare the rows of a file's chunks in its embedded index with those in the main index."""
        name, ours = self.columns.file_names[file], self.chunks_of[file]
        # Both in the order of the file, because the embedded index sorts its rows by its own tensors.
        theirs = np.argsort(embedded.position, kind="stable")
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
        same = _chunk_rows(self.columns, ours) == _chunk_rows(embedded, theirs)
        counts = self.counts[ours]
        # Digests can be compared one by one only if each chunk has equally many in both.
        if (counts == np.diff(embedded.digest_end, prepend=0)[theirs]).all():
            differ = _digests(self.columns, ours) != _digests(embedded, theirs)
            same[np.repeat(np.arange(len(ours)), counts)[differ]] = False
        else:
            same[:] = False
        for index in np.flatnonzero(~same).tolist():
            self._report(
                int(ours[index]), "the embedded index and the main index describe this part differently"
            )

    # -- data -----------------------------------------------------------------------------

    def read(self, threads: int, progress: Progress) -> int:
        """Compare every block of every chunk with its digest. Return the bytes checked."""
        total = sum(int(self.nbytes[self.chunks_of[file]].sum()) for file in self.readable)
        self.done = 0

        def tell(moved: int) -> None:
            with self.lock:
                self.done += moved
                progress(self.done, total)

        def work(span: tuple[int, list[int]]) -> list[Damage]:
            return self._span(*span, tell)

        with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="holdfast-verify") as pool:
            # In the order of the spans, so that a report does not depend on the speed of threads.
            for damage in pool.map(work, self._spans()):
                self.damage += damage
        return self.done

    def _spans(self) -> Iterator[tuple[int, list[int]]]:
        """Group neighbouring chunks of one file into tasks of about SPAN bytes."""
        for file in self.readable:
            span, size = list[int](), 0
            for chunk in self.chunks_of[file].tolist():
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
            reader = self.store.open(name)
        except HoldfastError as error:
            return [Damage(name, error.message)]
        with closing(reader):
            for batch in _batches(self._blocks(chunk) for chunk in chunks):
                bad += _check_batch(reader, batch)
                tell(sum(block.length for block in batch))
        return self._joined(name, bad)

    def _blocks(self, chunk: int) -> list[_Block]:
        columns, count = self.columns, int(self.counts[chunk])
        position, block, nbytes = (
            int(columns.position[chunk]),
            int(columns.block[chunk]),
            int(self.nbytes[chunk]),
        )
        end = int(columns.digest_end[chunk])
        digests = columns.digests[end - count : end].tolist()
        return [
            _Block(position + index * block, min(block, nbytes - index * block), wanted, chunk)
            for index, wanted in enumerate(digests)
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
        yield from ((block, error.message) for block in batch)
        return
    for block in batch:
        part = data[block.position - start : block.position - start + block.length]
        # A block that is cut short was reported already (`_beyond`).
        if len(part) == block.length and digest(part) != block.digest:
            yield block, "the bytes do not match the digest they were written with"


def _chunk_rows(columns: Columns, chunks: Array) -> Array:
    """Return the identity of each chunk, as an array of tuples that are compared one by one."""
    tensor = columns.tensor_of_chunk()[chunks].tolist()
    offset, size = columns.offset[chunks].tolist(), columns.size[chunks].tolist()
    position, block = columns.position[chunks].tolist(), columns.block[chunks].tolist()
    rows = np.empty(len(chunks), object)
    shapes: dict[int, tuple[str, int, int, tuple[int, ...]]] = {}
    for index, row in enumerate(tensor):
        if row not in shapes:
            kind, dtype = int(columns.kind[row]), int(columns.dtype[row])
            shapes[row] = (columns.names[row], kind, dtype, columns.shape_of(row))
        # Unpadded, because an index pads to its widest tensor, which a file may not have.
        ndim = len(shapes[row][3])
        box = tuple(offset[index][len(offset[index]) - ndim :]), tuple(size[index][len(size[index]) - ndim :])
        rows[index] = (*shapes[row], *box, position[index], block[index])
    return rows


def _digests(columns: Columns, chunks: Array) -> Array:
    """Return the block digests of some chunks, one after the other."""
    counts = np.diff(columns.digest_end, prepend=0)[chunks]
    return columns.digests[expand_ranges(columns.digest_end[chunks] - counts, counts)]
