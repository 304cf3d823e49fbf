"""Compare two checkpoints by name: names in one only, changed shapes or dtypes, changed content.

If both have a chunk with the same box and the same blocks, their digests are compared and no data is read.
Otherwise (the same tensor saved in another layout) the bytes of both are read, slab by slab, so that memory
stays bounded whatever the size of the tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
import numpy as np

from holdfast.errors import CorruptCheckpoint, HoldfastError
from holdfast.format import objects
from holdfast.format.columns import Array, Columns, unpad
from holdfast.format.index import Index
from holdfast.io.index_file import open_index
from holdfast.io.raw_read import SLAB, read_all, read_box, slabs
from holdfast.layout.box import Box
from holdfast.layout.tensor import DTYPES, OBJECT
from holdfast.maintenance.target import Place, about, checkpoint_at, number
from holdfast.plan.merge import what
from holdfast.store.base import NotFound, Store
from holdfast.store.run_folder import step_of

DECODED_OBJECT = 64 << 20
"""Objects larger than this are compared by their digests alone."""
_NUMPY = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8", "complex128": "<c16"}
_NUMPY |= {
    f"{sign}int{bits}": f"<{sign[:1] or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_NUMPY |= {"bool": "|u1"}


class Changed(msgspec.Struct, frozen=True):
    """A name whose kind, dtype or shape differs."""

    name: str
    a: str
    b: str


class Content(msgspec.Struct, frozen=True):
    """A name whose content differs. `a` and `b` are the values of an object; the rest is about a tensor."""

    name: str
    kind: str
    a: str | None = None
    b: str | None = None
    parts: int = 0
    """Chunks of A that differ."""
    of: int = 0
    """Chunks of A."""
    first: tuple[int, ...] | None = None
    """Offset of the first part that differs."""
    elements: int | None = None
    """How many elements differ (only if values were asked for)."""
    largest: float | None = None
    """The largest absolute difference; None where it is no number."""


class Misplaced(msgspec.Struct, frozen=True):
    """An index of another step than the folder that it is in."""

    path: str
    folder_step: int
    index_step: int


class Compared(msgspec.Struct, frozen=True):
    """The differences of two checkpoints."""

    a: str
    b: str
    same: bool
    """All names are equal, and each index belongs to its folder."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[Changed, ...]
    content: tuple[Content, ...]
    equal: int
    """Names that are in both and equal."""
    bytes_read: int
    """Bytes of data that were read; 0 if digests were enough."""
    misplaced: tuple[Misplaced, ...] = ()


@dataclass
class _Side:
    store: Store
    index: Index
    columns: Columns
    """Rows of the names that both have, in the same order."""

    def chunks(self, row: int) -> tuple[int, int]:
        return (int(self.columns.chunk_end[row - 1]) if row else 0), int(self.columns.chunk_end[row])

    def digests(self, first: int, last: int) -> Array:
        before = int(self.columns.digest_end[first - 1]) if first else 0
        return self.columns.digests[before : int(self.columns.digest_end[last - 1]) if last else 0]

    def box(self, chunk: int, ndim: int) -> Box:
        return Box(unpad(self.columns.offset[chunk], ndim), unpad(self.columns.size[chunk], ndim))

    def one(self, name: str) -> Columns:
        return self.index.select(self.index.find([name]))


