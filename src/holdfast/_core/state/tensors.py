"""User declarations about a value: `Shard` and `PerRank`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from holdfast._core.base.values import check_switches
from holdfast._core.layout.deferred_offset import DeferredOffset
from holdfast.errors import BadInput


class Shard:
    """A local tensor, declared as a box of a global tensor.

    `tensor` (on any device) is the part of a tensor of shape `global_shape` that begins at `offset` and has
    the local tensor's shape. `replica=(index, count)` says that `count` ranks hold this box and this is the
    index-th of them; they share the writing. The default (0, 1) says that only this rank holds it. Put
    several Shards of one global tensor into a list under one name.

    One element of `offset` may be None: along that axis the shard begins where the shards of lower `position`
    end, whose lengths this rank need not know. `position` counts from 0 among the shards with equal offsets
    along the other axes; all of them must have None there. Replicas have the same position.
    """

    __slots__ = ("global_shape", "late", "offset", "replica", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        global_shape: Sequence[int],
        offset: Sequence[int | None],
        replica: tuple[int, int] = (0, 1),
        position: int | None = None,
    ) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise BadInput(f"Shard takes a tensor, not {type(tensor).__name__}.")
        self.tensor: torch.Tensor = tensor
        try:
            self.global_shape: tuple[int, ...] = tuple(int(s) for s in global_shape)
            # None becomes 0: a deferred offset is relative to where the shard begins.
            self.offset: tuple[int, ...] = tuple(int(o or 0) for o in offset)
            self.replica: tuple[int, int] = (int(replica[0]), int(replica[1]))
            position = None if position is None else int(position)
        except (TypeError, ValueError, IndexError):
            raise BadInput(
                f"Shard: global_shape={global_shape!r}, offset={offset!r} and replica={replica!r} must be "
                f"tuples of numbers, and position={position!r} a number or None."
            ) from None
        if not len(self.global_shape) == len(self.offset) == tensor.dim():
            raise BadInput(
                f"Shard: the tensor has {tensor.dim()} dimensions, global_shape {len(self.global_shape)} and "
                f"offset {len(self.offset)}; they must be equal (use tensor[None] for a leading axis)."
            )
        if not 0 <= self.replica[0] < self.replica[1]:
            raise BadInput(f"Shard: replica={self.replica} must be (index, count) with 0 <= index < count.")
        self.late: DeferredOffset | None = self._late(offset, position)

    def _late(self, offset: Sequence[int | None], position: int | None) -> DeferredOffset | None:
        unknown = [axis for axis, begin in enumerate(offset) if begin is None]
        if not unknown and position is None:
            return None
        # Adding up lengths along one axis gives the offset along that axis only.
        if len(unknown) != 1 or position is None or not 0 <= position < 1 << 31:
            raise BadInput(
                f"Shard: offset={tuple(offset)} with position={position}; None stands for one axis, and "
                "position says which of the ranks along it this is, from 0 on."
            )
        # Shards with equal other offsets are in one lane, whose number has these offsets as digits.
        lane = 0
        for axis, begin in enumerate(self.offset):
            if axis != unknown[0]:
                lane = lane * max(self.global_shape[axis], 1) + begin
        # A rank without elements may have any shape, unless no rank has elements.
        has_length = self.tensor.numel() or 0 in self.global_shape
        length = self.tensor.shape[unknown[0]] if has_length else 0
        return DeferredOffset(unknown[0], lane, position, length, -1)

    def __repr__(self) -> str:
        begin = (
            f"{self.offset}"
            if self.late is None
            else f"position {self.late.position} of axis {self.late.axis}"
        )
        return f"Shard({tuple(self.tensor.shape)} at {begin} of {self.global_shape}, replica={self.replica})"


Merge = Callable[[Mapping[int, Any]], Any]
"""Makes the value of a rank from those of all ranks, by rank."""


class PerRank:
    """A value that is different on every rank: RNG state, data-loader position, timers.

    It is saved under its name with `@rank` appended. On load a rank gets its own back; a rank that has none
    (the world has grown) keeps the present value if `optional`, otherwise the load fails; it also fails if
    values of ranks that are gone (the world has shrunk) would be lost, unless it is `optional`, or the load
    has `strict=False`. After a load, `value` is the loaded value.

    merge: a function that makes the value of this rank from the saved values: {rank: value}, ranks ascending,
        each with the structure of `value` and its tensors in host memory. It is called once on each rank, and
        only if the ranks of the load differ from those of the save; on another thread, before the state is
        changed. It must not call collectives. Its result must have the same names, shapes and dtypes as
        `value`. If it raises, or returns something else, all ranks raise LoadFailed.
    """

    __slots__ = ("merge", "optional", "value")

    def __init__(
        self,
        value: object,
        optional: bool = False,
        merge: Merge | None = None,
    ) -> None:
        self.value: Any = value
        check_switches(optional=optional)
        self.optional: bool = optional
        self.merge: Merge | None = merge
        if merge is not None and not callable(merge):
            raise BadInput(
                f"PerRank: merge must be a function of the values by rank, not {merge!r}.",
                hint="For example merge=lambda values: values[min(values)].",
            )

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
