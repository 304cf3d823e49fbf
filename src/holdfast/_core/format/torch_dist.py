"""Read checkpoints of torch DCP and of megatron-core's `torch_dist` as columns with the position of each
chunk.

`.metadata` is a pickle. `pickle_reader` reads it, which imports and calls nothing: a handful of names become
plain values and records, and all others are refused. A `.distcp` file is a sequence of torch.save archives,
one per chunk (`tensor_archive`). The formats have no digests; a zip member has a CRC-32, which only a reader
of the whole member can check. No torch here.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py (2.6 to 2.13), megatron-core 0.13 to 0.16.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from holdfast._core.base.collector import collector_paused
from holdfast._core.format.columns import Columns, ForeignChunk, foreign_columns
from holdfast._core.format.limits import OBJECT_BYTES, bounded_memory, check_size
from holdfast._core.format.pickle_reader import (
    BadPickle,
    Global,
    PickledObject,
    PickleReader,
    empty_dict,
    first,
)
from holdfast._core.format.tensor_archive import Chunk, ChunkLocation
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import CODE_OF, OBJECT, TENSOR, TensorSpec, dtype_code
from holdfast.errors import CorruptCheckpoint

OBJECT_PREFIX = b"T"
"""An object here is an archive of torch.save, which `format.objects` marks with this byte."""
_MODULES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
_PACKS = [struct.Struct(f"<{count}q") for count in range(65)]
"""By number of dimensions; torch has no more than 64."""
_APART = frozenset("/\\\0")
"""Characters that a file name can't have."""
# At 16 bytes per element, the widest, an int64 can still count the bytes.
_MOST_ELEMENTS = 1 << 58


def _size(args: tuple[object, ...]) -> object:
    """Return the tuple that a torch.Size is made of."""
    if len(args) != 1 or type(args[0]) is not tuple:
        raise BadPickle("it makes a torch.Size of what is no tuple")
    return args[0]


class _MetadataReader(PickleReader):
    """Reads `.metadata`; all but a few of its classes become records."""

    def resolve(self, module: str, name: str) -> object:
        make = _MADE.get((module, name))
        if make is not None:
            return Global(module, name, make)
        if module == "torch" and (name in CODE_OF or name == "strided"):
            return name
        is_path = module in ("pathlib", "pathlib._local") and name.endswith("Path")
        if is_path or (module.startswith(_MODULES) and "." not in name and not name.startswith("__")):
            return Global(module, name)
        return super().resolve(module, name)


_MADE = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): first,
    ("collections", "OrderedDict"): empty_dict,
}


class MetadataEntry(NamedTuple):
    """A tensor or an object of a checkpoint."""

    name: str
    kind: int
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


def read_metadata(data: bytes, where: str) -> list[MetadataEntry]:
    """Return the tensors and objects of a checkpoint, sorted by name."""
    try:
        # Millions of records are built, and none is freed. The garbage collector would visit all of them
        # again and again, which took half of the time (docs/decisions/0011).
        with bounded_memory(where), collector_paused():
            root = _state(_MetadataReader(data).read())
            described = _described(root.get("state_dict_metadata"), len(data))
            stored = _stored(root.get("storage_data"))
            return [_entry(name, fields, stored.get(name, {}), where) for name, fields in described.items()]
    except BadPickle as error:
        raise CorruptCheckpoint(
            f"{where} can't be read as the metadata of a torch_dist checkpoint: {error}."
        ) from None


def _described(metadata: object, length: int) -> dict[str, dict[str, object]]:
    """Return the fields of each name, sorted. Lists of chunks may be shared, but all together may not have
    more chunks than the pickle has bytes (`length`)."""
    if type(metadata) is not dict or not all(type(name) is str for name in metadata):
        raise BadPickle("it describes no tensors")
    described: dict[str, dict[str, object]] = {name: _state(metadata[name]) for name in sorted(metadata)}
    count = 0
    for fields in described.values():
        chunks = fields.get("chunks", [])
        if not isinstance(chunks, list):
            raise BadPickle("it describes chunks that are no list")
        count += len(chunks)
    if count > length:
        raise BadPickle("it describes more chunks than its length can pay for")
    return described


def _state(record: object) -> dict[str, object]:
    """Return the fields of a record."""
    if type(record) is not PickledObject or not (record.state is None or type(record.state) is dict):
        raise BadPickle("a part of it is of another kind than it should be")
    return record.state or {}


def _stored(storage_data: object) -> dict[str, dict[bytes | None, object]]:
    """Return the storage information of each chunk, by name and offset. Offsets are encoded as bytes, because
    numbers can be chosen so that their hashes collide."""
    if type(storage_data) is not dict:
        raise BadPickle("it does not say where anything is stored")
    stored: dict[str, dict[bytes | None, object]] = {}
    for key, info in storage_data.items():
        about = _state(key)
        name, offset = about.get("fqn"), about.get("offset")
        if type(name) is not str:
            raise BadPickle("it stores something without a name")
        stored.setdefault(name, {})[None if offset is None else _packed(offset)] = info
    return stored


