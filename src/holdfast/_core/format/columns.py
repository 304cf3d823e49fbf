"""The columns of an index in memory: of a whole checkpoint, or of selected tensors.

Numbers from a file are used as positions and sizes, so none is used before `check_rows` and `possible_late`
have checked it.
"""
# ruff: noqa: RUF009 (`_column` gives dataclass fields, which ruff can't see)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._core.format.limits import OBJECT_BYTES, check_size
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import DTYPES, KINDS, OBJECT, Dims, TensorSpec
from holdfast.errors import CorruptCheckpoint

Array = npt.NDArray[Any]
"""A column. Columns have different dtypes, so the type is open."""


def _column(rows: str, dtype: str = "<i8", wide: bool = False) -> Array:
    """Declare a column of `dtype`, empty by default. Columns with equal `rows` have equal lengths; a `wide`
    column has d numbers per row."""
    return field(
        default_factory=partial(np.zeros, (0, 1) if wide else 0, dtype),
        metadata={"spec": ColumnSpec(rows, np.dtype(dtype), wide)},
    )


class ColumnSpec(NamedTuple):
    """The kind of a column's rows (a letter, see `Columns`), and how the column is stored."""

    rows: str
    dtype: np.dtype[np.generic]
    wide: bool


@dataclass
class Columns:
    """A whole index in memory.

    Lengths: T tensors, C chunks, G block digests, F files, W witnesses, L shards with a deferred offset; d is
    the largest number of dimensions. Tensors are sorted by name, chunks are grouped by tensor, digests by
    chunk. Wide columns have shape (rows, d). Rows with fewer dimensions are padded in front: shapes and sizes
    with ones, offsets with zeros.
    """

    names: list[str] = field(default_factory=list)
    dtype: Array = _column("T", "u1")
    """Index into `layout.tensor.DTYPES`."""
    kind: Array = _column("T", "u1")
    """Tensor or object: index into `layout.tensor.KINDS`."""
    ndim: Array = _column("T", "u1")
    shape: Array = _column("T", wide=True)
    chunk_end: Array = _column("T")
    """The row after a tensor's last chunk. Its first chunk is at the previous tensor's end."""
    offset: Array = _column("C", wide=True)
    size: Array = _column("C", wide=True)
    """Offset and size are the chunk's box. Its elements are row-major in the file."""
    file: Array = _column("C", "<i4")
    position: Array = _column("C")
    """Bytes from the start of the file."""
    block: Array = _column("C")
    """Bytes per digest block in this chunk."""
    digest_end: Array = _column("C")
    """The row after a chunk's last digest. Its first digest is at the previous chunk's end."""
    digests: Array = _column("G", "<u8")
    file_names: list[str] = field(default_factory=list)
    file_size: Array = _column("F")
    file_rank: Array = _column("F", "<i4")
    witness_tensor: Array = _column("W")
    witness_offset: Array = _column("W", wide=True)
    witness_size: Array = _column("W", wide=True)
    witness_block: Array = _column("W")
    """The block that the digest covers, or -1 for the digest of all block digests."""
    witness_digest: Array = _column("W", "<u8")
    late_tensor: Array = _column("L")
    late_axis: Array = _column("L")
    late_lane: Array = _column("L")
    late_position: Array = _column("L")
    late_length: Array = _column("L")
    late_start: Array = _column("L")
    """Shards with a deferred offset: the fields of `layout.deferred_offset.DeferredOffset`. Only the index of
    a data file has them."""
    fingerprint_first: Array = _column("C", "<u8")
    fingerprint_second: Array = _column("C", "<u8")
    """The two sums of each chunk's fingerprint (`format.fingerprint`), if the save computed them."""
    chunk_late: Array = _column("C")
    witness_late: Array = _column("W")
    """If L is not 0: the row among the L that each chunk (or witness) is a part of, or -1."""
    shared: bool = False
    """Whether chunks of several tensors may share the same bytes."""

    @property
    def dims(self) -> int:
        return int(self.shape.shape[1])

    def itemsizes(self) -> Array:
        """Return (T): bytes per element."""
        sizes: Array = ITEMSIZE[self.dtype]
        return sizes

    def tensor_of_chunk(self) -> Array:
        """Return (C): the tensor row of each chunk."""
        counts = counts_of(self.chunk_end)
        return np.arange(len(self.names)).repeat(counts)

    def chunk_bytes(self) -> Array:
        """Return (C): bytes of each chunk."""
        nbytes: Array = np.prod(self.size, axis=1) * self.itemsizes()[self.tensor_of_chunk()]
        return nbytes

    def chunks_of(self, row: int) -> slice:
        """Return the range of a tensor's chunks."""
        return slice(int(self.chunk_end[row - 1]) if row else 0, int(self.chunk_end[row]))

    def digests_of(self, chunk: int) -> Array:
        """Return the digests of a chunk's blocks."""
        first = int(self.digest_end[chunk - 1]) if chunk else 0
        digests: Array = self.digests[first : int(self.digest_end[chunk])]
        return digests

    def shape_of(self, row: int) -> tuple[int, ...]:
        return unpad(self.shape[row], int(self.ndim[row]))

    def spec_of(self, row: int) -> TensorSpec:
        return TensorSpec(self.names[row], int(self.dtype[row]), self.shape_of(row), int(self.kind[row]))

    def specs(self) -> list[TensorSpec]:
        """Return all tensors."""
        dims, shapes = self.dims, zip(self.shape.tolist(), self.ndim.tolist(), strict=True)
        unpadded = [(*shape[dims - ndim :],) for shape, ndim in shapes]
        rows = zip(self.names, self.dtype.tolist(), unpadded, self.kind.tolist(), strict=True)
        # Mapped, because `TensorSpec(...)` calls Python code for each row.
        return [*map(partial(tuple.__new__, TensorSpec), rows)]


