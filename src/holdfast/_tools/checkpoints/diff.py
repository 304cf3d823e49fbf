"""Compare two checkpoints by name: names in one only, changed shapes or dtypes, changed content.

If both have a chunk with the same box and the same blocks, their digests are compared and no data is read.
Otherwise (the same tensor saved in another layout) the bytes of both are read. Objects are compared by value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from holdfast._core.existing.comparing import BoxElements, Difference, check_files, differences
from holdfast._core.existing.target import checkpoint_at, number
from holdfast._core.format import plain_objects
from holdfast._core.format.columns import Array, Columns, unpad
from holdfast._core.format.index import Index
from holdfast._core.io.index_file import open_index
from holdfast._core.io.raw_read import read_box
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import DTYPES, OBJECT
from holdfast._core.plan.agreement import what
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.pins import Pin
from holdfast._core.store.run_folder import step_of
from holdfast._tools.checkpoints.object_values import are_equal
from holdfast.errors import BadInput

_Chunks = dict[Box, tuple[int, bytes]]
"""For each chunk: the block size in bytes, and the digests of all blocks."""


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
    """Number of chunks of A that differ."""
    of: int = 0
    """Number of chunks of A."""
    first: tuple[int, ...] | None = None
    """Offset of the first differing part in the tensor."""
    elements: int | None = None
    """Number of differing elements (only if values were requested)."""
    largest: float | None = None
    """The largest absolute difference; None if it is not a number."""


class Misplaced(msgspec.Struct, frozen=True):
    """An index whose step differs from that of its folder."""

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
    """Number of names that both have with equal content."""
    bytes_read: int
    """Bytes of data that were read; 0 if digests were enough."""
    misplaced: tuple[Misplaced, ...]
    untold: tuple[Content, ...] = ()
    """Objects of which it can't be told whether they are equal, because torch's encoding of them is refused,
    or is of values that have no comparison."""

    @property
    def is_untold(self) -> bool:
        """Whether nothing was found to differ, and objects are left of which it can't be told."""
        differs = self.only_a or self.only_b or self.changed or self.content or self.misplaced
        return bool(self.untold) and not differs


Decode: TypeAlias = Callable[[Store, str, bytes], object]
"""Decodes an object, given its checkpoint and name, for errors, and its bytes. HoldfastError if it is
refused."""


@dataclass
class _Side:
    store: Store
    index: Index
    columns: Columns
    """The rows of common names in both indexes, in the same order."""
    bytes_read: int = 0

    def chunks(self, row: int) -> _Chunks:
        """Return the digests of each chunk of a tensor."""
        columns, ndim = self.columns, int(self.columns.ndim[row])
        found = {}
        for chunk in range(len(columns.file))[columns.chunks_of(row)]:
            box = Box(unpad(columns.offset[chunk], ndim), unpad(columns.size[chunk], ndim))
            found[box] = int(columns.block[chunk]), columns.digests_of(chunk).tobytes()
        return found

    def reader(self, row: int) -> Callable[[Box], BoxElements]:
        """Return a function that reads boxes of a row."""
        columns = self.index.select(self.index.find([self.columns.names[row]]))

        def read(box: Box) -> BoxElements:
            data = read_box(self.store, columns, box, self.index.where)
            self.bytes_read += len(data)
            return BoxElements(data)

        return read


