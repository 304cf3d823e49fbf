"""Re-read a checkpoint and report all damage, not the first.

What is checked, and what can be said about it:

- the index: every page against its digest, then that its rows are possible and tile every tensor;
- each data file: that it is there, its size, and that its header lists just the index's chunks;
- each file's embedded index: its own digests, then that it says what the main index says;
- unless `quick`, every block of every chunk against its digest.

Every byte of a checkpoint is covered by one of these, so that any flipped bit is reported. One
file's damage never hides another's: what can't be read is a finding, and the check goes on.
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
from holdfast.format.columns import Array, Columns, unpad
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
SPAN = 256 << 20
"""Bytes of one thread's piece of work."""
MOST_GAPS = 100
"""Tensors that are not tiled are named up to this number."""
Progress = Callable[[int, int], None]
"""Told the bytes checked so far, and of how many."""


class Damage(msgspec.Struct, frozen=True):
    """One finding. `start` and `stop` are bytes of the file, None where no range can be given."""

    file: str
    problem: str
    tensor: str | None = None
    start: int | None = None
    stop: int | None = None


class Verified(msgspec.Struct, frozen=True):
    """A checkpoint's findings; it is whole if there are none."""

    path: str
    step: int | None
    quick: bool
    tensors: int
    chunks: int
    files: int
    bytes_checked: int
    """Of data; indexes and headers come on top."""
    seconds: float
    whole: bool
    damage: tuple[Damage, ...]


class VerifiedRun(msgspec.Struct, frozen=True):
    """The committed steps of a run."""

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
    # Steps of other formats have no digests, so there is nothing to verify them by.
    stores = [store.child(folder) for folder in own_steps(store).values()]
    steps = tuple(_verify(child, quick, threads, progress) for child in stores)
    return VerifiedRun(store.url, all(step.whole for step in steps), steps)


def _verify(store: Store, quick: bool, threads: int, progress: Progress) -> Verified:
    began, found = time.monotonic(), list[Damage]()
    opened = _open_index(store, found)
    if opened is None:
        return Verified(store.url, None, quick, 0, 0, 0, 0, time.monotonic() - began, False, tuple(found))
    columns, step = opened
    _coverage(columns, found)
    # Files before data: what is missing or cut short is known then, and `read` goes by it.
    check = _Check(store, columns, step, found)
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
        not found,
        tuple(found),
    )


# -- the index ----------------------------------------------------------------------------


def _open_index(store: Store, found: list[Damage]) -> tuple[Columns, int | None] | None:
    """All rows of the index, or findings and None: nothing that a damaged index says is believed."""
    try:
        reader = store.open(INDEX)
    except HoldfastError as error:
        found.append(Damage(INDEX, error.message))
        return None
    try:
        with closing(reader):
            index = Index(reader.read, reader.size, f"{store.url}/{INDEX}")
            # All bad pages are listed. `select` would raise at the first.
            pages = list(_bad_pages(reader))
            found += pages
            return None if pages else (index.select(), number(about(index).get("step")))
    except HoldfastError as error:
        found.append(Damage(INDEX, error.message))
        return None


def _bad_pages(reader: Reader) -> Iterator[Damage]:
    """Every page of an index (its seal is good) that does not match its digest."""
    header = read_header(reader.read, reader.size, INDEX)
    start, stop = header.entries["pages"].data_offsets
    digests = np.frombuffer(reader.read(header.data_start + start, stop - start), "<u8").tolist()
    for page, wanted in enumerate(digests):
        low, high = header.data_start + page * PAGE, header.data_start + min((page + 1) * PAGE, start)
        if digest(reader.read(low, high - low)) != wanted:
            yield Damage(INDEX, f"page {page} of the index does not match its digest", None, low, high)


def _coverage(columns: Columns, found: list[Damage]) -> None:
    """Tensors that are not tiled exactly once. The check names one at a time, so it is asked again."""
    kept = np.ones(len(columns.names), bool)
    tensor = columns.tensor_of_chunk()
    # Each turn looks at all tensors that are left, and takes as long as the check of a commit.
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
        found.append(
            Damage(
                INDEX,
                f"the chunks do not tile the tensor: {problem.kind} from {place} on",
                columns.names[row],
            )
        )
        kept[row] = False
    found.append(Damage(INDEX, f"more than {MOST_GAPS} tensors are not tiled; the others were not looked at"))


# -- files --------------------------------------------------------------------------------


class _Block(NamedTuple):
    position: int
    length: int
    digest: int
    chunk: int


