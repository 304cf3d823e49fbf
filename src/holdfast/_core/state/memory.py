"""Tensors as bytes: an address if they are contiguous in host memory, otherwise copies.

`address` is a raw pointer into a tensor that the object keeps alive. It is used because wrapping a small
tensor in NumPy takes ten times as long as all the rest, and because bfloat16 and float8 have no NumPy type.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from holdfast._core.base.values import Buffer
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, DTYPES, OBJECT, Dims, Replica, TensorSpec, dtype_code
from holdfast._core.plan.shard_table import Memory, ShardTable
from holdfast._core.state.subclasses import check_kind
from holdfast.errors import BadInput, LoadFailed


class TensorMemory:
    """A tensor with the shape of the shard's box. `stored` is the dtype of its bytes in a checkpoint; a load
    converts them if it differs."""

    __slots__ = ("address", "stored", "tensor")

    def __init__(
        self, tensor: torch.Tensor, stored: torch.dtype | None = None, address: int | None = None
    ) -> None:
        """address: 0 if the elements are not row-major in host memory; None: determine it."""
        self.tensor = tensor
        self.stored = stored or tensor.dtype
        if address is None:
            address = tensor.data_ptr() if self.stored is tensor.dtype and _is_direct(tensor) else 0
        self.address = address

    def gather(self, box: Box, out: Buffer) -> None:
        part = self.tensor.detach()[box.slices()]
        target = torch.frombuffer(out, dtype=part.dtype).view(part.shape)
        # Row-major in the buffer for all strides and devices; torch also resolves conj and neg bits.
        target.copy_(part, non_blocking=getattr(_here, "not_waiting", False))

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        values = torch.frombuffer(data, dtype=self.stored).view(shape)[inside.slices()]
        # An inference tensor may be changed only in inference mode.
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            self.put(box, values)

    def put(self, box: Box, values: torch.Tensor) -> None:
        """Copy stored values into a sub-box. Called in a context in which the tensor may be changed."""
        part = self.tensor.detach()[box.slices()]
        check_is_view(part, self.tensor)
        part.copy_(values)


def _is_direct(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie row-major in host memory."""
    # Reading by a raw pointer ignores strides, devices, and torch's conj and neg bits.
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


class ShiftedMemory(TensorMemory):
    """A tensor whose elements are the stored ones plus a number."""

    def __init__(self, tensor: torch.Tensor, stored: torch.dtype, shift: float) -> None:
        super().__init__(tensor, stored, 0)  # bytes must not be read directly into the tensor
        self._shift = shift

    def put(self, box: Box, values: torch.Tensor) -> None:
        super().put(box, values.float() + self._shift)