SPECS: dict[str, ColumnSpec] = {f.name: f.metadata["spec"] for f in fields(Columns) if f.metadata}
"""How each column is stored. Names of tensors and files are stored as text (`index`)."""
LATE = tuple(name for name in SPECS if "late" in name)
"""Columns of an index file only if it has shards with deferred offsets."""
FINGERPRINTS = ("fingerprint_first", "fingerprint_second")
"""Columns of an index file only if the save computed fingerprints."""
FOREIGN_BLOCK = 4 << 20
ITEMSIZE = np.asarray([dtype.size for dtype in DTYPES], np.int64)


def unpad(values: Array, ndim: int) -> tuple[int, ...]:
    """Return the last `ndim` numbers of a padded row."""
    return tuple(values[len(values) - ndim :].tolist())


def pad(values: Sequence[Dims], dims: int, fill: int) -> Array:
    """Return rows of different lengths as one array (rows, dims), padded in front."""
    # Each different row is converted once: 100,000 layers and experts have the same few shapes.
    number = {row: index for index, row in enumerate(dict.fromkeys(values))}
    rows = np.asarray([(fill,) * (dims - len(row)) + row for row in number], "<i8").reshape(-1, dims)
    return rows[np.fromiter(map(number.__getitem__, values), np.int64, len(values))]


class ForeignChunk(NamedTuple):
    """A chunk in a file of another format."""

    box: Box
    file: str
    position: int
    nbytes: int