@dataclass
class _Work:
    a: _Side
    b: _Side
    values: bool
    slab: int
    progress: Callable[[int], None]
    bytes_read: int = 0
    content: list[Content] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)

    def row(self, row: int) -> None:
        a, b = self.a.columns, self.b.columns
        name = a.names[row]
        # Objects first: their lengths, which are their shapes, may differ although the values are equal.
        kinds = int(a.kind[row]), int(b.kind[row])
        if kinds == (OBJECT, OBJECT):
            if not self._same_digests(row):
                self._object(name)
            return
        mine, theirs = (
            (kind, int(side.dtype[row]), side.shape_of(row)) for kind, side in zip(kinds, (a, b), strict=True)
        )
        if mine != theirs:
            self.changed.append(Changed(name, what(*mine), what(*theirs)))
        elif not self._same_digests(row):
            self._tensor(row, name)

    def _same_digests(self, row: int) -> bool:
        """Return whether the tensor has the same chunks in both, with equal digests."""
        (a0, a1), (b0, b1) = self.a.chunks(row), self.b.chunks(row)
        a, b = self.a.columns, self.b.columns
        ndim = int(a.ndim[row])
        return (
            a1 - a0 == b1 - b0
            and ndim == int(b.ndim[row])
            # Without the padding in front, whose width depends on the other tensors of the index.
            and np.array_equal(a.offset[a0:a1, a.dims - ndim :], b.offset[b0:b1, b.dims - ndim :])
            and np.array_equal(a.size[a0:a1, a.dims - ndim :], b.size[b0:b1, b.dims - ndim :])
            and np.array_equal(a.block[a0:a1], b.block[b0:b1])
            and np.array_equal(self.a.digests(a0, a1), self.b.digests(b0, b1))
        )

    def _object(self, name: str) -> None:
        """Compare objects by value: different bytes may be equal values (a dict in another order)."""
        columns = [side.one(name) for side in (self.a, self.b)]
        sizes = [one.shape_of(0)[0] for one in columns]
        # Decoding holds both values in memory at once.
        if max(sizes) > DECODED_OBJECT:
            self.content.append(Content(name, "object", f"<{sizes[0]} bytes>", f"<{sizes[1]} bytes>"))
            return
        data = [
            read_all(side.store, one, side.index.where)
            for side, one in zip((self.a, self.b), columns, strict=True)
        ]
        self.bytes_read += sum(map(len, data))
        # Only plain objects are decoded: the other format would need torch.
        if all(part[:1] == objects.PLAIN for part in data) and _equal(data[0], data[1], name):
            return
        self.content.append(Content(name, "object", objects.preview(data[0]), objects.preview(data[1])))

    def _tensor(self, row: int, name: str) -> None:
        ndim, itemsize = int(self.a.columns.ndim[row]), int(self.a.columns.itemsizes()[row])
        # By box, so that digests are compared where both have the same chunk, although other chunks differ.
        known = {self.b.box(chunk, ndim): chunk for chunk in range(*self.b.chunks(row))}
        count, first, total = 0, None, _Total()
        one: tuple[Columns, Columns] | None = None
        for chunk in range(*self.a.chunks(row)):
            box = self.a.box(chunk, ndim)
            same = self._by_digest(chunk, known.get(box))
            # Different digests are enough to know that the chunk differs; data is read to count elements.
            if same is None or (self.values and not same):
                one = one or (self.a.one(name), self.b.one(name))
                same = self._by_reading(one, box, itemsize, total)
            if not same:
                count, first = count + 1, first or box.offset
        low, high = self.a.chunks(row)
        if count:
            counted = (total.elements, total.largest) if self.values else (None, None)
            self.content.append(Content(name, "tensor", None, None, count, high - low, first, *counted))

    def _by_digest(self, chunk: int, other: int | None) -> bool | None:
        """Return whether the chunks are equal, or None if their digests can't be compared."""
        if other is None or self.a.columns.block[chunk] != self.b.columns.block[other]:
            return None
        return np.array_equal(self.a.digests(chunk, chunk + 1), self.b.digests(other, other + 1))

    def _by_reading(self, one: tuple[Columns, Columns], box: Box, itemsize: int, total: _Total) -> bool:
        same, dtype = True, DTYPES[int(one[0].dtype[0])].name
        for part in slabs(box, itemsize, self.slab):
            x = read_box(self.a.store, one[0], part, self.a.index.where)
            y = read_box(self.b.store, one[1], part, self.b.index.where)
            self.bytes_read += 2 * len(x)
            self.progress(2 * len(x))
            if not np.array_equal(x, y):
                same = False
                if not self.values:
                    break
                total.add(x, y, itemsize, dtype)
        return same


