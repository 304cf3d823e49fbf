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

import numpy as np

from holdfast.collector import collector_paused
from holdfast.errors import CorruptCheckpoint
from holdfast.format.columns import Columns, pad
from holdfast.format.limits import OBJECT_BYTES, bounded_memory, check_size
from holdfast.format.pickle_reader import BadPickle, Global, Reader, Record
from holdfast.format.tensor_archive import Chunk, Member
from holdfast.layout.tensor import CODE_OF, OBJECT, TENSOR, dtype_code

OBJECT_PREFIX = b"T"
"""An object here is an archive of torch.save, which `format.objects` marks with this byte."""
BLOCK = 4 << 20
"""Bytes per read of a chunk that is read in part."""
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


def _first(args: tuple[object, ...]) -> object:
    return args[0] if args else None


def _empty_dict(args: tuple[object, ...]) -> dict[object, object]:
    if args:
        raise BadPickle("it makes an OrderedDict of other values")
    return {}


class _Metadata(Reader):
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
    ("torch.serialization", "_get_layout"): _first,
    ("collections", "OrderedDict"): _empty_dict,
}


class Entry(NamedTuple):
    """A tensor or an object of a checkpoint."""

    name: str
    kind: int
    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


def read_metadata(data: bytes, where: str) -> list[Entry]:
    """Return the tensors and objects of a checkpoint, sorted by name."""
    try:
        # Millions of records are built, and none is freed. The garbage collector would visit all of them
        # again and again, which took half of the time (docs/decisions/0011).
        with bounded_memory(where), collector_paused():
            root = _state(_Metadata(data).read())
            described = _described(root.get("state_dict_metadata"), len(data))
            stored = _stored(root.get("storage_data"))
            return [_entry(description, stored.get(description.name, {}), where) for description in described]
    except BadPickle as error:
        raise CorruptCheckpoint(
            f"{where} can't be read as the metadata of a torch_dist checkpoint: {error}."
        ) from None


class _Described(NamedTuple):
    """The entry of a name in `state_dict_metadata`."""

    name: str
    fields: dict[str, object]
    chunks: list[object] | None
    """Records of its chunks; None for an object."""


def _described(metadata: object, length: int) -> list[_Described]:
    """Return the entry of each name, sorted. Lists of chunks may be shared, but all together may not have
    more chunks than the pickle has bytes (`length`)."""
    if type(metadata) is not dict or not all(type(name) is str for name in metadata):
        raise BadPickle("it describes no tensors")
    described, count = [], 0
    for name in sorted(metadata):
        fields = _state(metadata[name])
        chunks = fields.get("chunks", [])
        if not isinstance(chunks, list):
            raise BadPickle("it describes chunks that are no list")
        count += len(chunks)
        described.append(_Described(name, fields, chunks if "chunks" in fields else None))
    if count > length:
        raise BadPickle("it describes more chunks than its length can pay for")
    return described


def _state(record: object) -> dict[str, object]:
    """Return the fields of a record."""
    if type(record) is not Record or not (record.state is None or type(record.state) is dict):
        raise BadPickle("a part of it is of another kind than it should be")
    return record.state or {}


def _stored(storage_data: object) -> dict[str, dict[bytes | None, object]]:
    """Return where each chunk is stored, by name and offset. Offsets are bytes, because numbers can be chosen
    so that their hashes collide."""
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


