"""A published model, through the names and shapes that the state has.

A row that the folder does not have by its own name becomes rows of what it is made of (`views`): each a box
of a published tensor, and the part of the memory that it fills, seen with the published order of axes. So
reading knows nothing of models, and nothing is read twice or held whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.buffers import Buffer
from holdfast.errors import BadInput, LoadFailed, MissingTensors, ShapeMismatch
from holdfast.format.hugging_face import Place
from holdfast.io.hugging_face import PublishedModel
from holdfast.io.open_checkpoint import Source
from holdfast.layout.box import Box, Dims, whole
from holdfast.layout.tensor import CODE_OF, DTYPES, OBJECT, TensorSpec
from holdfast.plan.shard_table import ShardTable
from holdfast.state.memory import ShiftedMemory, TensorMemory, check_is_view
from holdfast.state.reordered import as_published
from holdfast.views.mapping import MINUS_ONE, Segment

_QUANTISED = CODE_OF["float8_e4m3fn"]
_FLOATS = {CODE_OF[name] for name in ("float64", "float32", "float16", "bfloat16")}
_SCALES = "_scale_inv"
"""After a tensor's name: that of the scales of its blocks, by which its elements are to be multiplied."""
_SIDE = 128
"""Rows and columns of a block, if the configuration does not say."""


def see_published(
    source: Source, table: ShardTable, owner: Sequence[int], blank: list[torch.Tensor]
) -> tuple[ShardTable, list[int]]:
    """The rows of a state, and who owns each, as rows of what `source` holds.

    blank: gets tensors of which only a part is published, the rest being zero: a padded vocabulary.

    Raises MissingTensors for a part that is not there, ShapeMismatch for one that does not fit the state.
    """
    if not isinstance(source, PublishedModel):
        return table, list(owner)
    seen, owners = ShardTable(table.rank), list[int]()
    look = _Look(source, seen, blank)
    for row, leaf in enumerate(owner):
        look.add(table.specs[row], table.boxes[row], table, row)
        owners += [leaf] * (len(seen) - len(owners))
    return seen, owners