def foreign_columns(tensors: Sequence[tuple[TensorSpec, int]], chunks: Sequence[ForeignChunk]) -> Columns:
    """Return tensors of another format, each with the number of its chunks, as columns without digests; the
    caller adds the sizes of the files."""
    files = sorted({chunk.file for chunk in chunks})
    number = {name: index for index, name in enumerate(files)}
    specs = [spec for spec, _ in tensors]
    dims = max((len(spec.shape) for spec in specs), default=1) or 1
    return Columns(
        names=[spec.name for spec in specs],
        dtype=np.asarray([spec.dtype for spec in specs], "u1"),
        kind=np.asarray([spec.kind for spec in specs], "u1"),
        ndim=np.asarray([len(spec.shape) for spec in specs], "u1"),
        shape=pad([spec.shape for spec in specs], dims, 1),
        chunk_end=np.cumsum([count for _, count in tensors], dtype="<i8"),
        offset=pad([chunk.box.offset for chunk in chunks], dims, 0),
        size=pad([chunk.box.shape for chunk in chunks], dims, 1),
        file=np.asarray([number[chunk.file] for chunk in chunks], "<i4"),
        position=np.asarray([chunk.position for chunk in chunks], "<i8"),
        # Without digests, a block is only the unit in which a reader reads parts of a chunk.
        block=np.clip(np.asarray([chunk.nbytes for chunk in chunks], "<i8"), 1, FOREIGN_BLOCK),
        digest_end=np.zeros(len(chunks), "<i8"),
        file_names=files,
        file_size=np.full(len(files), -1, "<i8"),
        file_rank=np.zeros(len(files), "<i4"),
    )


def counts_of(ends: Array) -> Array:
    """Return the length of each row's range, from the column of range ends."""
    counts: Array = ends.copy()
    counts[1:] -= ends[:-1]
    return counts


def expand_ranges(starts: Array, counts: Array) -> Array:
    """Concatenate ranges of integers: `counts[0]` numbers from `starts[0]` on, and so on."""
    # Each start, minus the total count of the ranges before it, which the arange includes.
    bases: Array = (starts - counts.cumsum() + counts).repeat(counts)
    return bases + np.arange(len(bases))


