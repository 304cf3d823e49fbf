"""The index: what a checkpoint holds and where, as columns in one sealed safetensors file.

A row a tensor, sorted by name; a row a chunk, grouped by tensor; a digest a block. Columns, not
records: a million chunks open in milliseconds, because only a header is read until somebody
asks, and then only the pages that answer. Every page (16 KiB) has a digest, the digests have
one, the header has one, so nothing that a damaged index says is believed.

Every data file ends with an index of itself (entry `__holdfast__`), in this same format: that is
what a commit merges and what `holdfast reindex` starts from. There it also carries *witnesses*:
digests of replicas that this rank holds and another rank writes.

Shapes and boxes are padded with leading ones to the widest tensor's number of dimensions, so
that they are plain rectangles of numbers. The layout is specified in docs/format.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from holdfast.errors import CorruptCheckpoint
from holdfast.format.columns import LATE, Array, Columns
from holdfast.format.container import Header, Read, encode_header, read_header, safe_data_name
from holdfast.format.digest import digest, digest_many, hex_digest
from holdfast.layout.tensor import DTYPES, KINDS, OBJECT

FORMAT = "holdfast-1"
PAGE = 16 << 10
FENCE = 256
"""Every 256th name stands in the fence, which is read whole; the others are read by the page."""

_TAGS = {"<i8": "I64", "<u8": "U64", "<i4": "I32", "|u1": "U8"}
_NUMPY = {tag: np.dtype(code) for code, tag in _TAGS.items()}


def _heap(names: Sequence[str]) -> tuple[Array, Array]:
    coded = [name.encode() for name in names]
    ends = np.cumsum(np.fromiter(map(len, coded), np.int64, len(coded)), dtype="<i8")
    return np.frombuffer(b"".join(coded), "u1"), ends


_HEAPS = ("names", "file_names")
_PLAIN = tuple(f.name for f in fields(Columns) if f.name not in (*_HEAPS, *LATE))


def encode(columns: Columns, metadata: dict[str, Any]) -> bytes:
    """The bytes of an index file; `metadata` is JSON (step, grid, time, versions, notes)."""
    arrays: dict[str, Array] = {}
    arrays["names"], arrays["name_end"] = _heap(columns.names)
    arrays["fence"], arrays["fence_end"] = _heap(columns.names[::FENCE])
    arrays["file_names"], arrays["file_end"] = _heap(columns.file_names)
    for name in (*_PLAIN, *(LATE if len(columns.late_tensor) else ())):
        arrays[name] = np.ascontiguousarray(getattr(columns, name))
    # Widest elements first keeps every column aligned without holes, which safetensors forbids.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    entries, at = [], 0
    for name in order:
        array = arrays[name]
        entries.append((name, _TAGS[array.dtype.newbyteorder("<").str], array.shape, at, at + array.nbytes))
        at += array.nbytes
    body = b"".join(arrays[name].tobytes() for name in order)
    body += b"\0" * (-len(body) % 8)
    entries.append(("padding", "U8", (len(body) - at,), at, len(body)))
    at = len(body)
    pages = np.asarray([digest(body[i : i + PAGE]) for i in range(0, len(body), PAGE)], "<u8")
    entries.append(("pages", "U64", (len(pages),), at, at + pages.nbytes))
    at += pages.nbytes
    entries.append(("seal", "U64", (2,), at, at + 16))
    described = {
        "format": FORMAT,
        "dims": str(columns.dims),
        "about": json.dumps(metadata, ensure_ascii=False),
    }
    header = encode_header(entries, described)
    seal = np.asarray([digest(header), digest_many(pages)], "<u8")
    return b"".join((header, body, pages.tobytes(), seal.tobytes()))


class Index:
    """An index file opened for reading; verifies every page before it believes it."""

    object_prefix = b""

    def __init__(self, read: Read, size: int, where: str) -> None:
        self.where = where
        self.size = size
        self._read = read
        self._pages: dict[int, bytes] = {}
        self.bytes_read = 0
        header = read_header(self._counted, size, where)
        self._start = header.data_start
        self._header = header
        self.identity = self._check_seal(header)
        if header.metadata.get("format") != FORMAT:
            raise CorruptCheckpoint(
                f"{where} has format {header.metadata.get('format')!r}; this Holdfast reads {FORMAT!r}."
            )
        try:
            self.about: dict[str, Any] = json.loads(header.metadata["about"])
            if not isinstance(self.about, dict):
                raise ValueError("'about', which is not an object")
            self.dims = int(header.metadata["dims"])
            if not 1 <= self.dims <= 255:
                raise ValueError("'dims'")
            self.tensors, self.chunks = self._rows("dtype"), self._rows("file")
            self._check_shapes()
        except (LookupError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"The header of {where} lacks or garbles {error}.") from None

    # -- bytes, verified ------------------------------------------------------------------

    def _counted(self, start: int, length: int) -> bytes:
        data = self._read(start, length)
        self.bytes_read += len(data)
        return data

    def _check_seal(self, header: Header) -> str:
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
        raw = self._counted(self._start + start, stop - start)
        if len(raw) % 8 or int(seal[1]) != digest(raw):
            raise CorruptCheckpoint(
                f"The page digests of {self.where} do not match theirs: the file is damaged."
            )
        self._digests, self._body = np.frombuffer(raw, "<u8"), start
        if len(self._digests) != -(-start // PAGE) or self.size != self._start + stop + 16:
            raise CorruptCheckpoint(
                f"{self.where} is {self.size} bytes long, which is not what its header says."
            )
        return hex_digest(digest(seal.tobytes()))

    def _bytes(self, start: int, stop: int) -> bytes:
        """Verified bytes of the body; whole pages are read, and kept when they are few."""
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
            if last - first == 1 and len(self._pages) < 1024:
                self._pages[first] = data
        return data[start - first * PAGE : stop - first * PAGE]

    def _rows(self, name: str) -> int:
        return int(self._header.entries[name].shape[0])

    def _check_shapes(self) -> None:
        """Columns that go together must agree on their number of rows, and have the right types."""
        t, c = self.tensors, self.chunks
        empty = Columns(shape=np.zeros((0, self.dims), "<i8"))
        self._late = LATE if any(name in self._header.entries for name in LATE) else ()
        expected = {"name_end": t, "kind": t, "ndim": t, "shape": t, "chunk_end": t}
        expected |= dict.fromkeys(("offset", "size", "position", "block", "digest_end"), c)
        expected |= {
            f"witness_{name}": self._rows("witness_digest") for name in ("tensor", "offset", "size", "block")
        }
        expected |= {
            "fence_end": -(-t // FENCE),
            "file_size": self._rows("file_end"),
            "file_rank": self._rows("file_end"),
        }
        if self._late:
            expected |= dict.fromkeys(LATE, self._rows("late_tensor"))
            expected |= {"chunk_late": c, "witness_late": self._rows("witness_digest")}
        plain = (*_PLAIN, *self._late)
        for name in (*plain, "name_end", "fence_end", "file_end", "names", "fence", "file_names"):
            entry = self._header.entries[name]
            like: Array = (
                getattr(empty, name)
                if name in plain
                else np.zeros(0, "u1" if name in (*_HEAPS, "fence") else "<i8")
            )
            tag = _TAGS[like.dtype.newbyteorder("<").str]
            rows, wide = entry.shape[0], (self.dims,) if like.ndim == 2 else ()
            volume = rows * (self.dims if wide else 1)
            stored = entry.data_offsets[1] - entry.data_offsets[0]
            if (
                entry.dtype != tag
                or (entry.shape[1:] != wide and entry.shape != (0, 1))
                or stored != volume * like.dtype.itemsize
                or rows != expected.get(name, rows)
                or entry.data_offsets[1] > self._body
            ):
                raise ValueError(f"column {name!r}")

    def column(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows `start` to `stop` of a column, verified."""
        entry = self._header.entries[name]
        dtype = _NUMPY[entry.dtype]
        rows = int(entry.shape[0])
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows:
            raise CorruptCheckpoint(
                f"{self.where} points at rows {start} to {stop} of column {name!r}, which has {rows}."
            )
        wide = tuple(int(s) for s in entry.shape[1:])
        step = dtype.itemsize * int(np.prod(wide, dtype=np.int64))
        low = entry.data_offsets[0]
        return np.frombuffer(self._bytes(low + start * step, low + stop * step), dtype).reshape(
            stop - start, *wide
        )

    def column_rows(self, name: str, rows: Array) -> Array:
        """Some rows (ascending) of a column: reads only stretches that hold wanted rows."""
        if len(rows) == 0:
            return self.column(name, 0, 0)
        entry = self._header.entries[name]
        width = _NUMPY[entry.dtype].itemsize * math.prod(entry.shape[1:])
        cuts = np.flatnonzero(np.diff(rows) > max(PAGE // width, 1)) + 1  # a gap of a page is worth a seek
        parts = [
            self.column(name, int(part[0]), int(part[-1]) + 1)[part - part[0]]
            for part in np.split(rows, cuts)
        ]
        found: Array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return found

    # -- names ----------------------------------------------------------------------------

    def _strings(self, heap: str, ends: Array, before: int) -> list[str]:
        if len(ends) == 0:
            return []
        if (np.diff(ends, prepend=before) < 0).any() or ends[-1] > self._rows(heap):
            raise CorruptCheckpoint(f"Column {heap!r} of {self.where} has ends that do not ascend.")
        raw = self.column(heap, before, int(ends[-1])).tobytes()
        try:
            cuts = [0, *(ends - before).tolist()]
            return [raw[a:b].decode() for a, b in pairwise(cuts)]
        except UnicodeDecodeError:
            raise CorruptCheckpoint(
                f"Column {heap!r} of {self.where} holds bytes that are not UTF-8."
            ) from None

    def names(self, start: int = 0, stop: int | None = None) -> list[str]:
        """The names of tensor rows `start` to `stop`, ascending."""
        stop = self.tensors if stop is None else stop
        before = int(self.column("name_end", start - 1, start)[0]) if start else 0
        found = self._strings("names", self.column("name_end", start, stop), before)
        if any(a >= b for a, b in pairwise(found)):
            raise CorruptCheckpoint(
                f"The names in {self.where} do not ascend, so one stands twice or the order is lost."
            )
        return found

    def find(self, wanted: Sequence[str]) -> Array:
        """The tensor row of each wanted name, or -1; reads only the pages that can hold them."""
        rows = np.full(len(wanted), -1, np.int64)
        if not self.tensors:
            return rows
        fence = self._strings("fence", self.column("fence_end"), 0)
        if any(a >= b for a, b in pairwise(fence)):
            raise CorruptCheckpoint(f"The names in the fence of {self.where} do not ascend.")
        groups: dict[int, list[int]] = {}
        starts = (
            np.searchsorted(np.asarray(fence, dtype=object), np.asarray(wanted, dtype=object), side="right")
            - 1
        )
        for at, group in enumerate(starts.tolist()):
            if group >= 0:
                groups.setdefault(group, []).append(at)
        for first, last in _runs(sorted(groups)):
            low = first * FENCE
            names = self.names(low, min((last + 1) * FENCE, self.tensors))
            place = {name: low + i for i, name in enumerate(names)}
            for group in range(first, last + 1):
                for at in groups[group]:
                    rows[at] = place.get(wanted[at], -1)
        return rows

    def find_one(self, name: str) -> int:
        return int(self.find([name])[0])

    def file_names(self) -> list[str]:
        """Data files, relative to the checkpoint's folder; a name that could leave it is refused."""
        found = self._strings("file_names", self.column("file_end"), 0)
        for name in found:
            if not safe_data_name(name):
                raise CorruptCheckpoint(
                    f"{self.where} names the file {name!r}, which is not inside its data folder; it was not opened."
                )
        return found

    # -- rows -----------------------------------------------------------------------------

    def select(self, rows: Array | None = None) -> Columns:
        """The columns of some tensor rows (ascending), or of all; chunk rows come along, renumbered."""
        if rows is None:
            rows = np.arange(self.tensors)
            names = self.names()
        else:
            names = [name for a, b in _row_runs(rows) for name in self.names(a, b)]
        ends = self.column_rows("chunk_end", rows)
        before = (
            np.where(rows > 0, self.column_rows("chunk_end", np.maximum(rows - 1, 0)), 0)
            if len(rows)
            else ends
        )
        counts = ends - before
        if not _ascending(before, ends, self.chunks):
            raise CorruptCheckpoint(f"{self.where} counts chunks that do not ascend.")
        chunks = np.repeat(before - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
        digest_end = self.column_rows("digest_end", chunks)
        digest_before = (
            np.where(chunks > 0, self.column_rows("digest_end", np.maximum(chunks - 1, 0)), 0)
            if len(chunks)
            else digest_end
        )
        digest_counts = digest_end - digest_before
        if not _ascending(digest_before, digest_end, self._rows("digests")):
            raise CorruptCheckpoint(f"{self.where} counts digests that do not ascend.")
        digests = np.repeat(
            digest_before - np.cumsum(digest_counts) + digest_counts, digest_counts
        ) + np.arange(int(digest_counts.sum()))
        found = Columns(
            names=names,
            dtype=self.column_rows("dtype", rows),
            kind=self.column_rows("kind", rows),
            ndim=self.column_rows("ndim", rows),
            shape=self.column_rows("shape", rows),
            chunk_end=np.cumsum(counts, dtype="<i8"),
            offset=self.column_rows("offset", chunks),
            size=self.column_rows("size", chunks),
            file=self.column_rows("file", chunks),
            position=self.column_rows("position", chunks),
            block=self.column_rows("block", chunks),
            digest_end=np.cumsum(digest_counts, dtype="<i8"),
            digests=self.column_rows("digests", digests),
            file_names=self.file_names(),
            file_size=self.column("file_size"),
            file_rank=self.column("file_rank"),
        )
        self._check_rows(found)
        return found

    def embedded(self) -> Columns:
        """All columns, also those that only the index of a data file has."""
        columns = self.select()
        for name in ("tensor", "offset", "size", "block", "digest"):
            setattr(columns, f"witness_{name}", self.column(f"witness_{name}"))
        at = columns.witness_tensor
        if len(at) and (at.min() < 0 or at.max() >= len(columns.names)):
            raise CorruptCheckpoint(f"{self.where} has witnesses of tensors that it does not list.")
        for name in self._late:
            setattr(columns, name, self.column(name))
        if self._late and not _possible_late(columns):
            raise CorruptCheckpoint(f"{self.where} has late-bound shards that can't be.")
        return columns

    def _check_boxes(self, found: Columns) -> None:
        """Shapes and boxes must be countable, padded with ones, and one row of bytes for objects."""
        if not _possible(found.size):
            raise CorruptCheckpoint(f"{self.where} holds a chunk of impossible size.")
        padding = np.arange(self.dims) < self.dims - found.ndim[:, None].astype(np.int64)
        bytes_only = (found.ndim == 1) & (found.dtype == 0)
        if (
            not _possible(found.shape)
            or (padding & (found.shape != 1)).any()
            or ((found.kind == OBJECT) & ~bytes_only).any()
        ):
            raise CorruptCheckpoint(f"{self.where} gives a tensor or an object an impossible shape.")

    def _check_rows(self, found: Columns) -> None:
        """Numbers that are used as positions must be possible ones."""
        files = len(found.file_names)
        if len(found.file_size) != files or len(found.file_rank) != files:
            raise CorruptCheckpoint(f"{self.where} does not agree with itself on how many files there are.")
        if len(found.names) and (
            found.dtype.max() >= len(DTYPES) or found.kind.max() >= len(KINDS) or found.ndim.max() > self.dims
        ):
            raise CorruptCheckpoint(
                f"{self.where} uses a dtype, kind or number of dimensions that format {FORMAT} does not have."
            )
        self._check_boxes(found)
        if not len(found.file):
            return
        if found.file.min() < 0 or found.file.max() >= files:
            raise CorruptCheckpoint(f"{self.where} refers to a file that it does not name.")
        nbytes = found.chunk_bytes()
        room = found.file_size[found.file] - nbytes  # compared so that no sum can overflow
        bad = (found.position < 0) | (found.block < 1) | (room < 0) | (found.position > room)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise CorruptCheckpoint(
                f"{self.where} places a chunk of {found.names[int(found.tensor_of_chunk()[row])]!r} outside its file."
            )
        if (np.diff(found.digest_end, prepend=0) != -(-nbytes // found.block)).any():
            raise CorruptCheckpoint(f"{self.where} has too few or too many digests for a chunk.")
        stop = found.position + nbytes
        order = np.lexsort((stop, found.position, found.file))
        order = order[nbytes[order] > 0]
        same = found.file[order][1:] == found.file[order][:-1]
        if (same & (found.position[order][1:] < stop[order][:-1])).any():
            raise CorruptCheckpoint(f"{self.where} places two chunks on the same bytes of a file.")


def _ascending(before: Array, ends: Array, rows: int) -> bool:
    """Are these different stretches of so many rows? Compared so that no difference can overflow."""
    inside = (before >= 0) & (before <= ends) & (ends <= rows)
    return bool(inside.all()) and int((ends - before).sum()) <= rows


def _possible(sides: Array) -> bool:
    """Are these sides of boxes whose bytes an int64 can count?"""
    with np.errstate(over="ignore"):
        volumes = np.prod(np.maximum(sides, 1).astype(float), axis=1)
    return bool((sides >= 0).all() and (volumes * 16 <= float(1 << 62)).all())


def _possible_late(found: Columns) -> bool:
    """Do the late columns point at rows that are there, and at axes that tensors have?"""
    rows, tensor = len(found.late_tensor), found.late_tensor
    if not ((tensor >= 0) & (tensor < len(found.names))).all():
        return False
    inside = (found.late_axis >= 0) & (found.late_axis < found.ndim[tensor])
    counted = (found.late_length >= 0) & (found.late_position >= 0)
    small = np.maximum(found.late_length, np.maximum(found.late_start, -2 - found.late_start)) < 1 << 48
    links = np.concatenate([found.chunk_late, found.witness_late])
    if not (inside & counted & small).all() or not ((links >= -1) & (links < rows)).all():
        return False
    of = np.concatenate([found.tensor_of_chunk(), found.witness_tensor])
    return bool((tensor[links[links >= 0]] == of[links >= 0]).all())


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive integers as (first, last)."""
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            yield values[start], values[i - 1]
            start = i


def _row_runs(rows: Array) -> Iterator[tuple[int, int]]:
    for first, last in _runs(rows.tolist()):
        yield first, last + 1