def _packed(dims: object) -> bytes:
    """Return dimensions as bytes. BadPickle if they are not integers from 0 on."""
    if not isinstance(dims, tuple | list) or len(dims) >= len(_PACKS):
        raise BadPickle("a shape or an offset in it is none")
    try:
        packed = _PACKS[len(dims)].pack(*dims)
    except struct.error:
        raise BadPickle("a shape or an offset in it is not of whole numbers") from None
    if dims and min(dims) < 0:
        raise BadPickle(f"a shape or an offset in it is {list(dims)}")
    return packed


def _dims(values: object) -> tuple[int, ...]:
    """Return checked dimensions."""
    packed = _packed(values)
    return _PACKS[len(packed) // 8].unpack(packed)


def _entry(
    name: str, fields: dict[str, object], stored: dict[bytes | None, object], where: str
) -> MetadataEntry:
    """Return the entry of a name, with the position of each of its chunks; an object has none."""
    if "chunks" not in fields:
        chunk = _chunk(name, (), (), stored.get(None), where)
        check_size(f"The object {name[:200]!r} of {where}", chunk.length, OBJECT_BYTES)
        return MetadataEntry(name, OBJECT, "uint8", (), [chunk])
    shape, dtype = _dims(fields.get("size")), _dtype(fields.get("properties"))
    if math.prod(max(side, 1) for side in shape) > _MOST_ELEMENTS:
        raise BadPickle(f"{name[:200]!r} has the shape {list(shape)}")
    chunks, parts = [], fields["chunks"]
    assert isinstance(parts, list)  # `_described` checks it
    for part in parts:
        about = _state(part)
        offset, size = _dims(about.get("offsets")), _dims(about.get("sizes"))
        if 0 in size:
            continue  # nothing is stored for it
        if not len(offset) == len(size) == len(shape) or any(
            start + length > side for start, length, side in zip(offset, size, shape, strict=True)
        ):
            raise BadPickle(f"a chunk of {name[:200]!r} lies outside of its tensor")
        chunks.append(_chunk(name, offset, size, stored.get(_packed(offset)), where))
    return MetadataEntry(name, TENSOR, dtype, shape, chunks)


def _dtype(properties: object) -> str:
    if type(properties) is not PickledObject:
        raise BadPickle("a tensor has no properties")
    state = properties.state
    # TensorProperties pickles itself as a tuple that begins with the dtype, because torch.memory_format can't
    # be pickled. A dict is accepted as well.
    dtype = state[0] if type(state) is tuple and state else _state(properties).get("dtype")
    if type(dtype) is not str or dtype not in CODE_OF:
        raise BadPickle("a tensor has no dtype that Holdfast knows")
    return dtype


def _chunk(name: str, offset: tuple[int, ...], size: tuple[int, ...], info: object, where: str) -> Chunk:
    if info is None:
        raise BadPickle(f"it does not say where {name[:200]!r} is stored at {list(offset)}")
    info = _state(info)
    if info.get("transform_descriptors"):
        raise CorruptCheckpoint(
            f"{where}: {name[:200]!r} is compressed or encrypted, which Holdfast does not read.",
            hint="If you trust it, load it with torch.distributed.checkpoint, which unpickles what it holds.",
        )
    path = info.get("relative_path")
    if type(path) is not str:
        raise BadPickle(f"it stores {name[:200]!r} in what is no file")
    # A plain file name, not a path: only files in the requested folder may be read.
    if not 0 < len(path) <= 255 or path in (".", "..") or not _APART.isdisjoint(path):
        raise CorruptCheckpoint(
            f"{where}: {name[:200]!r} points at the file {path[:200]!r}, outside the checkpoint's folder."
        )
    start, length = _dims((info.get("offset"), info.get("length")))
    return Chunk(offset, size, path, start, length)


def to_columns(entries: list[MetadataEntry], locations: list[list[ChunkLocation]]) -> Columns:
    """Return entries as index columns; an object is one chunk, its whole archive."""
    tensors, chunks = [], []
    for entry, some in zip(entries, locations, strict=True):
        is_object = entry.kind == OBJECT
        shape = (entry.chunks[0].length,) if is_object else entry.shape
        code = dtype_code(entry.dtype, repr(entry.name))
        tensors.append((TensorSpec(entry.name, code, shape, entry.kind), len(some)))
        for chunk, location in zip(entry.chunks, some, strict=True):
            box = whole(shape) if is_object else Box(chunk.offset, chunk.size)
            chunks.append(ForeignChunk(box, chunk.file, location.position, location.nbytes))
    return foreign_columns(tensors, chunks)


def only_one(values: object, name: str) -> object:
    """Return the ShardedObject in the one-element list in which megatron-core stores it."""
    if not isinstance(values, list) or len(values) != 1:
        raise CorruptCheckpoint(f"{name!r} is not a list of one, as megatron-core stores what is sharded.")
    return values[0]
