"""Loads a published model under the names and shapes of the state.

A row with a name that the folder lacks is replaced by rows for its source tensors (`views`): each is a box of
a published tensor, and a view of the memory to fill, with the published order of axes. So the reader needs no
knowledge of models, and nothing is read twice or held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from holdfast._core.io.source import Rows
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, DTYPES, FLOATS, OBJECT, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import ShiftedMemory, TensorMemory, check_is_view, torch_dtype
from holdfast._models.views.adapted import merged_into
from holdfast._models.views.adapter import PREFIX, stored_name
from holdfast._models.views.hub_format import Place
from holdfast._models.views.packed import is_packed, packed_part
from holdfast._models.views.published_model import PublishedModel
from holdfast._models.views.quantized import IN_8_BITS
from holdfast._models.views.reordered import as_published
from holdfast._models.views.scaled import in_8_bits
from holdfast._models.views.segments import MINUS_ONE, Segment
from holdfast.errors import BadInput, LoadFailed, MissingTensors, ShapeMismatch

_BRIDGES = ".adapter."
"""In names of what Megatron-Bridge's LoRA adds to a module."""


def see_published(source: PublishedModel, table: ShardTable, owner: Sequence[int]) -> Rows:
    """Translate the rows of a state into rows of tensors in `source` (`ForeignSource.translate`)."""
    seen = Rows(ShardTable(table.rank), [], [])
    look = _Look(source, seen.table, seen.blank)
    for row, leaf in enumerate(owner):
        look.add(table.specs[row], table.boxes[row], table, row)
        seen.owner.extend([leaf] * (len(seen.table) - len(seen.owner)))
    return seen


def published_regions(source: PublishedModel, spec: TensorSpec) -> list[tuple[int, Box]]:
    """Return the published dtypes of a megatron-core tensor, with their boxes, without padding and copies. A
    computed part (multiplied by scales, or minus one) counts as float32.

    Raises MissingTensors if a part is missing.
    """
    regions: list[tuple[int, Box]] = []
    segments = list(source.view.segments(spec.name, spec.shape, whole(spec.shape)))
    used = [segment for segment in segments if not segment.is_copy]
    for segment in used:
        place = source.place(segment.name)
        packed = is_packed(source, segment.name)
        if place is None and not packed:
            raise _not_there(source, segment.name, spec)
        code = CODE_OF["float32"] if place is None or packed else place.code
        if segment.change or code == IN_8_BITS != spec.dtype:
            code = CODE_OF["float32"]
        regions.append((code, segment.box))
    if len({dtype for dtype, _ in regions}) > 1 or len(used) < len(segments):
        return regions
    # All have one dtype: one box is enough, which ends where padding along the first axis begins.
    rows = max((box.stop[0] for _, box in regions if box.shape), default=0)
    return [(regions[0][0], Box((0,) * len(spec.shape), (rows, *spec.shape[1:]) if spec.shape else ()))]


def _not_there(source: PublishedModel, name: str, spec: TensorSpec) -> MissingTensors:
    source.refuse_quantized(name)
    hint = "A file of the model is missing, or config.json is of another one."
    if source.view_if_known is None:
        hint = (
            "Holdfast has no table for this type of model, which may have another name for it "
            "(docs/model.md shows how to add one); or a file of the model is missing."
        )
    return MissingTensors(
        f"{source.where} does not hold {name!r}, of which {spec.name!r} is made.",
        hint=hint,
        details={"missing": [name]},
    )


def _elements_of(table: ShardTable, row: int) -> Hashable:
    """Return what two rows share if they are the same part of a tensor in the same memory; None without
    memory, as on the meta device."""
    spec, box, memory = table.specs[row], table.boxes[row], table.memory[row]
    if not isinstance(memory, TensorMemory) or not memory.tensor.data_ptr():
        return None
    tensor = memory.tensor
    own = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    return own, spec.shape, box.offset, box.shape