def _entry(description: _Described, stored: dict[bytes | None, object], where: str) -> Entry:
    """Return the entry of a name, with the position of each of its chunks."""
    name = description.name
    if description.chunks is None:
        chunk = _chunk(name, (), (), stored.get(None), where)
        check_size(f"The object {_short(name)} of {where}", chunk.length, OBJECT_BYTES)
        return Entry(name, OBJECT, "uint8", (), [chunk])
    shape, dtype = _dims(description.fields.get("size")), _dtype(description.fields.get("properties"))
    if math.prod(max(side, 1) for side in shape) > _MOST_ELEMENTS:
        raise BadPickle(f"{_short(name)} has the shape {list(shape)}")
    chunks = []
    for part in description.chunks:
        about = _state(part)
        offset, size = _dims(about.get("offsets")), _dims(about.get("sizes"))
        if 0 in size:
            continue  # nothing is stored for it
        if not len(offset) == len(size) == len(shape) or any(map(_beyond, offset, size, shape)):
            raise BadPickle(f"a chunk of {_short(name)} lies outside of its tensor")
        chunks.append(_chunk(name, offset, size, stored.get(_packed(offset)), where))
    return Entry(name, TENSOR, dtype, shape, chunks)


def _beyond(start: int, size: int, side: int) -> bool:
    return start + size > side


def _dtype(properties: object) -> str:
    if type(properties) is not Record:
        raise BadPickle("a tensor has no properties")
    state = properties.state
    # TensorProperties pickles itself as a tuple that begins with the dtype, because torch.memory_format can't
    # be pickled. A dict is accepted as well.
    dtype = state[0] if type(state) is tuple and state else _state(properties).get("dtype")
    if type(dtype) is not str or dtype not in CODE_OF:
        raise BadPickle("a tensor has no dtype that Holdfast knows")
    return dtype


def _short(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:199] + "…")


def _chunk(name: str, offset: tuple[int, ...], size: tuple[int, ...], info: object, where: str) -> Chunk:
    if info is None:
        raise BadPickle(f"it does not say where {_short(name)} is stored at {list(offset)}")
    info = _state(info)
    if info.get("transform_descriptors"):
        raise CorruptCheckpoint(
            f"{where}: {_short(name)} is compressed or encrypted, which Holdfast does not read."
        )
    path = info.get("relative_path")
    if type(path) is not str:
        raise BadPickle(f"it stores {_short(name)} in what is no file")
    # A plain file name, not a path: only files in the requested folder may be read.
    if not 0 < len(path) <= 255 or path in (".", "..") or not _APART.isdisjoint(path):
        raise CorruptCheckpoint(
            f"{where}: {_short(name)} points at the file {_short(path)}, outside the checkpoint's folder."
        )
    start, length = _dims((info.get("offset"), info.get("length")))
    return Chunk(offset, size, path, start, length)


def to_columns(entries: list[Entry], members: list[list[Member]]) -> Columns:
    """Return entries as index columns; an object is one chunk, its whole archive."""
    dims = max((len(entry.shape) for entry in entries), default=1) or 1
    files = sorted({chunk.file for entry in entries for chunk in entry.chunks})
    number = {name: index for index, name in enumerate(files)}
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    flat = [member for some in members for member in some]
    objects = [entry.kind == OBJECT for entry in entries for _ in entry.chunks]
    sizes = [
        (chunk.length,) if is_object else chunk.size for chunk, is_object in zip(chunks, objects, strict=True)
    ]
    offsets = [(0,) if is_object else chunk.offset for chunk, is_object in zip(chunks, objects, strict=True)]
    shapes = [(entry.chunks[0].length,) if entry.kind == OBJECT else entry.shape for entry in entries]
    # These formats have no digests, file sizes or ranks: the columns have no digest, -1 and 0 instead.
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
        # Without digests, a block is only the unit in which a reader reads parts of a chunk.
        block=np.clip(nbytes, 1, BLOCK),
        digest_end=np.zeros(len(chunks), "<i8"),
        digests=np.zeros(0, "<u8"),
        file_names=files,
        file_size=np.full(len(files), -1, "<i8"),
        file_rank=np.zeros(len(files), "<i4"),
    )


__all__ = ["Chunk", "Entry", "Member", "read_metadata", "to_columns"]


def only_one(values: object, name: str) -> object:
    """Take a ShardedObject out of the list of one in which megatron-core stores it."""
    if not isinstance(values, list) or len(values) != 1:
        raise CorruptCheckpoint(f"{name!r} is not a list of one, as megatron-core stores what is sharded.")
    return values[0]
