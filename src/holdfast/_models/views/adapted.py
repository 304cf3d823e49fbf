"""Weights with an adapter merged into them, computed as they are read.

The arithmetic is that of PEFT's `merge_and_unload` on a CPU: in float32, the product of the two matrices,
times the scale; the sum with the weight in the target's dtype is rounded to that once. A part of a product is
computed in tiles that lie at the same places in every layout, so that its bits depend on no layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import Dims
from holdfast._core.state.memory import ShiftedMemory, TensorMemory, torch_dtype
from holdfast._models.views.adapter import Adapter, Change, Product, Trained, Vector
from holdfast._models.views.hub_format import Place
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.reordered import as_published
from holdfast._models.views.segments import MINUS_ONE, Segment

_TILE = 128, 1024
"""Rows and columns of a product that are computed at once."""


def merged_into(
    memory: TensorMemory, source: PublishedModel, segment: Segment, place: Place, origin: Dims
) -> TensorMemory:
    """Return memory that also merges the source's adapter into a tensor that it changes.

    memory: puts the base model's weights, with the published order of axes. segment: why it is read.
    origin: its start in the published tensor.
    """
    return _Adapted(memory, source, source.changes[place.name], segment.change, place, origin)


class _Adapted(TensorMemory):
    """A part of a published tensor, with an adapter merged into it."""

    def __init__(
        self,
        base: TensorMemory,
        source: PublishedModel,
        changes: Sequence[Change],
        change: str,
        place: Place,
        origin: Dims,
    ) -> None:
        super().__init__(base.tensor, base.stored, 0)
        assert source.adapter is not None
        self._target, self._source, self._place = base, source, place
        self._adapter: Adapter = source.adapter
        self._changes, self._change, self._origin = changes, change, origin
        self._matrices: dict[str, torch.Tensor] = {}
        self._factors: dict[int, torch.Tensor] = {}
        """DoRA: what the sums of a tile's rows are multiplied by, by the first row."""

    def put(self, box: Box, values: torch.Tensor) -> None:
        theirs = Box(tuple(a + b for a, b in zip(box.offset, self._origin, strict=True)), box.shape)
        self._target.put(box, values)
        part = self.tensor.detach()[box.slices()]
        for change in self._changes:
            ours = change.segment.ours(theirs)
            if ours is None:
                continue
            there = change.segment.theirs(ours).relative_to(theirs.offset)
            some = part[there.slices()]
            if isinstance(change.by, Trained):
                self._replace(some, self._seen(change.segment, self._read(change.by.tensor, ours)))
                continue
            added = self._seen(change.segment, self._added(change.by, ours))
            for _ in range(self._source.merges):
                if isinstance(change.by, Product) and change.by.magnitude is not None:
                    some.copy_(self._factor(change.by, ours) * (some.float() + added.to(some.device)))
                elif isinstance(change.by, Product) and change.by.is_rounded:
                    some += added.to(some.device, some.dtype)
                else:
                    some += added.to(some.device)

    def _replace(self, target: torch.Tensor, values: torch.Tensor) -> None:
        plain = ShiftedMemory if self._change == MINUS_ONE else TensorMemory
        more = (-1,) if self._change == MINUS_ONE else (0,)
        plain(target, values.dtype, *more).put(whole(tuple(target.shape)), values)

    @staticmethod
    def _seen(segment: Segment, ours: torch.Tensor) -> torch.Tensor:
        return as_published(ours, segment.axes, len(segment.whole))

    def _added(self, by: Product | Vector, ours: Box) -> torch.Tensor:
        """Return what is added to a box of the tensor that the adapter was made for, in float32."""
        if isinstance(by, Vector):
            return self._read(by.vector, ours).float() * by.scale
        a, b = self._matrix(by.a), self._matrix(by.b)
        if not by.experts:
            return self._scaled(a, b, by, ours)
        made = torch.empty(ours.shape)
        for index in range(ours.shape[0]):
            expert = ours.offset[0] + index
            inputs = a.view(by.experts, -1, a.shape[1])[expert]
            outputs = b.view(b.shape[0], -1, by.experts)[:, :, expert].contiguous()
            made[index] = self._scaled(inputs, outputs, by, Box(ours.offset[1:], ours.shape[1:]))
        return made

    def _scaled(self, a: torch.Tensor, b: torch.Tensor, by: Product, ours: Box) -> torch.Tensor:
        """Return a box of the scaled product, computed in tiles."""
        turned = slice(None, None, -1) if by.is_turned else slice(None)
        part = Box(ours.offset[turned], ours.shape[turned])
        made = torch.empty(part.shape)
        for tile in _tiles(part, (b.shape[0], a.shape[1])):
            common = tile.intersect(part)
            assert common is not None
            rows, columns = tile.slices()
            value = (b[rows] @ a[:, columns]) * by.scale
            made[common.relative_to(part.offset).slices()] = value[common.relative_to(tile.offset).slices()]
        return made.T if by.is_turned else made

    def _factor(self, by: Product, ours: Box) -> torch.Tensor:
        """Return what rows are multiplied by (DoRA). It depends on norms of whole rows, which are read."""
        first, rows = ours.offset[0], ours.shape[0]
        starts = range(first - first % _TILE[0], first + rows, _TILE[0])
        found = torch.cat([self._tile_factor(by, start) for start in starts])
        return found[first - starts[0] :][:rows, None].to(self.tensor.device)

    def _tile_factor(self, by: Product, start: int) -> torch.Tensor:
        if start not in self._factors:
            assert by.magnitude is not None
            rows = min(_TILE[0], self._place.shape[0] - start)
            box = Box((start, 0), (rows, self._place.shape[1]))
            data = self._source.read_rows(self._place.name, (start, rows))
            stored = torch.frombuffer(bytearray(data), dtype=torch_dtype(self._place.code)).view(box.shape)
            weight = stored.to(self.tensor.dtype) + self._added(by, box)
            norm = torch.linalg.norm(weight, dim=1)
            self._factors[start] = self._read(by.magnitude, Box((start,), (rows,))).float() / norm
        return self._factors[start]

    def _matrix(self, place: Place) -> torch.Tensor:
        """Return a matrix in float32, read once."""
        if place.name not in self._matrices:
            self._matrices[place.name] = self._read(place, whole(place.shape)).float()
        return self._matrices[place.name]

    def _read(self, place: Place, box: Box) -> torch.Tensor:
        """Read a box of one of the adapter's tensors."""
        dtype, shape = torch_dtype(place.code), place.shape
        if len(shape) < 2:
            data = self._adapter.weights.read_rows(place.name)
            return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)[box.slices()]
        made = torch.empty(box.shape, dtype=dtype)
        (first, rows), columns = (box.offset[-2], box.shape[-2]), box.slices()[-1]
        for index in product(*map(range, box.shape[:-2])):
            row = first
            for axis, at in enumerate(index):
                row += (box.offset[axis] + at) * math.prod(shape[axis + 1 : -1])
            data = self._adapter.weights.read_rows(place.name, (row, rows))
            made[index] = torch.frombuffer(bytearray(data), dtype=dtype).view(rows, -1)[:, columns]
        return made


def _tiles(part: Box, shape: Dims) -> Iterator[Box]:
    """Yield the tiles of a matrix of this shape that a part of it meets."""
    starts = [
        range(low - low % side, low + size, side)
        for low, size, side in zip(part.offset, part.shape, _TILE, strict=True)
    ]
    for row, column in product(*starts):
        yield Box((row, column), (min(_TILE[0], shape[0] - row), min(_TILE[1], shape[1] - column)))
