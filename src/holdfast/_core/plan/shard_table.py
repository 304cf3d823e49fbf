"""The shard table: the shards of one rank as parallel lists, the input of planning. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np

from holdfast._core.base.values import Buffer
from holdfast._core.format.columns import ITEMSIZE, Array, pad
from holdfast._core.layout.box import Box
from holdfast._core.layout.deferred_offset import DeferredOffset
from holdfast._core.layout.tensor import DTYPES, OBJECT, TENSOR, Dims, Replica, TensorSpec
from holdfast.errors import BadInput

_SPEC = partial(tuple.__new__, TensorSpec)


class Memory(Protocol):
    """The bytes of one shard, row-major over its box."""

    @property
    def address(self) -> int:
        """Address in host memory; 0 if the bytes are elsewhere, or not row-major."""
        ...

    def gather(self, box: Box, out: Buffer) -> None:
        """Copy a sub-box (relative to the shard) into a buffer, row-major."""
        ...

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        """Copy the sub-box `inside` of row-major data of `shape` into the sub-box `box` of the shard."""
        ...


@dataclass
class ShardTable:
    """One row per shard. A name may have several rows (several boxes)."""

    rank: int = 0
    specs: list[TensorSpec] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    replicas: list[Replica | None] = field(default_factory=list)
    """(index, count) of this copy; None: not declared, so the ranks must agree on it."""
    unsharded: list[bool] = field(default_factory=list)
    """A plain tensor or an object: no rank has declared that copies are equal, so all bytes are compared."""
    memory: list[Memory] = field(default_factory=list)
    deferred: list[DeferredOffset | None] = field(default_factory=list)
    """The position of a shard whose offset depends on the lengths of the others on its shard line."""
    tied: dict[int, int] = field(default_factory=dict)
    """Rows that a save does not write because they are tied, each with the row that has the same memory."""
    _arrays: RowArrays | None = None

    def add(
        self,
        spec: TensorSpec,
        box: Box,
        replica: Replica | None,
        unsharded: bool,
        memory: Memory,
        deferred: DeferredOffset | None = None,
    ) -> None:
        self.specs.append(spec)
        self.boxes.append(box)
        self.replicas.append(replica)
        self.unsharded.append(unsharded)
        self.memory.append(memory)
        self.deferred.append(deferred)

    def add_whole(
        self,
        names: Sequence[str],
        dtypes: Iterable[int],
        boxes: Sequence[Box],
        replicas: Iterable[Replica | None],
        memory: Iterable[Memory],
    ) -> None:
        """Add unsharded tensors. boxes: the whole tensors, as boxes."""
        # Mapped, because `TensorSpec(...)` calls Python code for each row.
        self.specs += map(_SPEC, zip(names, dtypes, [box.shape for box in boxes], repeat(TENSOR)))
        self.boxes += boxes
        self.replicas += replicas
        self.unsharded += [True] * len(names)
        self.memory += memory
        self.deferred += [None] * len(names)

    def extend(self, other: ShardTable) -> None:
        self.specs += other.specs
        self.boxes += other.boxes
        self.replicas += other.replicas
        self.unsharded += other.unsharded
        self.memory += other.memory
        self.deferred += other.deferred

    def take(self, rows: Sequence[int]) -> ShardTable:
        """Return a table of these rows, in this order."""
        return ShardTable(
            self.rank,
            [self.specs[row] for row in rows],
            [self.boxes[row] for row in rows],
            [self.replicas[row] for row in rows],
            [self.unsharded[row] for row in rows],
            [self.memory[row] for row in rows],
            [self.deferred[row] for row in rows],
        )

    def put(self, row: int, spec: TensorSpec, box: Box, memory: Memory) -> None:
        """Replace the spec, box and memory of a row."""
        self.specs[row], self.boxes[row], self.memory[row] = spec, box, memory
        self._arrays = None

    def __len__(self) -> int:
        return len(self.specs)

    def check(self) -> None:
        """Raise BadInput if a name is not valid text, if two tensors have the same name, or if a box lies
        outside its tensor."""
        # Checked here, on the faulty rank; at the commit it would look like a disagreement between ranks.
        of_name = {spec.name: spec for spec in reversed(self.specs)}
        try:
            "".join(of_name).encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair, which no file can name
            half = error.object[error.start]
            name = next(name for name in of_name if half in name)
            raise BadInput(f"The name {name!r} is not valid Unicode text.", rank=self.rank) from None
        for spec in self.specs if len(of_name) < len(self) else ():
            first = of_name[spec.name]
            if first != spec:
                raise BadInput(
                    f"Rank {self.rank} holds two tensors under the name {spec.name!r}: {describe(first)} and "
                    f"{describe(spec)}.",
                    rank=self.rank,
                )
        # Each kind of box once: thousands of layers and experts have the same few shapes.
        shapes = [spec.shape for spec in self.specs]
        pairs = {*zip(self.boxes, shapes, strict=True)}
        if not all(_is_countable(shape) for _, shape in pairs):
            spec = next(spec for spec in self.specs if not _is_countable(spec.shape))
            raise BadInput(
                f"Rank {self.rank} holds a part of {spec.name!r}, whose global shape {spec.shape} is larger "
                "than a checkpoint can describe.",
                rank=self.rank,
            )
        outside = {pair for pair in pairs if not pair[0].within(pair[1])}
        for spec, box in zip(self.specs, self.boxes, strict=True) if outside else ():
            if (box, spec.shape) in outside:
                raise BadInput(
                    f"Rank {self.rank} holds offset {box.offset} and shape {box.shape} of {spec.name!r}, "
                    f"which does not lie inside its global shape {spec.shape}.",
                    rank=self.rank,
                )

    def arrays(self) -> RowArrays:
        """Return the numbers of all rows as arrays, padded with leading ones. They are cached."""
        # `add` and `extend` do not invalidate the cache, so a changed number of rows does.
        if self._arrays is not None and len(self._arrays.nbytes) == len(self):
            return self._arrays
        shapes = [spec.shape for spec in self.specs]
        dims = max(map(len, {*shapes}), default=0) or 1
        dtype = np.asarray([spec.dtype for spec in self.specs], "u1")
        kind = np.asarray([spec.kind for spec in self.specs], "u1")
        ndim = np.fromiter(map(len, shapes), "u1", len(shapes))
        size = pad([box.shape for box in self.boxes], dims, 1)
        offset = pad([box.offset for box in self.boxes], dims, 0)
        shape, itemsize = pad(shapes, dims, 1), ITEMSIZE[dtype]
        nbytes = np.prod(size, axis=1) * itemsize
        self._arrays = RowArrays(dtype, kind, ndim, dims, shape, offset, size, itemsize, nbytes)
        return self._arrays


@dataclass
class RowArrays:
    dtype: Array
    kind: Array
    ndim: Array
    dims: int
    shape: Array
    offset: Array
    size: Array
    itemsize: Array
    nbytes: Array


def _is_countable(shape: Dims) -> bool:
    """Return whether an index can hold this shape: readers count a side of 0 as 1 (`format.columns`)."""
    return len(shape) < 256 and 16 * math.prod(max(side, 1) for side in shape) <= 1 << 62


def describe(spec: TensorSpec) -> str:
    """Return `float32[4, 8]`, or `an object`, for messages."""
    if spec.kind == OBJECT:
        return "an object"
    return f"{DTYPES[spec.dtype].name}{list(spec.shape)}"


def contiguous_at(shape: Dims, box: Box) -> int | None:
    """Return the first element of a sub-box in a row-major tensor of `shape`; None if it is not
    contiguous."""
    start, stride, inner_full = 0, 1, True
    # From the last axis outwards: once an axis is cut, all axes before it must have a single index.
    for axis in range(len(shape) - 1, -1, -1):
        size = box.shape[axis]
        if not inner_full and size != 1:
            return None
        if size != shape[axis]:
            inner_full = False
        start += box.offset[axis] * stride
        stride *= shape[axis]
    return start


class PlannedRows(NamedTuple):
    """Rows of a plan: the row of the shard table, and the box in it (global indices)."""

    row: Array
    offset: Array
    size: Array
    nbytes: Array
    block: Array


class SavePlan(NamedTuple):
    """The chunks that this rank writes, and its witnesses. Boxes are padded to `dims` dimensions."""

    dims: int
    chunks: PlannedRows
    witnesses: PlannedRows
    witness_full: Array
    """Per witness: whether all blocks are compared, not just one."""