@dataclass
class _Total:
    elements: int = 0
    largest: float | None = None

    def add(self, x: Array, y: Array, itemsize: int, dtype: str) -> None:
        # By bytes, so that NaN equals itself, and -0.0 differs from 0.0.
        differ = (x.reshape(-1, itemsize) != y.reshape(-1, itemsize)).any(axis=1)
        self.elements += int(differ.sum())
        a, b = _numbers(x, dtype), _numbers(y, dtype)
        if a is None or b is None:
            return
        with np.errstate(all="ignore"):
            # As floats, because a difference of unsigned numbers would wrap.
            gap = np.abs(a[differ].astype(complex if a.dtype.kind == "c" else float) - b[differ])
        # An infinity or NaN on one side is counted above, but has no finite difference.
        real = gap[np.isfinite(gap)]
        if len(real):
            self.largest = max(self.largest or 0.0, float(real.max()))


def _numbers(data: Array, dtype: str) -> Array | None:
    """View bytes as numbers of NumPy, or return None if it has no such dtype.

    bfloat16 becomes float32, of which it is the upper half.
    """
    if dtype == "bfloat16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return data.view(_NUMPY[dtype]) if dtype in _NUMPY else None


def _equal(a: bytes, b: bytes, name: str) -> bool:
    try:
        return bool(objects.decode(a, name) == objects.decode(b, name))
    except (HoldfastError, RecursionError):
        return False


def compare(
    a: Place,
    b: Place,
    values: bool = False,
    progress: Callable[[int], None] = lambda moved: None,
    slab: int = SLAB,
) -> Compared:
    """Compare two checkpoints; of a run folder, its newest committed step.

    values: also count the elements that differ, and find their largest difference.

    Raises CorruptCheckpoint if a data file is missing or has another size: digests alone would not show it.
    """
    stores = checkpoint_at(a), checkpoint_at(b)
    with open_index(stores[0]) as first, open_index(stores[1]) as second:
        opened = tuple(zip(stores, (first, second), strict=True))
        for store, index in opened:
            # Digests in the index can be equal although a data file is gone, so files are checked first.
            _check_files(store, index)
        names_a, names_b = first.names(), second.names()
        both = sorted(set(names_a) & set(names_b))
        sides = [_Side(store, index, index.select(index.find(both))) for store, index in opened]
        work = _Work(sides[0], sides[1], values, slab, progress)
        for row in range(len(both)):
            work.row(row)
        misplaced = tuple(entry for store, index in opened if (entry := _misplaced(store, index)) is not None)
    only_a, only_b = sorted(set(names_a) - set(both)), sorted(set(names_b) - set(both))
    unequal = len(work.changed) + len(work.content)
    return Compared(
        stores[0].url,
        stores[1].url,
        not (only_a or only_b or unequal or misplaced),
        tuple(only_a),
        tuple(only_b),
        tuple(work.changed),
        tuple(work.content),
        len(both) - unequal,
        work.bytes_read,
        misplaced,
    )


def _check_files(store: Store, index: Index) -> None:
    """Raise CorruptCheckpoint if a data file of the index is missing or has another size."""
    for name, size in zip(index.file_names(), index.column("file_size").tolist(), strict=True):
        try:
            with closing(store.open(name)) as reader:
                actual = reader.size
        except NotFound:
            raise _lost(store, name, "is missing") from None
        if actual != size:
            raise _lost(store, name, f"has {actual} bytes, but was written with {size}")


def _lost(store: Store, name: str, problem: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{store.url} can't be compared: its data file {name} {problem}.",
        hint=f"`holdfast verify {store.url}` shows all that is damaged.",
        details={"file": name},
    )


def _misplaced(store: Store, index: Index) -> Misplaced | None:
    """Return the mismatch if the folder's name and its index have different steps."""
    folder_step, index_step = step_of(os.path.basename(store.url)), number(about(index).get("step"))
    return (
        None
        if folder_step is None or index_step in (None, folder_step)
        else Misplaced(store.url, folder_step, index_step or 0)
    )