def check_is_view(part: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise LoadFailed if indexing a tensor subclass gave a copy: values written into that would be lost."""
    if part.numel() and part.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        raise LoadFailed(
            f"A tensor of type {type(tensor).__module__}.{type(tensor).__qualname__} can't be filled in "
            "place: indexing it gives a copy.",
            hint="Load into plain tensors, and make this one of them.",
        )


def count_changes(tensors: Iterable[torch.Tensor]) -> None:
    """Increment the version counters of tensors that are about to be changed, so that an autograd graph that
    needs their present values refuses to run.

    Usually bytes are read directly into the tensor's memory, which autograd doesn't see. A DTensor and its
    local tensor have separate counters. Inference tensors have none, and are in no graph.
    """
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# Per thread: while one thread only starts its copies, another must still get complete ones.
_here = threading.local()


@contextmanager
def not_waiting() -> Iterator[None]:
    """Only start the copies from a GPU that this thread makes inside; the caller waits for them."""
    _here.not_waiting = True
    try:
        yield
    finally:
        _here.not_waiting = False


class ViewMemory:
    """A tensor that lacks leading length-one axes of its box. The view is created only if this rank writes
    the tensor: of tens of thousands of replicated experts, it writes few."""

    __slots__ = ("lead", "tensor")

    def __init__(self, tensor: torch.Tensor, lead: int) -> None:
        self.tensor, self.lead = tensor, lead

    def _whole(self) -> TensorMemory:
        return TensorMemory(self.tensor[(None,) * self.lead])

    @property
    def address(self) -> int:
        return self._whole().address

    def gather(self, box: Box, out: Buffer) -> None:
        self._whole().gather(box, out)

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        self._whole().scatter(box, data, shape, inside)


class Part(NamedTuple):
    """A part of a tensor with its box. Its memory is read only when it is written."""

    spec: TensorSpec
    box: Box
    memory: Memory
    replica: Replica = (0, 1)

    @staticmethod
    def object(name: str, data: bytes) -> Part:
        """Return a Part for an object that is encoded already."""
        spec = TensorSpec(name, CODE_OF["uint8"], (len(data),), OBJECT)
        return Part(spec, Box((0,), (len(data),)), BytesMemory(data))


class BytesMemory:
    """The encoded bytes of an object. A load resizes it and reads the stored bytes into it."""

    __slots__ = ("_keep", "address", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        # A mutable copy, which a load may write into: bytes are immutable.
        self._keep = ctypes.create_string_buffer(data, max(len(data), 1))
        self.address = ctypes.addressof(self._keep)

    def resize(self, size: int) -> None:
        # The old bytes are not kept: the object is replaced as a whole.
        self._keep = ctypes.create_string_buffer(max(size, 1))
        self.address = ctypes.addressof(self._keep)

    def value(self, size: int) -> bytes:
        return self._keep.raw[:size]

    def gather(self, box: Box, out: Buffer) -> None:
        start = box.offset[0]
        memoryview(out).cast("B")[: box.shape[0]] = self._keep.raw[start : start + box.shape[0]]

    def scatter(self, box: Box, data: Buffer, shape: Dims, inside: Box) -> None:
        start, length = inside.offset[0], inside.shape[0]
        ctypes.memmove(self.address + box.offset[0], bytes(memoryview(data)[start : start + length]), length)


def torch_dtype(code: int) -> torch.dtype:
    """Return torch's dtype of a code in `layout.tensor.DTYPES`."""
    name = DTYPES[code].name
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise BadInput(f"PyTorch {torch.__version__} has no {name}.", hint="Update it.")
    return dtype


def spec_of(name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> TensorSpec:
    """Return the spec of a tensor with this global shape (None: its own). Raises BadInput if it can't be
    stored."""
    check_kind(name, tensor)
    whole = tensor.shape if shape is None else shape
    # torch prints `torch.float32`; the table of dtypes has the names without that prefix.
    return TensorSpec(name, dtype_code(str(tensor.dtype)[6:], repr(name)), tuple(whole))


def plain_address(value: object) -> int | None:
    """Return the address of a plain tensor; 0 if its elements are not row-major in host memory; None if the
    value is not a plain tensor with memory."""
    if (
        not (type(value) is torch.Tensor or type(value) is torch.nn.Parameter)
        or value.layout is not torch.strided
        or value.is_nested
        or getattr(value, "global_shape", None) is not None  # `_core/state/sharded.py`
    ):
        return None
    try:
        address = value.data_ptr()
    except RuntimeError:  # a tracer's tensor
        return None
    return (address if _is_direct(value) else 0) if address else None


def add_plain(
    table: ShardTable,
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int | None],
    replicas: Sequence[Replica | None],
) -> None:
    """Add tensors with a `plain_address`, a column at a time. This rank holds each tensor whole; whether
    other ranks do is undeclared, unless `replicas` declares it."""
    # All tensors of a shape and dtype can be stored if one can, and they share one box.
    pairs = [(tensor.shape, tensor.dtype) for tensor in tensors]
    number_of = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    kinds = [number_of[pair] for pair in pairs]  # hashed no more from here on
    one_of = dict(zip(kinds, zip(names, tensors, strict=True), strict=True))
    specs = [spec_of(*one_of[kind]) for kind in range(len(number_of))]
    boxes = [whole(spec.shape) for spec in specs]
    table.add_whole(
        names,
        [specs[kind].dtype for kind in kinds],
        [boxes[kind] for kind in kinds],
        replicas,
        [
            TensorMemory(tensor, tensor.dtype, address)
            for tensor, address in zip(tensors, addresses, strict=True)
        ],
    )


class CallerStreams:
    """The work that the current streams of this thread have now, on each GPU with a tensor of a shard table.

    Another thread copies these tensors, and has current streams of its own: a copy there would not wait for
    work that the caller has queued under `with torch.cuda.stream(s)`, unless it is told to.
    """

    def __init__(self, table: ShardTable) -> None:
        self.streams: list[torch.cuda.Stream] = []
        # Asking for a stream would initialise CUDA, also in a process without tensors on a GPU.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            tensors = (getattr(memory, "tensor", None) for memory in table.memory)
            devices = {tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda}
            self.streams = [torch.cuda.current_stream(device) for device in devices]
        # Events, not synchronize(): the caller's thread goes on, and the copying streams wait on the GPU.
        self._given = [stream.record_event() for stream in self.streams]

    def wait(self) -> None:
        """Make this thread's current streams wait for that work."""
        for stream, event in zip(self.streams, self._given, strict=True):
            torch.cuda.current_stream(stream.device).wait_event(event)

    def finish(self) -> None:
        """Wait until the work of this thread's current streams is done, so that the caller's streams may use
        its results."""
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).synchronize()