@dataclass
class _IndexComparison:
    sides: list[_Side]
    values: bool
    decode: Decode
    content: list[Content] = field(default_factory=list)
    untold: list[Content] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)

    def row(self, row: int) -> None:
        a, b = (side.columns.spec_of(row) for side in self.sides)
        name, (mine, theirs) = a.name, [side.chunks(row) for side in self.sides]
        # Lengths of objects, which are their shapes, may differ although the values are equal.
        if a != b and not a.kind == b.kind == OBJECT:
            self.changed.append(Changed(name, what(a), what(b)))
        elif mine != theirs and a.kind == OBJECT:
            self._object(name, row)
        elif mine != theirs:
            self._tensor(name, row, mine, theirs)

    def _object(self, name: str, row: int) -> None:
        """Compare objects by value and type: other bytes may be an equal value (a dict in another order)."""
        a, b = (side.reader(row)(whole(side.columns.shape_of(row))).data.tobytes() for side in self.sides)
        equal = are_equal(a, b, partial(self.decode, self.sides[0].store, name))
        if not equal:
            found = Content(name, "object", plain_objects.preview(a), plain_objects.preview(b))
            (self.untold if equal is None else self.content).append(found)

    def _tensor(self, name: str, row: int, mine: _Chunks, theirs: _Chunks) -> None:
        total, differ = _Total(), list[Box]()
        dtype = DTYPES[int(self.sides[0].columns.dtype[row])]
        reads = [side.reader(row) for side in self.sides]
        for box, digests in mine.items():
            other = theirs.get(box)
            if digests == other:
                continue
            # Different digests are enough to know that a chunk differs; data is read to count elements.
            same = other is None or other[0] != digests[0]
            if same or self.values:
                for difference in differences(box, dtype.size, *reads):
                    same = False
                    if not self.values:
                        break
                    total.add(difference, dtype.name)
            if not same:
                differ.append(box)
        if differ:
            counted = (total.elements, total.largest) if self.values else (None, None)
            parts = len(differ), len(mine), differ[0].offset
            self.content.append(Content(name, "tensor", None, None, *parts, *counted))


@dataclass
class _Total:
    elements: int = 0
    largest: float | None = None

    def add(self, found: Difference, dtype: str) -> None:
        differ = found.by_element()
        self.elements += int(differ.sum())
        a, b = _numbers(found.a.data, dtype), _numbers(found.b.data, dtype)
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
    """View bytes as a NumPy array, or return None if NumPy lacks the dtype.

    bfloat16 becomes float32, of which it is the upper half.
    """
    if dtype == "bfloat16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    try:
        return data.view(dtype)
    except TypeError:
        return None


def _refuse(store: Store, name: str, data: bytes) -> object:
    raise BadInput(f"The object {name!r} of {store.url} takes torch to decode.")


def compare(a: Folder, b: Folder, values: bool = False, decode: Decode = _refuse) -> Compared:
    """Compare two checkpoints; a run folder stands for its newest committed step.

    values: also count the elements that differ, and find their largest difference.
    decode: called for objects in torch's encoding, which takes torch; without it, of those that are stored
        otherwise it can't be told whether they differ.

    Raises CorruptCheckpoint if a data file is missing or has another size: digests alone would not show it.
    """
    stores = checkpoint_at(a), checkpoint_at(b)
    with (
        closing(Pin(stores[0])),
        closing(Pin(stores[1])),
        open_index(stores[0]) as first,
        open_index(stores[1]) as second,
    ):
        opened = tuple(zip(stores, (first, second), strict=True))
        for store, index in opened:
            # Digests in the index can be equal although a data file is gone, so files are checked first.
            check_files(store, zip(index.file_names(), index.column("file_size").tolist(), strict=True))
        names_a, names_b = first.names(), second.names()
        both = sorted(set(names_a) & set(names_b))
        sides = [_Side(store, index, index.select(index.find(both))) for store, index in opened]
        work = _IndexComparison(sides, values, decode)
        for row in range(len(both)):
            work.row(row)
        misplaced = tuple(found for store, index in opened for found in _misplaced(store, index))
    only_a, only_b = sorted(set(names_a) - set(both)), sorted(set(names_b) - set(both))
    unequal = len(work.changed) + len(work.content) + len(work.untold)
    return Compared(
        stores[0].url,
        stores[1].url,
        not (only_a or only_b or unequal or misplaced),
        tuple(only_a),
        tuple(only_b),
        tuple(work.changed),
        tuple(work.content),
        len(both) - unequal,
        sum(side.bytes_read for side in sides),
        misplaced,
        tuple(work.untold),
    )


def _misplaced(store: Store, index: Index) -> Iterator[Misplaced]:
    folder_step = step_of(os.path.basename(store.url.rstrip("/")))
    index_step = number(index.about.get("step"))
    if folder_step is not None and index_step is not None and folder_step != index_step:
        yield Misplaced(store.url, folder_step, index_step)
