"""The index: what a checkpoint holds and where, as columns in one sealed safetensors file.

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
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from holdfast._format.columns import (
    FINGERPRINTS,
    LATE,
    SPECS,
    Array,
    Columns,
    ColumnSpec,
    ascending,
    check_rows,
    expand_ranges,
    possible_late,
    runs,
)
from holdfast._format.container import Header, Read, encode_header, read_header
from holdfast._format.digest import digest, digest_many, hex_digest
from holdfast._format.limits import INDEX_BYTES, INDEX_HEADER_BYTES, check_size, in_bounded_memory
from holdfast._format.names import FORMAT, is_data_file
from holdfast._values import shortened
from holdfast.errors import BadInput, CorruptCheckpoint

PAGE = 16 << 10
FENCE = 256
"""Every 256th name is in the fence, which is read whole; other names are read page by page."""

_HEADER_ROOM = 64 << 10
"""Bytes of an index's header, besides the metadata."""

_TAGS = {"<i8": "I64", "<u8": "U64", "<i4": "I32", "|u1": "U8"}
_NUMPY = {tag: np.dtype(code) for code, tag in _TAGS.items()}


def _heap(names: Sequence[str]) -> tuple[Array, Array]:
    coded = [name.encode() for name in names]
    ends = np.cumsum(np.fromiter(map(len, coded), np.int64, len(coded)), dtype="<i8")
    return np.frombuffer(b"".join(coded), "u1"), ends


_PLAIN = tuple(name for name in SPECS if name not in (*LATE, *FINGERPRINTS))
_TEXT, _ENDS = ColumnSpec("", np.dtype("u1"), False), ColumnSpec("", np.dtype("<i8"), False)
_STORED = SPECS | {
    "names": _TEXT,
    "name_end": _ENDS._replace(rows="T"),
    "fence": _TEXT,
    "fence_end": _ENDS._replace(rows="fence"),
    "file_names": _TEXT,
    "file_end": _ENDS._replace(rows="F"),
}
"""All columns of an index file. Names are stored as one text, and a column of the ends of each name."""


def encode(columns: Columns, metadata: dict[str, object]) -> bytes:
    """Return the bytes of an index file; `metadata` is JSON (step, grid, time, versions, notes)."""
    about = json.dumps(metadata)
    # `about` is stored as a JSON text inside of a JSON header: it is measured as it will be there, with its
    # quotes escaped a second time.
    if len(json.dumps(about, ensure_ascii=False).encode()) > INDEX_HEADER_BYTES - _HEADER_ROOM:
        raise BadInput(
            f"The notes and the grid of a checkpoint take {len(about)} bytes in its index, which is read "
            f"whole whenever it is opened; there is room for {INDEX_HEADER_BYTES - _HEADER_ROOM}.",
            hint="Keep less in the notes, or save it as a part of the state.",
        )
    arrays: dict[str, Array] = {}
    arrays["names"], arrays["name_end"] = _heap(columns.names)
    arrays["fence"], arrays["fence_end"] = _heap(columns.names[::FENCE])
    arrays["file_names"], arrays["file_end"] = _heap(columns.file_names)
    late = LATE if len(columns.late_tensor) else ()
    for name in (*_PLAIN, *late, *(FINGERPRINTS if len(columns.fingerprint_first) else ())):
        arrays[name] = np.ascontiguousarray(getattr(columns, name))
    # Safetensors forbids gaps. With the widest elements first, every column is aligned without any.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    entries, offset = [], 0
    for name in order:
        array = arrays[name]
        entries.append(
            (name, _TAGS[array.dtype.newbyteorder("<").str], array.shape, offset, offset + array.nbytes)
        )
        offset += array.nbytes
    body = b"".join(arrays[name].tobytes() for name in order)
    body += b"\0" * (-len(body) % 8)  # align the page digests, which follow
    entries.append(("padding", "U8", (len(body) - offset,), offset, len(body)))
    offset = len(body)
    pages = np.asarray([digest(body[i : i + PAGE]) for i in range(0, len(body), PAGE)], "<u8")
    entries.append(("pages", "U64", (len(pages),), offset, offset + pages.nbytes))
    offset += pages.nbytes
    entries.append(("seal", "U64", (2,), offset, offset + 16))
    described = {"format": FORMAT, "dims": str(columns.dims), "about": about}
    # The header contains all lengths, so it is encoded last. The seal covers every byte before it: the header
    # itself and, through the page digests, the body. The digest of the seal names this version.
    header = encode_header(entries, described)
    seal = np.asarray([digest(header), digest_many(pages)], "<u8")
    return b"".join((header, body, pages.tobytes(), seal.tobytes()))


