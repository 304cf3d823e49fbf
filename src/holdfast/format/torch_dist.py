"""Checkpoints of torch DCP and of megatron-core's `torch_dist`, read as columns: where each chunk's bytes lie.

`.metadata` is a pickle. It is read by an unpickler that knows a handful of names, all of which become plain records,
and refuses every other: nothing in it is called. A `.distcp` file holds one `torch.save` archive after another, each a zip
file whose members are stored as they are, so a chunk's elements lie in one piece and are read in place, in
slices too. The formats carry no digests; a zip member has a CRC-32, which `crc_of` gives to who reads it whole.
No torch here.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py (2.6 to 2.13), megatron-core 0.13 to 0.16.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from holdfast.errors import CorruptCheckpoint
from holdfast.format.columns import Columns, pad
from holdfast.layout.tensor import CODE_OF, OBJECT, TENSOR, dtype_code

Read = Callable[[int, int], bytes]
METADATA = ".metadata"
OBJECT_PREFIX = b"T"
"""An object here is an archive of torch.save: what `format.objects` marks with this byte."""
COMMON_FILE = "common.pt"
"""Where megatron-core keeps what isn't sharded."""
COMMON = "common_state"
"""The object that holds it in a Holdfast checkpoint; megatron-core 0.19's name for it."""
COMMON_SHARD = f"{COMMON}/shard_0_1"
"""Where megatron-core keeps it since 0.19."""
CONFIG = "metadata.json"
"""By which Megatron's frameworks know a distributed checkpoint."""
HOLDFAST_CONFIG = {
    "sharded_backend": "holdfast",
    "sharded_backend_version": 1,
    "common_backend": "holdfast",
    "common_backend_version": 1,
}
"""The content of CONFIG in a Holdfast checkpoint."""
SHARD = "/shard_"
"""In the name of a ShardedObject of megatron-core, which stores it in a list of one."""
BLOCK = 4 << 20
"""Bytes that are read at once of a chunk of which not all is wanted."""
_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")


class _Record:
    """Stands for an instance of a class that `.metadata` names; keeps its attributes, runs nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.values = state


def _as_is(*values: Any) -> Any:
    return values[0] if values else None


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in CODE_OF:
            return name
        if (module, name) in (("torch.serialization", "_get_layout"), ("torch", "strided")):
            return _as_is
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "pathlib" and name.endswith("Path"):
            return lambda *parts: "/".join(map(str, parts))
        if module.startswith(_MODULES) and "." not in name and not name.startswith("__"):
            return type(name, (_Record,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of the format")


class Chunk(NamedTuple):
    """A chunk of a tensor or a whole object, and the archive that holds it."""

    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: str
    start: int
    length: int


class Entry(NamedTuple):
    name: str
    kind: int
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


def read_metadata(data: bytes, where: str) -> list[Entry]:
    """The tensors and objects of a checkpoint, sorted by name."""
    try:
        root = _Metadata(io.BytesIO(data)).load()
        lies: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for key, info in root.storage_data.items():
            offset = getattr(key, "offset", None)
            lies.setdefault(str(key.fqn), {})[None if offset is None else tuple(offset)] = info
        return [
            _entry(str(name), said, lies.get(str(name), {}), where)
            for name, said in sorted(root.state_dict_metadata.items())
        ]
    except CorruptCheckpoint:
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            f"{where} can't be read as the metadata of a torch_dist checkpoint: {type(error).__name__}: {error}."
        ) from None


def _entry(name: str, said: Any, lies: dict[tuple[int, ...] | None, Any], where: str) -> Entry:
    if not hasattr(said, "chunks"):
        info = lies[None]
        return Entry(name, OBJECT, "uint8", (), [_chunk(name, (), (), info, where)])
    dtype = said.properties.values[0] if said.properties.values else said.properties.dtype
    chunks = []
    for chunk in said.chunks:
        offset, size = _dims(chunk.offsets), _dims(chunk.sizes)
        if not all(size):
            continue  # nothing is stored for it
        chunks.append(_chunk(name, offset, size, lies[offset], where))
    return Entry(name, TENSOR, str(dtype), _dims(said.size), chunks)


def _chunk(name: str, offset: tuple[int, ...], size: tuple[int, ...], info: Any, where: str) -> Chunk:
    if getattr(info, "transform_descriptors", None):
        raise CorruptCheckpoint(
            f"{where}: {name!r} is compressed or encrypted, which Holdfast does not read."
        )
    path = str(info.relative_path)
    if "/" in path or "\\" in path or path in ("", ".", "..") or "\0" in path:
        raise CorruptCheckpoint(
            f"{where}: {name!r} points at the file {path!r}, outside the checkpoint's folder."
        )
    return Chunk(offset, size, path, *_dims((info.offset, info.length)))


def _dims(values: Any) -> tuple[int, ...]:
    dims = tuple(int(value) for value in values)
    if any(value < 0 or value >= 1 << 62 for value in dims):
        raise ValueError(f"a shape or offset of {dims}")
    return dims


class Member(NamedTuple):
    """Where a chunk's elements lie in its file."""

    position: int
    nbytes: int
    crc: int
    whole: bool
    """The chunk is the whole member, so that `crc` is of exactly its bytes."""