def is_range(rows: Array) -> bool:
    """Return whether rows, at least one, are consecutive numbers."""
    return int(rows[-1] - rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _check_boxes(columns: Columns, where: str) -> None:
    """Check that shapes and boxes are countable and padded with ones, and that objects are vectors of
    bytes."""
    if not _possible(columns.size):
        raise CorruptCheckpoint(f"{where} holds a chunk of impossible size.")
    padding = np.arange(columns.dims) < columns.dims - columns.ndim[:, None].astype(np.int64)
    bytes_only = (columns.ndim == 1) & (columns.dtype == 0)
    if (
        not _possible(columns.shape)
        or (padding & (columns.shape != 1)).any()
        or ((columns.kind == OBJECT) & ~bytes_only).any()
    ):
        raise CorruptCheckpoint(f"{where} gives a tensor or an object an impossible shape.")
    # An object is read whole into memory. A tensor is read block by block into its target.
    objects = np.where(columns.kind == OBJECT, columns.shape[:, -1], 0)
    if (objects > OBJECT_BYTES).any():
        row = int(np.argmax(objects))
        check_size(f"The object {columns.names[row][:200]!r} of {where}", int(objects[row]), OBJECT_BYTES)


def check_rows(columns: Columns, where: str) -> None:
    """Raise CorruptCheckpoint if numbers that are used as rows or positions are out of range."""
    files = len(columns.file_names)
    if len(columns.file_size) != files or len(columns.file_rank) != files:
        raise CorruptCheckpoint(f"{where} does not agree with itself on how many files there are.")
    if len(columns.names) and (
        columns.dtype.max() >= len(DTYPES)
        or columns.kind.max() >= len(KINDS)
        or columns.ndim.max() > columns.dims
    ):
        raise CorruptCheckpoint(
            f"{where} uses a dtype, kind or number of dimensions that this format does not have."
        )
    _check_boxes(columns, where)
    if not len(columns.file):
        return
    if columns.file.min() < 0 or columns.file.max() >= files:
        raise CorruptCheckpoint(f"{where} refers to a file that it does not name.")
    nbytes = columns.chunk_bytes()
    room = columns.file_size[columns.file] - nbytes  # subtracted, as a sum could overflow
    bad = (columns.position < 0) | (columns.block < 1) | (room < 0) | (columns.position > room)
    if bad.any():
        name = columns.names[int(columns.tensor_of_chunk()[bad.nonzero()[0][0]])]
        raise CorruptCheckpoint(f"{where} places a chunk of {name!r} outside its file.")
    # Readers compute the number of blocks by this rule, and find a digest by its block number.
    if (counts_of(columns.digest_end) != -(-nbytes // columns.block)).any():
        raise CorruptCheckpoint(f"{where} has too few or too many digests for a chunk.")
    stop = columns.position + nbytes
    # Sorted by file and position, two neighbours overlap if any two chunks do. Empty chunks are left out:
    # they overlap nothing, but would separate two chunks that do.
    order = np.lexsort((stop, columns.position, columns.file))
    order = order[nbytes[order] > 0]
    same = columns.file[order][1:] == columns.file[order][:-1]
    start, stop = columns.position[order], stop[order]
    overlap = same & (start[1:] < stop[:-1])
    if columns.shared:  # two chunks may share all their bytes, but not overlap in part
        overlap &= (start[1:] != start[:-1]) | (stop[1:] != stop[:-1])
    if overlap.any():
        raise CorruptCheckpoint(f"{where} places two chunks on the same bytes of a file.")


def tied_rows(columns: Columns) -> dict[int, int]:
    """Map rows of tensors whose bytes are all shared with an earlier tensor to the first such row: weights
    that were tied when they were saved."""
    if not columns.shared or not len(columns.file):
        return {}
    _, number, count = np.unique(
        np.stack([columns.file, columns.position], axis=1), axis=0, return_inverse=True, return_counts=True
    )
    # Only tensors with a chunk at a shared position are compared one by one.
    tensor = columns.tensor_of_chunk()
    rows = np.unique(tensor[count[number.reshape(-1)] > 1])
    first: dict[tuple[object, ...], int] = {}
    found: dict[int, int] = {}
    for row in rows.tolist():
        chunks = columns.chunks_of(row)
        key = (
            *columns.spec_of(row)[1:],
            *(getattr(columns, name)[chunks].tobytes() for name in ("file", "position", "offset", "size")),
        )
        if (one := first.setdefault(key, row)) != row:
            found[row] = one
    return found


def ascending(before: Array, ends: Array, rows: int) -> bool:
    """Return whether [before, ends) are disjoint ranges within `rows` rows; without integer overflow."""
    inside = (before >= 0) & (before <= ends) & (ends <= rows)
    return bool(inside.all()) and int((ends - before).sum()) <= rows


def _possible(sides: Array) -> bool:
    """Return whether an int64 can count the bytes of boxes with these sides."""
    # In floats, which become infinite where integers would wrap. No element has more than 16 bytes.
    with np.errstate(over="ignore"):
        volumes = np.prod(np.maximum(sides, 1).astype(float), axis=1)
    return bool((sides >= 0).all() and (volumes * 16 <= float(1 << 62)).all())


def possible_late(columns: Columns) -> bool:
    """Return whether the late columns refer to existing rows, and to axes that their tensors have."""
    rows, tensor = len(columns.late_tensor), columns.late_tensor
    if not ((tensor >= 0) & (tensor < len(columns.names))).all():
        return False
    inside = (columns.late_axis >= 0) & (columns.late_axis < columns.ndim[tensor])
    counted = (columns.late_length >= 0) & (columns.late_position >= 0)
    small = np.maximum(columns.late_length, np.maximum(columns.late_start, -2 - columns.late_start)) < 1 << 48
    links = np.concatenate([columns.chunk_late, columns.witness_late])
    if not (inside & counted & small).all() or not ((links >= -1) & (links < rows)).all():
        return False
    of = np.concatenate([columns.tensor_of_chunk(), columns.witness_tensor])
    # A chunk that refers to another tensor's shard would be moved by that shard's offset.
    return bool((tensor[links[links >= 0]] == of[links >= 0]).all())