class Index:
    """An index file opened for reading. It verifies every page before it uses it."""

    object_prefix = b""
    fetched_for = ""

    def __init__(self, read: Read, size: int, where: str) -> None:
        self.where = where
        self.size = size
        self._read = read
        self._pages: dict[int, bytes] = {}
        self.bytes_read = 0
        check_size(where, size, INDEX_BYTES)
        # The header locates the page digests, so it must be parsed before the seal can be checked; nothing
        # else uses it until then. A valid seal excludes accidents, not forgery, so columns are still checked
        # against each other.
        header = read_header(self._counted, size, where, INDEX_HEADER_BYTES)
        self._start = header.data_start
        self._header = header
        self.identity = self._check_seal(header)
        if (version := header.metadata.get("format")) != FORMAT:
            raise CorruptCheckpoint(f"{where} has format {version!r:.100}; this Holdfast reads {FORMAT!r}.")
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

    def _check_seal(self, header: Header) -> str:
        # The last 16 bytes are the seal: a digest of the header, and one of the page digests. After this
        # check the page digests can be trusted, and no page was read.
        ending = self._counted(self.size - 16, 16) if self.size >= 16 else b""
        seal = np.frombuffer(ending if len(ending) == 16 else b"", "<u8")
        if len(seal) != 2 or int(seal[0]) != digest(header.raw):
            raise CorruptCheckpoint(
                f"The header of {self.where} does not match its digest: the file is damaged."
            )
        try:
            start, stop = header.entries["pages"].data_offsets
        except KeyError:
            raise CorruptCheckpoint(f"{self.where} has no page digests: it is not an index.") from None
        # `pages` follows the body, so its offset is the body's length.
        if stop - start != -(-start // PAGE) * 8 or self.size != self._start + stop + 16:
            raise CorruptCheckpoint(
                f"{self.where} is {self.size} bytes long, which is not what its header says."
            )
        raw = self._counted(self._start + start, stop - start)
        if len(raw) != stop - start or int(seal[1]) != digest(raw):
            raise CorruptCheckpoint(
                f"The page digests of {self.where} do not match theirs: the file is damaged."
            )
        self._digests, self._body = np.frombuffer(raw, "<u8"), start
        # The seal covers all bytes before it, so its digest identifies this version: a load compares it on
        # all ranks.
        return hex_digest(digest(seal.tobytes()))

    def _bytes(self, start: int, stop: int) -> bytes:
        """Return verified bytes of the body. Whole pages are read; single pages are cached."""
        first, last = start // PAGE, -(-stop // PAGE)
        if start >= stop:
            return b""
        if last - first == 1 and first in self._pages:
            data = self._pages[first]
        else:
            low, high = first * PAGE, min(last * PAGE, self._body)
            data = self._counted(self._start + low, high - low)
            if len(data) != high - low:
                raise CorruptCheckpoint(f"{self.where} ends before its page {last}: it is truncated.")
            for page in range(first, last):
                part = data[(page - first) * PAGE : (page - first + 1) * PAGE] if last - first > 1 else data
                if digest(part) != int(self._digests[page]):
                    raise CorruptCheckpoint(
                        f"Page {page} of {self.where} does not match its digest: the file is damaged."
                    )
            # A page that is read alone is likely needed again, for a neighbouring row; up to 16 MiB are
            # cached.
            if last - first == 1 and len(self._pages) < 1024:
                self._pages[first] = data
        return data[start - first * PAGE : stop - first * PAGE]

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
        for name, spec in _STORED.items():
            if name in (*LATE, *FINGERPRINTS) and name not in (*self._late, *self._fingerprints):
                continue
            entry = self._header.entries[name]
            count, wide = entry.shape[0], (self.dims,) if spec.wide else ()
            start, stop = entry.data_offsets
            if (
                entry.dtype != _TAGS[spec.dtype.str]
                # A wide column without rows has the shape (0, 1), whatever d is (`columns._column`).
                or (entry.shape[1:] != wide and entry.shape != (0, 1))
                or stop - start != count * math.prod(wide) * spec.dtype.itemsize
                or count != counts.get(spec.rows, count)
                or stop > self._body
            ):
                raise ValueError(f"column {name!r}")

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Return rows `start` to `stop` of a column, verified."""
        entry = self._header.entries[name]
        dtype = _NUMPY[entry.dtype]
        rows = entry.shape[0]
        stop = rows if stop is None else stop
        # Row numbers come from other columns, which may be forged; a slice would clip them silently.
        if not 0 <= start <= stop <= rows:
            raise CorruptCheckpoint(
                f"{self.where} points at rows {start} to {stop} of column {name!r}, which has {rows}."
            )
        wide, low = entry.shape[1:], entry.data_offsets[0]
        step = dtype.itemsize * math.prod(wide)
        data = self._bytes(low + start * step, low + stop * step)
        return np.frombuffer(data, dtype).reshape(stop - start, *wide)

    def column_rows(self, name: str, rows: Array) -> Array:
        """Return some rows (ascending) of a column; read only the ranges that contain wanted rows."""
        if len(rows) == 0:
            return self.column(name, 0, 0)
        entry = self._header.entries[name]
        width = _NUMPY[entry.dtype].itemsize * math.prod(entry.shape[1:])
        # A gap of more than a page costs more than a seek.
        cuts = np.flatnonzero(np.diff(rows) > max(PAGE // width, 1)) + 1
        parts = [
            self.column(name, int(part[0]), int(part[-1]) + 1)[part - part[0]]
            for part in np.split(rows, cuts)
        ]
        values: Array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values

    # -- names ----------------------------------------------------------------------------

    def _strings(self, heap: str, ends: Array, before: int) -> list[str]:
        if not len(ends):
            return []
        if (np.diff(ends, prepend=before) < 0).any() or ends[-1] > self._rows[heap]:
            raise CorruptCheckpoint(f"Column {heap!r} of {self.where} has ends that do not ascend.")
        raw = self.column(heap, before, int(ends[-1])).tobytes()
        try:
            return [raw[a:b].decode() for a, b in pairwise([0, *(ends - before).tolist()])]
        except UnicodeDecodeError:
            raise CorruptCheckpoint(
                f"Column {heap!r} of {self.where} holds bytes that are not UTF-8."
            ) from None

    @in_bounded_memory
    def names(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the names of tensor rows `start` to `stop`, ascending."""
        stop = self.tensors if stop is None else stop
        before = int(self.column("name_end", start - 1, start)[0]) if start else 0
        listed = self._strings("names", self.column("name_end", start, stop), before)
        # Ordered by code points, which is also the order of UTF-8 bytes. `find` relies on it.
        if any(a >= b for a, b in pairwise(listed)):
            raise CorruptCheckpoint(
                f"The names in {self.where} do not ascend, so one stands twice or the order is lost."
            )
        return listed

    @in_bounded_memory
    def find(self, wanted: Sequence[str]) -> Array:
        """Return the tensor row of each wanted name, or -1; read only the pages that can contain them."""
        rows = np.full(len(wanted), -1, np.int64)
        if not self.tensors:
            return rows
        fence = self._strings("fence", self.column("fence_end"), 0)
        if any(a >= b for a, b in pairwise(fence)):
            raise CorruptCheckpoint(f"The names in the fence of {self.where} do not ascend.")
        # A wanted name can only be in the group with the greatest first name that is not greater than it. The
        # dtype is object, because NumPy's own text type drops NUL characters at the end of a name.
        groups: dict[int, list[int]] = {}
        fences, names = np.asarray(fence, dtype=object), np.asarray(wanted, dtype=object)
        after = np.searchsorted(fences, names, side="right").tolist()
        for index, group in enumerate(after):
            if group:
                groups.setdefault(group - 1, []).append(index)
        for first, last in runs(sorted(groups)):
            low = first * FENCE
            listed = self.names(low, min((last + 1) * FENCE, self.tensors))
            place = {name: row for row, name in enumerate(listed, low)}
            for group in range(first, last + 1):
                for index in groups[group]:
                    rows[index] = place.get(wanted[index], -1)
        return rows

    def find_one(self, name: str) -> int:
        return int(self.find([name])[0])

    def file_names(self) -> list[str]:
        """Return the data files, relative to the checkpoint's folder; refuse a name that could leave it."""
        names = self._strings("file_names", self.column("file_end"), 0)
        for name in names:
            if not is_data_file(name):
                raise CorruptCheckpoint(
                    f"{self.where} names the file {name!r}, which is not inside its data folder; it was not "
                    "opened."
                )
        return names

    # -- rows -----------------------------------------------------------------------------

    def _children(self, what: str, ends: str, rows: Array, total: int) -> tuple[Array, Array]:
        """Return how many chunks each tensor of `rows` has, and the rows of all these chunks; or the same of
        the digests of chunks. `ends`: the column that gives the end of each row's range; the row before it,
        wanted or not, gives its start."""
        stop = self.column_rows(ends, rows)
        start = np.where(rows > 0, self.column_rows(ends, np.maximum(rows - 1, 0)), 0)
        if not ascending(start, stop, total):
            raise CorruptCheckpoint(f"{self.where} counts {what}s that do not ascend.")
        counts = stop - start
        return counts, expand_ranges(start, counts)

    @in_bounded_memory
    def select(self, rows: Array | None = None) -> Columns:
        """Return the columns of some tensor rows (ascending), or of all, with their chunks, renumbered."""
        if rows is None:
            rows = np.arange(self.tensors)
            names = self.names()
        else:
            names = [name for first, last in runs(rows.tolist()) for name in self.names(first, last + 1)]
        counts, chunks = self._children("chunk", "chunk_end", rows, self.chunks)
        digest_counts, digests = self._children("digest", "digest_end", chunks, self._rows["digests"])
        columns = Columns(
            names,
            chunk_end=np.cumsum(counts, dtype="<i8"),
            digest_end=np.cumsum(digest_counts, dtype="<i8"),
            digests=self.column_rows("digests", digests),
            file_names=self.file_names(),
            file_size=self.column("file_size"),
            file_rank=self.column("file_rank"),
        )
        for name in ("dtype", "kind", "ndim", "shape"):
            setattr(columns, name, self.column_rows(name, rows))
        for name in ("offset", "size", "file", "position", "block"):
            setattr(columns, name, self.column_rows(name, chunks))
        check_rows(columns, self.where)
        return columns

    @in_bounded_memory
    def fingerprints(self) -> dict[str, Array]:
        """Return the two sums of every tensor, by name; empty if the save did not compute them."""
        if not self._fingerprints:
            return {}
        sums = np.stack([self.column(name) for name in self._fingerprints])
        counts, _ = self._children("chunk", "chunk_end", np.arange(self.tensors), self.chunks)
        # Sums over ranges that may be empty: differences of running sums, which are modulo 2^64, too.
        running = np.concatenate(
            [np.zeros((2, 1), np.uint64), np.cumsum(sums, axis=1, dtype=np.uint64)], axis=1
        )
        ends = np.cumsum(counts)
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