class _Tensor(NamedTuple):
    key: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Plan(pickle.Unpickler):
    """Reads `data.pkl` of a torch.save archive of one tensor: which storage, where in it, which strides."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _as_is
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        if module == "torch" and name in CODE_OF:
            return name
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


_STORAGES = {
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
}


def _tensor(storage: Any, start: int, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    kind = str(storage[1])
    dtype = _STORAGES.get(kind, str(rest[2]) if kind == "UntypedStorage" and len(rest) > 2 else kind)
    return _Tensor(str(storage[2]), dtype, int(start), tuple(shape), tuple(stride))


def locate(read: Read, chunk: Chunk, dtype: str, itemsize: int, name: str, where: str) -> Member:
    """Find the elements of a tensor's chunk inside its archive."""
    try:
        members = _members(read, chunk)
        folder = next(iter(members)).partition("/")[0]
        start, length, _ = members[f"{folder}/data.pkl"]
        found = _Plan(io.BytesIO(read(chunk.start + start, length))).load()
        if not isinstance(found, _Tensor):
            raise ValueError("it holds no tensor")
        start, length, crc = members[f"{folder}/data/{found.key}"]
        nbytes = int(np.prod(chunk.size, dtype=np.int64)) * itemsize
        if found.shape != chunk.size and int(np.prod(found.shape, dtype=np.int64)) * itemsize != nbytes:
            raise ValueError(f"it holds shape {list(found.shape)}, the metadata says {list(chunk.size)}")
        if found.dtype != dtype:
            raise ValueError(f"it holds {found.dtype}, the metadata says {dtype}")
        if not _row_major(found.shape, found.stride):
            raise ValueError(
                "its elements are not in row-major order; save it again from a contiguous tensor"
            )
        begin = found.start * itemsize
        if begin < 0 or begin + nbytes > length:
            raise ValueError("it ends too early")
        return Member(chunk.start + start + begin, nbytes, crc, begin == 0 and length == nbytes)
    except Exception as error:
        raise CorruptCheckpoint(
            f"{where}/{chunk.file} is damaged: the part of {name!r} at {chunk.start} can't be read: {error}.",
            details={"file": chunk.file, "tensor": name},
        ) from None


