"""The columns of an index in memory: numbers of a whole checkpoint, or of the part that somebody asked
for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.layout.tensor import DTYPES

Array = npt.NDArray[Any]
"""A column: its dtype differs from one to another, so a type can't say it."""


def _int64() -> Array:
    return np.zeros(0, "<i8")


@dataclass
class Columns:
    """A whole index in memory. T tensors, C chunks, G block digests, F files, W witnesses, d dims."""

    names: list[str] = field(default_factory=list)
    dtype: Array = field(default_factory=lambda: np.zeros(0, "u1"))
    kind: Array = field(default_factory=lambda: np.zeros(0, "u1"))
    ndim: Array = field(default_factory=lambda: np.zeros(0, "u1"))
    shape: Array = field(default_factory=lambda: np.zeros((0, 1), "<i8"))
    """T x d, leading ones."""
    chunk_end: Array = field(default_factory=_int64)
    """T: the row after a tensor's last chunk; its first is the previous tensor's end."""
    offset: Array = field(default_factory=lambda: np.zeros((0, 1), "<i8"))
    size: Array = field(default_factory=lambda: np.zeros((0, 1), "<i8"))
    """C x d: the chunk's box, its elements row-major in the file."""
    file: Array = field(default_factory=lambda: np.zeros(0, "<i4"))
    position: Array = field(default_factory=_int64)
    """C: bytes from the start of the file."""
    block: Array = field(default_factory=_int64)
    """C: bytes a digest block has in this chunk."""
    digest_end: Array = field(default_factory=_int64)
    digests: Array = field(default_factory=lambda: np.zeros(0, "<u8"))
    file_names: list[str] = field(default_factory=list)
    file_size: Array = field(default_factory=_int64)
    file_rank: Array = field(default_factory=lambda: np.zeros(0, "<i4"))
    witness_tensor: Array = field(default_factory=_int64)
    witness_offset: Array = field(default_factory=lambda: np.zeros((0, 1), "<i8"))
    witness_size: Array = field(default_factory=lambda: np.zeros((0, 1), "<i8"))
    witness_block: Array = field(default_factory=_int64)
    """W: which block's digest it is, or -1 for the digest of all block digests."""
    witness_digest: Array = field(default_factory=lambda: np.zeros(0, "<u8"))
    late_tensor: Array = field(default_factory=_int64)
    late_axis: Array = field(default_factory=_int64)
    late_lane: Array = field(default_factory=_int64)
    late_position: Array = field(default_factory=_int64)
    late_length: Array = field(default_factory=_int64)
    late_start: Array = field(default_factory=_int64)
    """L: shards whose offset others' lengths may tell, as `layout.deferred_offset.DeferredOffset`; only in
    the index of a data file."""
    chunk_late: Array = field(default_factory=_int64)
    witness_late: Array = field(default_factory=_int64)
    """C and W, if L is not 0: the shard that each is of, or -1."""

    @property
    def dims(self) -> int:
        return int(self.shape.shape[1])

    def itemsizes(self) -> Array:
        """T: bytes an element."""
        sizes: Array = ITEMSIZE[self.dtype]
        return sizes

    def tensor_of_chunk(self) -> Array:
        """C: the tensor row each chunk belongs to."""
        counts = np.diff(self.chunk_end, prepend=0)
        return np.repeat(np.arange(len(self.names)), counts)

    def chunk_bytes(self) -> Array:
        """C: bytes of each chunk."""
        nbytes: Array = np.prod(self.size, axis=1) * self.itemsizes()[self.tensor_of_chunk()]
        return nbytes

    def shape_of(self, row: int) -> tuple[int, ...]:
        return unpad(self.shape[row], int(self.ndim[row]))


LATE = tuple(name for name in Columns.__dataclass_fields__ if "late" in name)
"""Columns that a file has only if there are such shards."""
ITEMSIZE = np.asarray([dtype.size for dtype in DTYPES], np.int64)


def unpad(values: Array, ndim: int) -> tuple[int, ...]:
    """The last `ndim` of a padded row."""
    return tuple(values[len(values) - ndim :].tolist())


def pad(values: Sequence[Sequence[int]], dims: int, fill: int) -> Array:
    """Rows of differing length as a rectangle, padded in front."""
    out = np.full((len(values), dims), fill, "<i8")
    lengths = np.fromiter(map(len, values), np.int64, len(values))
    for length in np.unique(lengths).tolist():
        if length:
            rows = np.flatnonzero(lengths == length).tolist()
            out[rows, dims - length :] = np.asarray([values[row] for row in rows], "<i8")
    return out


def runs(values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive integers as (first, last)."""
    start = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[i - 1] + 1:
            yield values[start], values[i - 1]
            start = i


def row_runs(rows: Array) -> Iterator[tuple[int, int]]:
    for first, last in runs(rows.tolist()):
        yield first, last + 1