@dataclass
class _Look:
    source: PublishedModel
    seen: ShardTable
    blank: list[int]
    filled: frozenset[Hashable] | None = None
    """The elements of tensors whose names are published; None: not asked for yet."""

    def add(self, spec: TensorSpec, box: Box, table: ShardTable, row: int) -> None:
        memory = table.memory[row]
        if spec.kind == OBJECT or not isinstance(memory, TensorMemory):
            if "_extra_state" not in spec.name:  # Transformer Engine's, which no published model has
                self.seen.extend(table.take([row]))
            return
        stored = spec.name if self.source.adapter is None else stored_name(spec.name)
        if stored != spec.name:
            self._add_wrapped(stored, spec, box, table, row)
        else:
            self._add_tensor(spec, box, table, row, memory)

    def _add_tensor(
        self, spec: TensorSpec, box: Box, table: ShardTable, row: int, memory: TensorMemory
    ) -> None:
        place = self.source.place(spec.name)
        as_it_is = place is not None and (place.shape == spec.shape or not self._has_layouts(spec.name))
        packed = spec.dtype in FLOATS and is_packed(self.source, spec.name)
        scaled = packed or (place is not None and place.code == IN_8_BITS != spec.dtype)
        if place is not None and as_it_is and not scaled and spec.name not in self.source.changes:
            self._check_dtype(place, spec)
            self.seen.extend(table.take([row]))
            return
        segments: list[Segment]
        if as_it_is or packed:
            axes = tuple(range(len(spec.shape)))
            segments = [Segment(box, spec.name, box.offset, axes, spec.shape)]
        elif place is None and self._is_filled_with_another(table, row):
            return
        elif self.source.config and self.source.view_for(spec.name).knows(spec.name):
            segments = list(self.source.view_for(spec.name).segments(spec.name, spec.shape, box))
        else:
            self.source.refuse_quantized(spec.name)
            if self.source.adapter is not None and _BRIDGES in spec.name:
                raise BadInput(
                    f"{spec.name!r} is of a model that Megatron-Bridge's LoRA has wrapped: PEFT's matrices "
                    "for queries, keys and values are not loaded into its own.",
                    hint="Load into the model without LoRA: the adapter is merged into its weights.",
                    details={"tensor": spec.name},
                )
            self.seen.extend(table.take([row]))  # the load reports it as missing
            return
        covered = sum(segment.box.volume for segment in segments)
        if covered < box.volume:
            if not self.source.view.is_padded(spec.name):
                raise LoadFailed(
                    f"The family {self.source.view.family.name!r} gives {spec.name!r} {covered} elements of "
                    f"{box.volume}.",
                    hint="This is a defect of Holdfast; nothing was read into the state.",
                )
            self.blank.append(row)
        for segment in segments:
            target = memory.tensor.detach()[segment.box.relative_to(box.offset).slices()]
            check_is_view(target, memory.tensor)
            self._add_segment(segment, spec, target)

    def _is_filled_with_another(self, table: ShardTable, row: int) -> bool:
        """Return whether the tensor is the same memory as one whose name is published. Of tied weights,
        transformers publishes one."""
        if self.filled is None:
            rows = [other for other, spec in enumerate(table.specs) if self._is_published(spec)]
            self.filled = frozenset(_elements_of(table, other) for other in rows) - {None}
        return _elements_of(table, row) in self.filled

    def _is_published(self, spec: TensorSpec) -> bool:
        place = self.source.place(spec.name)
        return place is not None and place.shape == spec.shape

    def _has_layouts(self, name: str) -> bool:
        view = self.source.view_if_known
        return view is not None and view.has_layouts(name)

    def _add_wrapped(self, stored: str, spec: TensorSpec, box: Box, table: ShardTable, row: int) -> None:
        """Add a tensor of a model that PEFT has wrapped, which is not merged."""
        self.source.is_wrapped = True
        plain = self.source.merging(0)
        trained = f"{PREFIX}{spec.name.removeprefix(PREFIX)}"
        # Biases and a resized embedding are trained in place.
        if not stored.startswith(PREFIX) and plain.place(trained) is not None:
            stored = trained
        one = table.take([row])
        one.specs[0] = spec._replace(name=stored)
        blank: list[int] = []
        memory = table.memory[row]
        assert isinstance(memory, TensorMemory)
        _Look(plain, self.seen, blank)._add_tensor(one.specs[0], box, one, 0, memory)
        self.blank.extend([row] * len(blank))

    def _add_segment(self, segment: Segment, spec: TensorSpec, target: torch.Tensor) -> None:
        place, theirs = self.source.place(segment.name), segment.theirs(segment.box)
        view = as_published(target, segment.axes, len(theirs.shape))
        if is_packed(self.source, segment.name):
            some = packed_part(self.source, segment, spec, view)
            self.seen.add(some.spec, some.box, (0, 1), False, some)
            return
        if place is None:
            raise _not_there(self.source, segment.name, spec)
        self._check(segment, place, spec)
        self._check_dtype(place, spec)
        stored = torch_dtype(place.code)
        memory = TensorMemory(view, stored)
        if place.code == IN_8_BITS and (segment.change or segment.split):
            raise BadInput(
                f"{self.source.where} holds {place.name!r} in 8 bits, of which {spec.name!r} can't be made.",
                details={"tensor": spec.name},
            )
        if place.code == IN_8_BITS != spec.dtype:
            memory = in_8_bits(self.source, place, view, theirs.offset)
        elif segment.change == MINUS_ONE:
            memory = ShiftedMemory(view, stored, -1)
        elif segment.split:
            memory = _EverySecond(view.squeeze(-1), stored, theirs.offset[-1])
        if place.name in self.source.changes:
            if spec.dtype not in FLOATS or segment.split:
                raise BadInput(
                    f"{place.name!r} can't be merged with an adapter into {spec.name!r}, which is "
                    f"{DTYPES[spec.dtype].name}{', with gate and up apart' if segment.split else ''}.",
                    details={"tensor": spec.name},
                )
            memory = merged_into(memory, self.source, segment, place, theirs.offset)
        read = TensorSpec(place.name, place.code, place.shape)
        self.seen.add(read, segment.joined(theirs), (0, 1), False, memory)

    def _check(self, segment: Segment, place: Place, spec: TensorSpec) -> None:
        if place.shape != segment.published:
            raise ShapeMismatch(
                f"{self.source.where} holds {place.name!r} with shape {list(place.shape)}; {spec.name!r} "
                f"with global shape {list(spec.shape)} needs {list(segment.published)}.",
                hint="Build the model with the sizes of config.json.",
                details={"tensor": spec.name},
            )

    def _check_dtype(self, place: Place, spec: TensorSpec) -> None:
        """Raise ShapeMismatch for a conversion other than between floating-point dtypes: quantised elements
        are meaningless without their scales."""
        scaled = place.code == IN_8_BITS and spec.dtype in FLOATS
        if place.code != spec.dtype and not scaled and not {place.code, spec.dtype} <= set(FLOATS):
            self.source.refuse_quantized(place.name)
            raise ShapeMismatch(
                f"{self.source.where} holds {place.name!r} in {DTYPES[place.code].name}, and {spec.name!r} "
                f"is {DTYPES[spec.dtype].name}: Holdfast does not convert between these.",
                hint="Of quantized models those in e4m3 with scales are read, and some in 4 bits: "
                "docs/huggingface.md.",
                details={"tensor": spec.name},
            )


class _EverySecond(TensorMemory):
    """Takes every second column of the read data, from column 0 or 1 on: a gate or its up projection."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype, turn: int) -> None:
        super().__init__(tensor, stored, 0)
        self._turn = turn

    def put(self, box: Box, values: torch.Tensor) -> None:
        skipped = (self._turn - box.offset[-1]) % 2
        taken = values[..., skipped::2]
        first = (box.offset[-1] + skipped) // 2
        super().put(Box((*box.offset[:-1], first), (*box.shape[:-1], taken.shape[-1])), taken)
