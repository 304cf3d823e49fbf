"""The index: the tensors of a checkpoint and their locations, as columns in one sealed safetensors file.

One row per tensor, sorted by name; one row per chunk, grouped by tensor; one digest per block. Columns, not
records: a million chunks open in milliseconds, because opening reads only the header, and a query only the
pages that it needs. Every page (16 KiB) has a digest; the digests and the header have digests too. So damage
anywhere in an index is detected before it is used.

Every data file ends with an index of itself (entry `__holdfast__`) in the same format. A commit merges these,
and `holdfast reindex` starts from them. They also carry *witnesses*: digests of replicas that this rank holds
and another rank writes.

Shapes and boxes are padded with leading ones to the widest tensor's number of dimensions, so that each is a
two-dimensional array. docs/format.md specifies the layout.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice, repeat
from operator import lt

import numpy as np

from holdfast._core.base.values import shortened
from holdfast._core.format.columns import (
    FINGERPRINTS,
    LATE,
    SPECS,
    Array,
    Columns,
    ascending,
    check_rows,
    expand_ranges,
    is_range,
    possible_late,
    tied_rows,
)
from holdfast._core.format.container import Header, Read, read_header
from holdfast._core.format.digest import digest, hex_digest
from holdfast._core.format.index_layout import FENCE, NUMPY, PLAIN, STORED, TAGS
from holdfast._core.format.index_pages import PAGE, Spans, open_pages
from holdfast._core.format.limits import (
    INDEX_BYTES,
    INDEX_HEADER_BYTES,
    bounded_memory,
    check_size,
    in_bounded_memory,
)
from holdfast._core.format.names import (
    FORMAT,
    NARROW,
    REFERRING,
    SHARED,
    is_data_file,
    is_of_other_attempt,
    split_reference,
)
from holdfast.errors import CorruptCheckpoint

SMALL = 16 * PAGE
"""An index up to this size in bytes is always read whole: a query would read most of its pages anyway."""
LARGE = 16 << 20
"""An index up to this size in bytes is read whole if all of it will be used. A larger one is read in parts,
so that its header is checked first."""
_OF_TENSOR = ("name_end", *(name for name in PLAIN if SPECS[name].rows == "T"))
_OF_CHUNK = tuple(name for name in PLAIN if SPECS[name].rows == "C")
_OF_FILE = ("file_names", "file_end", "file_size", "file_rank")
_ALWAYS = tuple(name for name in STORED if name not in (*LATE, *FINGERPRINTS))


class Index:
    """An index file opened for reading. It verifies every page before it uses it."""

    object_prefix = b""
    fetched_for = ""

    def __init__(self, read: Read, size: int, where: str, whole: bool = False) -> None:
        """read: returns bytes of the index. size: its length in bytes. whole: all of it will be used, so read
        it at once, unless it is very large."""
        self.where = where
        self.size = size
        self._read = read
        self.bytes_read = 0
        check_size(where, size, INDEX_BYTES)
        self._get: Read = self._counted
        if size <= (LARGE if whole else SMALL):
            with bounded_memory(where):
                held = self._counted(0, size)
            self._get = lambda start, length: held[start : start + length]
        # The header locates the page digests, so it must be parsed before the seal can be checked; nothing
        # else uses it until then. A valid seal excludes accidents, not forgery, so columns are still checked
        # against each other.
        header = read_header(self._get, size, where, INDEX_HEADER_BYTES)
        self._header = header
        self._pages, seal = open_pages(self._get, header, size, where)
        # The seal covers all bytes before it, so its digest identifies this version: a load compares it on
        # all ranks.
        self.identity = hex_digest(digest(seal))
        if (version := header.metadata.get("format")) not in (FORMAT, NARROW, SHARED, REFERRING):
            raise CorruptCheckpoint(
                f"{where} has format {version!r:.100}; this Holdfast reads {FORMAT!r}, {NARROW!r}, "
                f"{SHARED!r} and {REFERRING!r}."
            )
        self._narrow, self._shared = version != FORMAT, version in (SHARED, REFERRING)
        self._refers = version == REFERRING
        self._describe(header)

    @in_bounded_memory
    def _describe(self, header: Header) -> None:
        """Read the header's metadata, and the number of rows of each column."""
        try:
            self.about: dict[str, object] = json.loads(header.metadata["about"])
            if not isinstance(self.about, dict):
                raise ValueError("'about', which is not an object")
            self.dims = int(header.metadata["dims"])
            if not 1 <= self.dims <= 255:
                raise ValueError("'dims'")
            self._rows = {name: entry.shape[0] for name, entry in header.entries.items() if entry.shape}
            self.tensors, self.chunks = self._rows["dtype"], self._rows["file"]
            self._check_shapes()
        except (LookupError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(
                f"The header of {self.where} lacks or garbles {shortened(str(error))}."
            ) from None

    # -- bytes, verified ------------------------------------------------------------------

    def _counted(self, start: int, length: int) -> bytes:
        data = self._read(start, length)
        self.bytes_read += len(data)
        return data

    def _check_shapes(self) -> None:
        """Raise ValueError if related columns differ in their number of rows, or a column has a wrong
        type."""
        rows = self._rows
        counts = {"T": self.tensors, "C": self.chunks, "G": rows["digests"], "F": rows["file_end"]}
        counts |= {"W": rows["witness_digest"], "fence": -(-self.tensors // FENCE)}
        self._late = LATE if any(name in rows for name in LATE) else ()
        if self._late:
            counts["L"] = rows["late_tensor"]
        self._fingerprints = FINGERPRINTS if any(name in rows for name in FINGERPRINTS) else ()
        # Other columns are ignored: a later version may add some (docs/format.md, Versions).
        for name in (*_ALWAYS, *self._late, *self._fingerprints):
            entry, spec = self._header.entries[name], STORED[name]
            count, wide = entry.shape[0], (self.dims,) if spec.wide else ()
            start, stop = entry.data_offsets
            narrow = self._narrow and spec.dtype.kind == "i" and entry.dtype in ("U8", "U16", "U32")
            if (
                (entry.dtype != TAGS[spec.dtype.str] and not narrow)
                # A wide column without rows has the shape (0, 1), whatever d is (`columns._column`).
                or (entry.shape[1:] != wide and entry.shape != (0, 1))
                or stop - start != count * math.prod(wide) * NUMPY[entry.dtype].itemsize
                or count != counts.get(spec.rows, count)
                or stop > len(self._pages.content)
            ):
                raise ValueError(f"column {name!r}")

    def _width(self, name: str) -> int:
        """Return the bytes of a row of a column."""
        entry = self._header.entries[name]
        return NUMPY[entry.dtype].itemsize * math.prod(entry.shape[1:])

    def _check_range(self, name: str, start: int, stop: int) -> None:
        rows = self._rows[name]
        # Row numbers come from other columns, which may be forged; a slice would clip them silently.
        if not 0 <= start <= stop <= rows:
            raise CorruptCheckpoint(
                f"{self.where} points at rows {start} to {stop} of column {name!r}, which has {rows}."
            )

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows `start` to `stop` of a column, verified."""
        entry, step = self._header.entries[name], self._width(name)
        stop = entry.shape[0] if stop is None else stop
        self._check_range(name, start, stop)
        low = entry.data_offsets[0]
        data = self._pages.between(low + start * step, low + stop * step)
        values = data.view(NUMPY[entry.dtype]).reshape(stop - start, *entry.shape[1:])
        return values.astype(STORED[name].dtype, copy=False)

    def column_rows(self, name: str, rows: Array | None) -> Array:
        """Return some rows (ascending) of a column, or all; read only the pages that contain them."""
        if rows is None:
            return self.column(name)
        if len(rows) == 0 or is_range(rows):
            first = int(rows[0]) if len(rows) else 0
            return self.column(name, first, first + len(rows))
        self._pages.require([self._span(name, rows)])
        entry = self._header.entries[name]
        content = self._pages.content[slice(*entry.data_offsets)]
        values = content.view(NUMPY[entry.dtype]).reshape(entry.shape)[rows]
        return values.astype(STORED[name].dtype, copy=False)

    def _span(self, name: str, rows: Array, before: bool = False) -> Spans:
        """Return the byte ranges of rows (ascending) of a column. before: include the row before each."""
        low, step = self._header.entries[name].data_offsets[0], self._width(name)
        if len(rows) == 0:
            return rows, rows
        self._check_range(name, int(rows[0]), int(rows[-1]) + 1)
        if is_range(rows):
            rows, count = rows[:1], len(rows)
        else:
            count = 1
        return low + np.maximum(rows - before, 0) * step, low + (rows + count) * step

    def _prefetch(self, names: Iterable[str], rows: Array | None) -> None:
        """Read rows (ascending), or all, of several columns together: adjacent ones need a single read."""
        if rows is None:
            offsets = np.asarray([self._header.entries[name].data_offsets for name in names])
            self._pages.require([(offsets[:, 0], offsets[:, 1])])
            return
        self._pages.require([self._span(name, rows, before=name.endswith("_end")) for name in names])

    def _ends(self, name: str, rows: Array | None) -> tuple[Array, Array]:
        """Return the start and stop of the range of each row (None: of all rows), from the column of ends."""
        if rows is None:
            stop = self.column(name)
            return np.concatenate([[0], stop[:-1]])[: len(stop)], stop
        self._pages.require([self._span(name, rows, before=True)])
        stop = self.column_rows(name, rows)
        if len(rows) == 0 or rows[0] > 0:
            return self.column_rows(name, rows - 1), stop
        # The first row has none before it.
        return np.concatenate([[0], self.column_rows(name, rows[1:] - 1)]), stop

    # -- names ----------------------------------------------------------------------------

    def _strings(self, heap: str, ends: str, rows: Array | None = None) -> list[str]:
        """Return the strings of some rows (ascending), or of all, in a heap. ends: the column of their
        ends."""
        starts, stops = self._ends(ends, rows)
        if not ascending(starts, stops, self._rows[heap]):
            raise CorruptCheckpoint(f"Column {heap!r} of {self.where} has ends that do not ascend.")
        low = self._header.entries[heap].data_offsets[0]
        self._pages.require([(low + starts, low + stops)])
        content = self._pages.content.data[low:]
        listed = zip(starts.tolist(), stops.tolist(), strict=True)
        try:
            if len(starts) and (starts[1:] == stops[:-1]).all():
                first = int(starts[0])
                text = str(content[first : int(stops[-1])], "utf-8")
                if len(text) == stops[-1] - first:  # ASCII only: slice one string instead of decoding each
                    return [text[a - first : b - first] for a, b in listed]
            return [str(content[a:b], "utf-8") for a, b in listed]
        except UnicodeDecodeError:
            raise CorruptCheckpoint(
                f"Column {heap!r} of {self.where} holds bytes that are not UTF-8."
            ) from None

    def _listed(self, rows: Array | None = None) -> list[str]:
        listed = self._strings("names", "name_end", rows)
        # Ordered by code points, which is also the order of UTF-8 bytes. `find` relies on it.
        if not all(map(lt, listed, islice(listed, 1, None))):
            raise CorruptCheckpoint(
                f"The names in {self.where} do not ascend, so one stands twice or the order is lost."
            )
        return listed

    @cached_property
    def _names(self) -> list[str]:
        return self._listed()

    @cached_property
    def _fence(self) -> list[str]:
        fence = self._strings("fence", "fence_end")
        if not all(map(lt, fence, islice(fence, 1, None))):
            raise CorruptCheckpoint(f"The names in the fence of {self.where} do not ascend.")
        return fence

    @in_bounded_memory
    def names(self) -> list[str]:
        """Return the names of all tensors, ascending."""
        return list(self._names)

    @in_bounded_memory
    def find(self, wanted: Sequence[str]) -> Array:
        """Return the tensor row of each wanted name, or -1; if few are wanted, read only the pages that can
        contain them."""
        if 4 * len(wanted) > self.tensors:
            place = dict(zip(self._names, range(self.tensors), strict=True))
        else:
            # A wanted name can only be in the group with the greatest first name that is not greater than it.
            groups = {bisect_right(self._fence, name) for name in wanted} - {0}
            starts = (np.asarray(sorted(groups), np.int64) - 1) * FENCE
            rows = expand_ranges(starts, np.minimum(self.tensors - starts, FENCE))
            place = dict(zip(self._listed(rows), rows.tolist(), strict=True))
        return np.fromiter(map(place.get, wanted, repeat(-1)), np.int64, len(wanted))

    def find_one(self, name: str) -> int:
        return int(self.find([name])[0])

    def file_names(self) -> list[str]:
        """Return the data files, relative to the checkpoint's folder; refuse a name that could leave it,
        except references to other steps of its run."""
        names = self._strings("file_names", "file_end")
        for name in names:
            if not is_data_file(name) and not (self._refers and split_reference(name)):
                raise CorruptCheckpoint(
                    f"{self.where} names the file {name!r}, which is not inside its data folder; it was not "
                    "opened."
                )
        return names

    def _own_files(self) -> list[str]:
        """Return the data files; refuse a file of another attempt, which has the values of another save."""
        names, attempt = self.file_names(), self.about.get("attempt")
        for name in names:
            if is_of_other_attempt(name, attempt):
                raise CorruptCheckpoint(
                    f"{self.where} was written by the attempt {attempt}, but names {name}, which another "
                    "attempt wrote: the values in it are those of another save.",
                    hint="Load another step. `holdfast reindex` makes a new index if all files of one "
                    "attempt are there.",
                )
        return names

    # -- rows -----------------------------------------------------------------------------

    def _children(self, what: str, ends: str, rows: Array | None, total: int) -> tuple[Array, Array | None]:
        """Return the number of chunks of each tensor in `rows`, and the rows of these chunks (None: all); or
        the same for the digests of chunks. `ends`: the column with the end of each row's range."""
        start, stop = self._ends(ends, rows)
        if not ascending(start, stop, total):
            raise CorruptCheckpoint(f"{self.where} counts {what}s that do not ascend.")
        counts = stop - start
        return counts, None if counts.sum() == total else expand_ranges(start, counts)

    @in_bounded_memory
    def select(self, rows: Array | None = None) -> Columns:
        """Return the columns of some tensor rows (ascending), or of all, with their chunks, renumbered."""
        # Rows of several columns are read together: adjacent ones in a single read.
        if rows is None or len(rows) == self.tensors:
            rows = None
            self._prefetch(_ALWAYS, None)
        else:
            self._prefetch(_OF_FILE, None)
            self._prefetch(_OF_TENSOR, rows)
        counts, chunks = self._children("chunk", "chunk_end", rows, self.chunks)
        if rows is not None:
            self._prefetch(_OF_CHUNK, chunks)
        digest_counts, digests = self._children("digest", "digest_end", chunks, self._rows["digests"])
        columns = Columns(
            list(self._names) if rows is None else self._listed(rows),
            chunk_end=counts.cumsum(dtype="<i8"),
            digest_end=digest_counts.cumsum(dtype="<i8"),
            digests=self.column_rows("digests", digests),
            file_names=self._own_files(),
            file_size=self.column("file_size"),
            file_rank=self.column("file_rank"),
            shared=self._shared,
        )
        for name in ("dtype", "kind", "ndim", "shape"):
            setattr(columns, name, self.column_rows(name, rows))
        for name in ("offset", "size", "file", "position", "block"):
            setattr(columns, name, self.column_rows(name, chunks))
        check_rows(columns, self.where)
        return columns

    def tied(self) -> dict[int, int]:
        """Map rows of tensors that share all their bytes with another tensor to that tensor's row."""
        return tied_rows(self.select()) if self._shared else {}

    @in_bounded_memory
    def fingerprints(self) -> dict[str, Array]:
        """Return the two sums of every tensor, by name; empty if the save did not compute them."""
        if not self._fingerprints:
            return {}
        sums = np.stack([self.column(name) for name in self._fingerprints])
        counts, _ = self._children("chunk", "chunk_end", None, self.chunks)
        # Sums over ranges that may be empty: differences of running sums, which are modulo 2^64, too.
        running = np.concatenate([np.zeros((2, 1), np.uint64), sums.cumsum(axis=1, dtype=np.uint64)], axis=1)
        ends = counts.cumsum()
        return dict(zip(self.names(), (running[:, ends] - running[:, ends - counts]).T, strict=True))

    @in_bounded_memory
    def embedded(self) -> Columns:
        """Return all columns, including those that only the index of a data file has."""
        columns = self.select()
        for name in ("tensor", "offset", "size", "block", "digest"):
            setattr(columns, f"witness_{name}", self.column(f"witness_{name}"))
        tensor_rows = columns.witness_tensor
        if len(tensor_rows) and (tensor_rows.min() < 0 or tensor_rows.max() >= len(columns.names)):
            raise CorruptCheckpoint(f"{self.where} has witnesses of tensors that it does not list.")
        for name in (*self._late, *self._fingerprints):
            setattr(columns, name, self.column(name))
        if self._late and not possible_late(columns):
            raise CorruptCheckpoint(f"{self.where} has late-bound shards that can't be.")
        return columns
