"""Values from DeepSpeed's files: tensors that are spread over several files, and plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from holdfast._core.base.values import Buffer
from holdfast._core.format.pickle_reader import PickledObject
from holdfast._core.layout.tensor import CODE_OF, DTYPES, Dims
from holdfast._core.state.memory import torch_dtype
from holdfast._frameworks.deepspeed.torch_file import TorchFileTensor
from holdfast.errors import CorruptCheckpoint


class ElementPlace(NamedTuple):
    """The position of a tensor's element."""

    rank: int
    at: int
    """Its position in that rank's part."""
    room: int
    """Number of contiguous elements from here on."""


class Elements:
    """A tensor that is spread over the files of several ranks."""

    def __init__(
        self,
        dtype: str,
        shape: Dims,
        find: Callable[[int], TorchFileTensor],
        place: Callable[[int], ElementPlace],
    ) -> None:
        """find: returns a rank's part. place: returns the position of an element."""
        self.dtype, self.shape, self.numel = dtype, shape, math.prod(shape)
        self.itemsize = DTYPES[CODE_OF[dtype]].size
        self._find, self._place = find, place

    @classmethod
    def of(cls, tensor: TorchFileTensor, shape: Dims) -> Elements:
        """Make one from a tensor in a single file, with this shape."""
        tensor.locate()  # a shape that its file can't fill is refused here
        return cls(
            tensor.dtype,
            shape,
            lambda rank: tensor,
            lambda index: ElementPlace(0, index, tensor.numel - index),
        )

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Fill the buffers from byte `start` on. Raises CorruptCheckpoint if a file does not hold them."""
        position = start
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                place = self._place(position // self.itemsize)
                length = min(place.room * self.itemsize, len(view))
                part = self._find(place.rank)
                if part.dtype != self.dtype:
                    raise CorruptCheckpoint(f"Rank {place.rank} has {part.dtype}, rank 0 {self.dtype}.")
                part.read_into(place.at * self.itemsize, [view[:length]])
                view, position = view[length:], position + length
        return position - start

    def read(self, first: int, out: torch.Tensor) -> torch.Tensor:
        """Fill a tensor from element `first` on, as far as there are any, in its own dtype."""
        count = max(min(self.numel - first, out.numel()), 0)
        made = torch.empty(count, dtype=torch_dtype(CODE_OF[self.dtype]))
        if count:
            self.read_into(first * self.itemsize, [made.view(torch.uint8).numpy()])
            out.view(-1)[:count].copy_(made)
        return out

    def whole(self) -> torch.Tensor:
        return self.read(0, torch.empty(self.shape, dtype=torch_dtype(CODE_OF[self.dtype])))


class NotPlain(Exception):
    """A value contains instances of classes, or is too large for the file. The message describes it."""


def plain(value: object, room: list[int]) -> object:
    """Return a value with its tensors read. room: remaining bytes that it may take in memory (updated here):
    a small file may make a large value by repeated references."""
    room[0] -= value.size if isinstance(value, TorchFileTensor) else 1
    if room[0] < 0:
        raise NotPlain("larger than its file")
    if isinstance(value, TorchFileTensor):
        return Elements.of(value, value.shape).whole()
    if type(value) is dict:
        return {plain(key, room): plain(item, room) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item, room) for item in value)  # type: ignore[call-arg, attr-defined]
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise NotPlain(f"an instance of {value.kind}" if isinstance(value, PickledObject) else repr(value))