class _Check:
    """One checkpoint's files against its index."""

    def __init__(self, store: Store, columns: Columns, step: int | None, found: list[Damage]) -> None:
        self.store, self.columns, self.step, self.found = store, columns, step, found
        self.moved: set[int] = set()
        """Chunks whose offset the commit found."""
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
        """Everything about a file but its data."""
        name, size = self.columns.file_names[file], int(self.columns.file_size[file])
        try:
            reader = self.store.open(name)
        except HoldfastError as error:
            self._lost(file, "the file is missing" if isinstance(error, NotFound) else error.message)
            return
        try:
            with closing(reader):
                # Also where its size is wrong: the blocks that are there are still compared.
                self.readable.append(file)
                if reader.size != size:
                    low, high = sorted((reader.size, size))
                    text = f"the file has {reader.size} bytes, but was written with {size}"
                    self.found.append(Damage(name, text, None, low, high))
                    self._beyond(file, reader.size)
                # Of a file that was cut short the header mostly is whole; by its present size the header
                # would be refused for placing chunks beyond it, which `_beyond` says better.
                header = read_header(reader.read, max(reader.size, size), name)
                # First, as it finds out which chunks the commit has moved (`moved`); the header has
                # their old offsets.
                self._embedded(file, reader, header)
                self._header(file, header)
        except HoldfastError as error:
            self.found.append(Damage(name, error.message))

    def _lost(self, file: int, problem: str) -> None:
        """A file that is not there, with the tensors that go with it."""
        self.found.append(Damage(self.columns.file_names[file], problem))
        self._beyond(file, 0)

    def _beyond(self, file: int, size: int) -> None:
        """The chunks of a file that end after its present size."""
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk])
            stop = start + int(self.nbytes[chunk])
            if stop > size:
                self._damage(chunk, "these bytes are not there", max(start, size), stop)

    def _damage(self, chunk: int, problem: str, start: int | None = None, stop: int | None = None) -> None:
        position = int(self.columns.position[chunk])
        self.found.append(
            Damage(
                self.columns.file_names[int(self.columns.file[chunk])],
                problem,
                self.columns.names[int(self.tensor[chunk])],
                position if start is None else start,
                position + int(self.nbytes[chunk]) if stop is None else stop,
            )
        )

    def _header(self, file: int, header: Header) -> None:
        """No digest covers a data file's header, so all it says is compared with the index."""
        name, rank = self.columns.file_names[file], str(int(self.columns.file_rank[file]))
        stated = {key: header.metadata.get(key) for key in ("format", "rank")}
        if stated != {"format": FORMAT, "rank": rank}:
            text = f"the header says {stated}, which is not what rank {rank} wrote"
            self.found.append(Damage(name, text, None, 0, header.data_start))
        # By place, not by name: two tensors may have entries that only apostrophes tell apart.
        listed = {entry.data_offsets: (key, entry) for key, entry in header.entries.items()}
        for chunk in self.chunks_of[file].tolist():
            start = int(self.columns.position[chunk]) - header.data_start
            row = listed.pop((start, start + int(self.nbytes[chunk])), None)
            if row is None or not self._as_written(chunk, *row):
                self._damage(chunk, "the file's header does not list this part as it was written")
        for key, entry in listed.values():
            if key != EMBEDDED and entry.data_offsets[0] < entry.data_offsets[1]:
                text = f"the file's header lists {key!r}, which the index does not know"
                self.found.append(Damage(name, text))

    def _as_written(self, chunk: int, name: str, entry: Entry) -> bool:
        """Has the header's row the name, type and shape that the writer gives this chunk?"""
        columns, row = self.columns, int(self.tensor[chunk])
        ndim, dtype = int(columns.ndim[row]), DTYPES[int(columns.dtype[row])]
        shape, expected = unpad(columns.size[chunk], ndim), columns.names[row]
        if shape != columns.shape_of(row):
            expected = name_of_chunk(expected, unpad(columns.offset[chunk], ndim))
        if chunk in self.moved:  # its rank named it by the offset that it knew
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
            self.found.append(Damage(name, text, None, 0, header.data_start))
            return
        start = header.data_start + entry.data_offsets[0]
        if reader.size < size:
            return  # said already: the file is cut short
        try:
            index = embedded_index(reader, start, size, name)
            said = index.embedded()
        except CorruptCheckpoint as error:
            self.found.append(Damage(name, error.message, None, start, size))
            return
        step = number(about(index).get("step"))
        # A file of another checkpoint may have been put in this one's place, and be whole.
        if said.file_names != [name] or said.file_size.tolist() != [size] or step != self.step:
            text = (
                f"the embedded index is of {said.file_names[:1]} and step {step}, not of this file and "
                "checkpoint"
            )
            self.found.append(Damage(name, text, None, start, size))
        self._compare(file, said, start, size)

    def _compare(self, file: int, said: Columns, start: int, stop: int) -> None:
        """Row by row, what the embedded index says of this file's chunks against the main index."""
        name, ours = self.columns.file_names[file], self.chunks_of[file]
        # Both in the order of the file: in the embedded index rows are sorted by its own tensors.
        theirs = np.argsort(said.position, kind="stable")
        if len(ours) != len(theirs):
            text = f"the embedded index lists {len(theirs)} chunks, the main index {len(ours)} of this file"
            self.found.append(Damage(name, text, None, start, stop))
            return
        late = said.chunk_late[theirs] if len(said.chunk_late) else np.full(len(theirs), -1)
        bound = np.flatnonzero(late >= 0)  # the commit has given these their offset along one axis
        axis = said.late_axis[late[bound]] - said.ndim[said.late_tensor[late[bound]]].astype(np.int64)
        placed = self.columns.offset[ours[bound], axis]
        moved = (said.late_start[late[bound]] == -1) | (said.offset[theirs[bound], axis] != placed)
        self.moved |= set(ours[bound[moved]].tolist())
        # What was read may be a view of the file's bytes, which can't be written to.
        said.offset = said.offset.copy()
        said.offset[theirs[bound], axis] = placed
        same = _chunk_rows(self.columns, ours) == _chunk_rows(said, theirs)
        counts = self.counts[ours]
        # Only with as many digests for each chunk do the two lists of digests stand side by side.
        if (counts == np.diff(said.digest_end, prepend=0)[theirs]).all():
            differ = _digests(self.columns, ours) != _digests(said, theirs)
            same[np.repeat(np.arange(len(ours)), counts)[differ]] = False
        else:
            same[:] = False
        for at in np.flatnonzero(~same).tolist():
            self._damage(
                int(ours[at]), "the embedded index and the main index describe this part differently"
            )

    # -- data -----------------------------------------------------------------------------

    def read(self, threads: int, progress: Progress) -> int:
        """Every block of every chunk against its digest; returns the bytes looked at."""
        total = sum(int(self.nbytes[self.chunks_of[file]].sum()) for file in self.readable)
        self.done = 0

        def tell(moved: int) -> None:
            with self.lock:
                self.done += moved
                progress(self.done, total)

        def work(span: tuple[int, list[int]]) -> list[Damage]:
            return self._span(*span, tell)

        with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="holdfast-verify") as pool:
            # In the order of the spans, so that a report is the same whichever thread is faster.
            for damage in pool.map(work, self._spans()):
                self.found += damage
        return self.done

    def _spans(self) -> Iterator[tuple[int, list[int]]]:
        """Neighbouring chunks of one file, up to SPAN bytes together."""
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
        # Opened once for each span, as a checkpoint may have more files than a process may open.
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
            _Block(position + at * block, min(block, nbytes - at * block), wanted, chunk)
            for at, wanted in enumerate(digests)
        ]

    def _joined(self, name: str, bad: list[tuple[_Block, str]]) -> list[Damage]:
        """Neighbouring bad blocks of one chunk as one finding."""
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
    """Blocks that follow each other in the file, to be read at once."""
    # Small chunks are neighbours in a file, and a read for each would take longer than its bytes.
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
    start = batch[0].position
    try:
        data = memoryview(reader.read(start, batch[-1].position + batch[-1].length - start))
    except HoldfastError as error:
        yield from ((block, error.message) for block in batch)
        return
    for block in batch:
        part = data[block.position - start : block.position - start + block.length]
        # A block that is cut short was told already (`_beyond`).
        if len(part) == block.length and digest(part) != block.digest:
            yield block, "the bytes do not match the digest they were written with"