def _row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _members(read: Read, chunk: Chunk) -> dict[str, tuple[int, int, int]]:
    """(start in the archive, length, CRC-32) of each member of a zip archive, by name."""
    tail_length = min(chunk.length, 4096)
    tail = read(chunk.start + chunk.length - tail_length, tail_length)
    end = tail.rfind(b"PK\x05\x06")
    if end < 0:
        raise ValueError("no zip archive ends there")
    count, size, offset = struct.unpack_from("<HII", tail, end + 10)
    if offset == 0xFFFFFFFF or count == 0xFFFF:  # zip64: torch always writes its record, too
        count, size, offset = _zip64(read, chunk, tail, end)
    begin = tail_length - (chunk.length - offset)
    listing = tail[begin:] if begin >= 0 else read(chunk.start + offset, size)
    members: dict[str, tuple[int, int, int]] = {}
    at = 0
    for _ in range(count):
        if listing[at : at + 4] != b"PK\x01\x02":
            raise ValueError("the list of its zip archive is damaged")
        method, crc, packed, length = struct.unpack_from("<H4xIII", listing, at + 10)
        names, extra, comment = struct.unpack_from("<HHH", listing, at + 28)
        (local,) = struct.unpack_from("<I", listing, at + 42)
        name = listing[at + 46 : at + 46 + names].decode()
        more = listing[at + 46 + names : at + 46 + names + extra]
        length, packed, local = _wide(more, length, packed, local)
        if method != 0 or packed != length:
            raise ValueError("it is compressed")
        head = read(chunk.start + local, 30)
        if head[:4] != b"PK\x03\x04":
            raise ValueError("a member of its zip archive is damaged")
        members[name] = (local + 30 + sum(struct.unpack_from("<HH", head, 26)), length, crc)
        at += 46 + names + extra + comment
    return members


def _zip64(read: Read, chunk: Chunk, tail: bytes, end: int) -> tuple[int, int, int]:
    locator = tail.rfind(b"PK\x06\x07", 0, end)
    (place,) = struct.unpack_from("<Q", tail, locator + 8)
    record = read(chunk.start + place, 56)
    if locator < 0 or record[:4] != b"PK\x06\x06":
        raise ValueError("the end of its zip archive is damaged")
    count, size, offset = struct.unpack_from("<QQQ", record, 32)
    return count, size, offset


def _wide(extra: bytes, length: int, packed: int, local: int) -> tuple[int, int, int]:
    """Sizes over 4 GiB stand in an extra field of the member."""
    values = [length, packed, local]
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            fields = list(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
            values = [fields.pop(0) if value == 0xFFFFFFFF and fields else value for value in values]
        at += 4 + size
    return values[0], values[1], values[2]


def crc_of(data: bytes | memoryview, crc: int = 0) -> int:
    return zlib.crc32(data, crc)


def to_columns(entries: list[Entry], members: list[list[Member]]) -> Columns:
    """Entries as an index's columns; an object's bytes are one chunk, its whole archive."""
    dims = max((len(entry.shape) for entry in entries), default=1) or 1
    files = sorted({chunk.file for entry in entries for chunk in entry.chunks})
    number = {name: at for at, name in enumerate(files)}
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    flat = [member for some in members for member in some]
    objects = [entry.kind == OBJECT for entry in entries for _ in entry.chunks]
    sizes = [
        (chunk.length,) if is_object else chunk.size for chunk, is_object in zip(chunks, objects, strict=True)
    ]
    offsets = [(0,) if is_object else chunk.offset for chunk, is_object in zip(chunks, objects, strict=True)]
    shapes = [(entry.chunks[0].length,) if entry.kind == OBJECT else entry.shape for entry in entries]
    code = np.asarray([dtype_code(entry.dtype, repr(entry.name)) for entry in entries], "u1")
    nbytes = np.asarray([member.nbytes for member in flat], "<i8")
    return Columns(
        names=[entry.name for entry in entries],
        dtype=code,
        kind=np.asarray([entry.kind for entry in entries], "u1"),
        ndim=np.asarray([len(shape) for shape in shapes], "u1"),
        shape=pad(shapes, dims, 1),
        chunk_end=np.cumsum([len(entry.chunks) for entry in entries], dtype="<i8"),
        offset=pad(offsets, dims, 0),
        size=pad(sizes, dims, 1),
        file=np.asarray([number[chunk.file] for chunk in chunks], "<i4"),
        position=np.asarray([member.position for member in flat], "<i8"),
        block=np.clip(nbytes, 1, BLOCK),
        digest_end=np.zeros(len(chunks), "<i8"),
        digests=np.zeros(0, "<u8"),
        file_names=files,
        file_size=np.full(len(files), -1, "<i8"),
        file_rank=np.zeros(len(files), "<i4"),
    )


__all__ = ["METADATA", "Chunk", "Entry", "Member", "crc_of", "locate", "read_metadata", "to_columns"]
