"""Locate a tensor's elements in the archive that torch.save wrote.

Stock checkpoints store a chunk of a tensor as such an archive: `data.pkl`, which calls `_rebuild_tensor_v2`
with a storage, an offset, a shape and strides, and `data/<key>`, the storage's bytes. Nothing is unpickled:
only these numbers are read from `data.pkl`, and then the elements from the storage. A tensor that is not
row-major, or that contradicts the metadata, is refused.

Source: torch/_utils.py and torch/serialization.py (PyTorch 2.6 to 2.13).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, TypeGuard

from holdfast._core.format.archive import Archive, BadArchive
from holdfast._core.format.container import Read
from holdfast._core.format.pickle_reader import BadPickle, Global, PickleReader, empty_dict, first
from holdfast._core.layout.tensor import CODE_OF
from holdfast.errors import CorruptCheckpoint, LoadFailed

_PICKLE_BYTES = 64 << 10
"""Limit of `data.pkl` in an archive of one tensor, which has a few hundred bytes."""
STORAGES = {  # storage classes that torch names in a pickle, and the dtype of their elements
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}


class Chunk(NamedTuple):
    """A chunk of a tensor or a whole object, and the archive that holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class ChunkLocation(NamedTuple):
    """The position of a chunk's elements in its file."""

    position: int
    nbytes: int
    crc: int
    whole: bool
    """Whether the chunk is the whole member, so that `crc` covers exactly its bytes."""


class _Storage(NamedTuple):
    kind: str
    key: str


class PickledTensor(NamedTuple):
    """A tensor as `data.pkl` describes it."""

    key: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(args: tuple[object, ...]) -> PickledTensor:
    """Read a call of `_rebuild_tensor_v2` (storage, offset, shape, strides, requires_grad, hooks), or of
    `_v3`, which also has the dtype at the end, because its storage has none."""
    storage, start, shape, stride, *rest = args if len(args) >= 4 else (None,) * 4
    if type(storage) is not _Storage or not _is_whole(shape) or not _is_whole(stride):
        raise BadPickle("it makes a tensor of other values")
    if type(start) is not int or not _is_whole((start,)):
        raise BadPickle("it makes a tensor of other values")
    named = rest[2] if storage.kind == "UntypedStorage" and len(rest) > 2 else storage.kind
    if not isinstance(named, str) or len(shape) != len(stride):
        raise BadPickle("it makes a tensor of other values")
    return PickledTensor(storage.key, STORAGES.get(named, named), start, shape, stride)


def _is_whole(values: object) -> TypeGuard[tuple[int, ...]]:
    """Return whether this is a tuple of at most 64 integers from 0 to 2^62."""
    return (
        type(values) is tuple
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )


class TensorPickle(PickleReader):
    """Reads `data.pkl`, tensors as storage, offset and strides."""

    def resolve(self, module: str, name: str) -> object:
        make = _MADE.get((module, name))
        if make is not None:
            return Global(module, name, make)
        storage = module == "torch" and (name in STORAGES or name in CODE_OF)
        if storage or (module, name) == ("torch.storage", "UntypedStorage"):
            return name
        return super().resolve(module, name)

    def persistent(self, about: object) -> _Storage:
        if (
            type(about) is not tuple
            or len(about) < 3
            or type(about[1]) is not str
            or type(about[2]) is not str
        ):
            raise BadPickle("it refers to a storage by what is none")
        return _Storage(about[1], about[2])


_MADE = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): first,
    ("collections", "OrderedDict"): empty_dict,
}


@lru_cache(maxsize=256)
def _plan(data: bytes) -> PickledTensor:
    """Read `data.pkl`; cached, because chunks of one shape have the same."""
    tensor = TensorPickle(data).read()
    if type(tensor) is not PickledTensor:
        raise BadPickle("it holds no tensor")
    return tensor


class OtherOrder(BadArchive):
    """The elements are complete, but in an order that is not supported; this is not damage."""


def locate(read: Read, chunk: Chunk, dtype: str, itemsize: int, name: str, where: str) -> ChunkLocation:
    """Find the elements of a tensor's chunk inside its archive."""
    try:
        archive = Archive(read, chunk.start, chunk.length)
        tensor = _plan(archive.load("data.pkl", _PICKLE_BYTES))
        return locate_in(archive, tensor, chunk.size, dtype, itemsize)
    except OtherOrder as error:
        raise LoadFailed(
            f"{where}/{chunk.file}: the part of {name!r} at {chunk.start} can't be read: {error}.",
            hint="Load it with torch's own functions, and save it again from contiguous tensors.",
            details={"file": chunk.file, "tensor": name},
        ) from None
    except (BadArchive, BadPickle) as error:
        raise CorruptCheckpoint(
            f"{where}/{chunk.file} is damaged: the part of {name!r} at {chunk.start} can't be read: {error}.",
            details={"file": chunk.file, "tensor": name},
        ) from None


def locate_in(
    archive: Archive, tensor: PickledTensor, size: tuple[int, ...], dtype: str, itemsize: int
) -> ChunkLocation:
    """Return the position of the elements. BadArchive if they contradict the metadata: `size`, `dtype`.
    OtherOrder if they do not lie row-major."""
    member = archive.find(f"data/{tensor.key}")
    nbytes = math.prod(size) * itemsize
    if tensor.shape != size and math.prod(tensor.shape) * itemsize != nbytes:
        raise BadArchive(f"it holds shape {list(tensor.shape)}, the metadata says {list(size)}")
    if tensor.dtype != dtype:
        raise BadArchive(f"it holds {tensor.dtype}, the metadata says {dtype}")
    # torch.save writes storages, not tensors: a view is stored with all of its storage.
    begin = tensor.start * itemsize
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    if begin + (last + 1 if nbytes else 0) * itemsize > member.nbytes:
        raise BadArchive("it ends too early")
    # Row-major elements are contiguous, as in our own files, so readers need no other path.
    if not _row_major(tensor.shape, tensor.stride):
        raise OtherOrder("its elements are not in row-major order, and Holdfast reads no other")
    position = archive.content(member) + begin
    return ChunkLocation(position, nbytes, member.crc, begin == 0 and member.nbytes == nbytes)


def _row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        # An axis of one element may have any stride, because it is never used.
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