def _chunk_rows(columns: Columns, chunks: Array) -> Array:
    """What identifies each chunk, as an array of tuples that compare one by one."""
    tensor = columns.tensor_of_chunk()[chunks].tolist()
    offset, size = columns.offset[chunks].tolist(), columns.size[chunks].tolist()
    position, block = columns.position[chunks].tolist(), columns.block[chunks].tolist()
    rows = np.empty(len(chunks), object)
    shapes: dict[int, tuple[str, int, int, tuple[int, ...]]] = {}
    for at, row in enumerate(tensor):
        if row not in shapes:
            kind, dtype = int(columns.kind[row]), int(columns.dtype[row])
            shapes[row] = (columns.names[row], kind, dtype, columns.shape_of(row))
        # Unpadded: an index pads to the widest tensor that it has, and a file may lack that one.
        ndim = len(shapes[row][3])
        box = tuple(offset[at][len(offset[at]) - ndim :]), tuple(size[at][len(size[at]) - ndim :])
        rows[at] = (*shapes[row], *box, position[at], block[at])
    return rows


def _digests(columns: Columns, chunks: Array) -> Array:
    """The block digests of some chunks, one after the other."""
    counts = np.diff(columns.digest_end, prepend=0)[chunks]
    ends = columns.digest_end[chunks]
    return columns.digests[np.repeat(ends - np.cumsum(counts), counts) + np.arange(int(counts.sum()))]