@dataclass
class _Look:
    source: PublishedModel
    seen: ShardTable
    blank: list[torch.Tensor]

    def add(self, spec: TensorSpec, box: Box, table: ShardTable, row: int) -> None:
        memory = table.memory[row]
        if spec.kind == OBJECT or not isinstance(memory, TensorMemory):
            if "_extra_state" not in spec.name:  # of a layer's kernels, which no published model has
                self._as_it_is(table, row)
            return
        place = self.source.place(spec.name)
        if place is not None and not (place.code == _QUANTISED != spec.dtype):
            self._as_it_is(table, row)
            return
        if place is None and (not self.source.config or not self.source.view.knows(spec.name)):
            self._as_it_is(table, row)  # which is missing then
            return
        if place is not None:
            axes = tuple(range(len(spec.shape)))
            segments = [Segment(whole(spec.shape), spec.name, (0,) * len(axes), axes, spec.shape)]
        else:
            segments = list(self.source.view.segments(spec.name, spec.shape, box))
        parts = [(segment, segment.box.intersect(box)) for segment in segments]
        covered = sum(part.volume for _, part in parts if part is not None)
        if covered < box.volume and place is None and self.source.view.is_padded(spec.name):
            self.blank.append(memory.tensor)
        elif covered != box.volume:
            raise LoadFailed(
                f"{spec.name!r} would get {covered} elements of {self.source.where}, and has {box.volume} on "
                f"rank {self.seen.rank}.",
                hint="This is a defect of Holdfast; nothing was read into the state.",
            )
        for segment, part in parts:
            if part is not None:
                target = memory.tensor.detach()[part.relative_to(box.offset).slices()]
                check_is_view(target, memory.tensor)
                self._add_segment(segment, part, spec, target)

    def _as_it_is(self, table: ShardTable, row: int) -> None:
        self.seen.add(
            table.specs[row],
            table.boxes[row],
            table.replicas[row],
            table.unsharded[row],
            table.memory[row],
            table.deferred[row],
        )

    def _add_segment(self, segment: Segment, part: Box, spec: TensorSpec, target: torch.Tensor) -> None:
        place = self.source.place(segment.name)
        if place is None:
            raise MissingTensors(
                f"{self.source.where} does not hold {segment.name!r}, of which {spec.name!r} is made.",
                hint="A file of the model is missing, or config.json is of another one.",
                details={"missing": [segment.name]},
            )
        self._check(segment, place, spec)
        self._check_dtype(place, spec)
        theirs = segment.theirs(part)
        stored = getattr(torch, DTYPES[place.code].name)
        view = as_published(target, segment.axes, len(theirs.shape))
        memory = TensorMemory(view, stored)
        if place.code == _QUANTISED != spec.dtype:
            memory = _Scaled(view, stored, theirs.offset, self._scales(place), self._sides())
        elif segment.change == MINUS_ONE:
            memory = ShiftedMemory(view, stored, -1)
        shape = segment.whole or place.shape
        self.seen.add(TensorSpec(place.name, place.code, shape), theirs, (0, 1), False, memory)

    def _check(self, segment: Segment, place: Place, spec: TensorSpec) -> None:
        if segment.split:
            self.source.read_as(place.name, segment.whole)
        if place.shape != segment.published:
            raise ShapeMismatch(
                f"{self.source.where} holds {place.name!r} with shape {list(place.shape)}; {spec.name!r} "
                f"with global shape {list(spec.shape)} needs {list(segment.published)}.",
                hint="Build the model with the sizes of config.json.",
                details={"tensor": spec.name},
            )

    def _check_dtype(self, place: Place, spec: TensorSpec) -> None:
        """Only floating-point elements are converted: others mean nothing without what they were made by."""
        scaled = place.code == _QUANTISED and spec.dtype in _FLOATS
        if place.code != spec.dtype and not scaled and not {place.code, spec.dtype} <= _FLOATS:
            raise ShapeMismatch(
                f"{self.source.where} holds {place.name!r} in {DTYPES[place.code].name}, and {spec.name!r} "
                f"is {DTYPES[spec.dtype].name}: Holdfast does not convert between these.",
                hint="Of quantised models those in float8_e4m3fn with scales of blocks are read.",
                details={"tensor": spec.name},
            )

    def _scales(self, place: Place) -> torch.Tensor:
        name = place.name + _SCALES
        scales = self.source.place(name)
        if scales is None:
            raise MissingTensors(
                f"{self.source.where} holds {place.name!r} in 8 bits, and no {name!r}: its elements mean "
                f"nothing without their scales.",
                details={"missing": [name]},
            )
        sides = self._sides()
        blocks = tuple(-(-n // side) for n, side in zip(place.shape, sides, strict=False))
        if len(sides) != len(place.shape) or scales.shape != blocks or scales.code not in _FLOATS:
            raise ShapeMismatch(
                f"{self.source.where} holds scales of shape {list(scales.shape)} in "
                f"{DTYPES[scales.code].name} for {place.name!r} of shape {list(place.shape)}; "
                f"blocks of {list(sides)} need {list(blocks)} in floating point.",
                hint="Scales of blocks are read, whose sides are weight_block_size in quantization_config.",
                details={"tensor": name},
            )
        data = bytearray(self.source.read_whole(name))
        dtype = getattr(torch, DTYPES[scales.code].name)
        return torch.frombuffer(data, dtype=dtype).view(scales.shape).float()

    def _sides(self) -> Dims:
        """Rows and columns of the blocks that have a scale each."""
        said = self.source.config.get("quantization_config")
        sides = said.get("weight_block_size") if isinstance(said, dict) else None
        if sides is None:
            return (_SIDE, _SIDE)
        if not isinstance(sides, list) or not all(type(side) is int and side > 0 for side in sides):
            raise BadInput(f"{self.source.where}: weight_block_size={sides!r} in config.json is no shape.")
        return tuple(sides)


class _Scaled(TensorMemory):
    """Elements in 8 bits, to be multiplied by the scale of their block."""

    def __init__(
        self, tensor: torch.Tensor, stored: torch.dtype, origin: Dims, scales: torch.Tensor, sides: Dims
    ) -> None:
        super().__init__(tensor, stored)
        self.address = 0
        self._origin, self._scales, self._sides = origin, scales, sides

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        values = torch.frombuffer(data, dtype=self.stored).view(shape)[inside.slices()].float()
        scales = self._scales
        for axis, side in enumerate(self._sides):
            first = self._origin[axis] + box.offset[axis]
            scales = scales.index_select(axis, torch.arange(first, first + box.shape[axis]) // side)
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.tensor[box.slices()].copy_(values * scales)
