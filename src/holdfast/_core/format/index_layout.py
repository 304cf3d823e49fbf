"""Lay out and encode an index file. docs/format.md specifies the layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import FINGERPRINTS, LATE, SPECS, Array, Columns, ColumnSpec
from holdfast._core.format.container import encode_header
from holdfast._core.format.digest import digest, digest_many
from holdfast._core.format.index_pages import PAGE
from holdfast._core.format.limits import INDEX_HEADER_BYTES
from holdfast._core.format.names import FORMAT, NARROW, REFERRING, SHARED, split_reference
from holdfast.errors import BadInput

FENCE = 256
"""Every 256th name is in the fence, which is read whole; other names are read page by page."""

_HEADER_ROOM = 64 << 10
"""Bytes of an index's header, besides the metadata."""

TAGS = {"<i8": "I64", "<u8": "U64", "<i4": "I32", "<u4": "U32", "<u2": "U16", "|u1": "U8"}
NUMPY = {tag: np.dtype(code) for code, tag in TAGS.items()}


def _heap(names: Sequence[str]) -> tuple[Array, Array]:
    text = "".join(names)
    coded = text.encode()
    # In most checkpoints the names are ASCII; then no name is encoded separately.
    lengths = map(len, names if len(coded) == len(text) else map(str.encode, names))
    return np.frombuffer(coded, "u1"), np.fromiter(accumulate(lengths), "<i8", len(names))


PLAIN = tuple(name for name in SPECS if name not in (*LATE, *FINGERPRINTS))
_TEXT, _ENDS = ColumnSpec("", np.dtype("u1"), False), ColumnSpec("", np.dtype("<i8"), False)
STORED = SPECS | {
    "names": _TEXT,
    "name_end": _ENDS._replace(rows="T"),
    "fence": _TEXT,
    "fence_end": _ENDS._replace(rows="fence"),
    "file_names": _TEXT,
    "file_end": _ENDS._replace(rows="F"),
}
"""All columns of an index file. Names are stored as one text, and a column of the ends of each name."""


def _narrowed(values: Array) -> Array:
    """Return integers in the narrowest unsigned type that holds them; unchanged if some are negative."""
    if values.dtype.kind != "i" or not values.size:
        return values
    largest = int(values.view(f"<u{values.itemsize}").max())  # of a negative number above all others
    return values if largest >= 1 << 32 else values.astype(np.min_scalar_type(largest))


class LaidOut(NamedTuple):
    """An index file whose columns can still be filled in: their positions are fixed, their values are not."""

    header: bytes
    parts: list[Buffer]
    """The columns in order; together they are the body."""
    body: int
    """Size of the body in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + self.body + 8 * -(-self.body // PAGE) + 16

    def sealed(self) -> bytes:
        """Return the bytes of the file, with the columns as they are now."""
        body = memoryview(b"".join(self.parts))
        pages = np.asarray([digest(body[i : i + PAGE]) for i in range(0, len(body), PAGE)], "<u8")
        # The seal covers every byte before it: the header itself and, through the page digests, the body. The
        # digest of the seal names this version.
        seal = np.asarray([digest(self.header), digest_many(pages)], "<u8")
        return b"".join((self.header, body, pages.tobytes(), seal.tobytes()))


def encode(columns: Columns, metadata: dict[str, object], narrow: bool = False) -> bytes:
    """Return the bytes of an index file. The arguments are those of `lay_out`."""
    return lay_out(columns, metadata, narrow).sealed()


def lay_out(columns: Columns, metadata: dict[str, object], narrow: bool = False) -> LaidOut:
    """Lay out an index file; `metadata` is JSON (step, grid, time, versions, notes).

    narrow: integers take as few bytes as they need, so the positions of columns depend on the values. Without
    it the parts are the columns themselves, if they are contiguous.
    """
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
    for name in (*PLAIN, *late, *(FINGERPRINTS if len(columns.fingerprint_first) else ())):
        arrays[name] = np.ascontiguousarray(getattr(columns, name))
    if narrow:
        arrays = {name: _narrowed(array) for name, array in arrays.items()}
    # Safetensors forbids gaps. With the widest elements first, every column is aligned without any.
    order = sorted(arrays, key=lambda name: -arrays[name].dtype.itemsize)
    # Aligns the page digests, which follow.
    arrays["padding"] = np.zeros(-sum(array.nbytes for array in arrays.values()) % 8, "u1")
    order.append("padding")
    entries, start = [], 0
    for name in order:
        array = arrays[name]
        entries.append((name, TAGS[array.dtype.str], array.shape, start, start + array.nbytes))
        start += array.nbytes
    pages = -(-start // PAGE)
    entries.append(("pages", "U64", (pages,), start, start + 8 * pages))
    entries.append(("seal", "U64", (2,), start + 8 * pages, start + 8 * pages + 16))
    version = SHARED if columns.shared else NARROW if narrow else FORMAT
    if any(map(split_reference, columns.file_names)):
        version = REFERRING
    described = {"format": version, "dims": str(columns.dims), "about": about}
    return LaidOut(encode_header(entries, described), [arrays[name] for name in order], start)
