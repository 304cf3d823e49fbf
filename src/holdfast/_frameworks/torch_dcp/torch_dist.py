"""Conversion of torch DCP's and megatron-core's checkpoints (`torch_dist`) to Holdfast's format and back.

Neither direction holds more than a few chunks in memory. An import copies the stored bytes, checks the CRC-32
of each archive, and executes nothing. Stock torch DCP and stock megatron-core load an export.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterator
from contextlib import closing

import torch
from torch.distributed.checkpoint import metadata as dcp

from holdfast._core.base.options import Options
from holdfast._core.base.reporting import Meter, quiet
from holdfast._core.base.values import ReportProgress
from holdfast._core.format import objects, plain_objects
from holdfast._core.format.archive import Archive, BadArchive
from holdfast._core.format.columns import Columns, unpad
from holdfast._core.format.index import Index
from holdfast._core.format.limits import bounded_memory
from holdfast._core.format.names import (
    COMMON,
    COMMON_FILE,
    COMMON_SHARD,
    CONFIG,
    HOLDFAST_CONFIG,
    INDEX,
    MARKER_HEAD,
    METADATA,
    SHARD,
)
from holdfast._core.format.tensor_archive import ChunkLocation
from holdfast._core.format.torch_dist import only_one
from holdfast._core.format.torch_objects import allowing
from holdfast._core.io.index_file import open_index
from holdfast._core.io.missing_files import reading
from holdfast._core.io.open_checkpoint import TorchDist, open_source
from holdfast._core.io.small_files import read_file
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import OBJECT, TensorSpec, dtype_code
from holdfast._core.loading.boxes import Wanted, read_boxes
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job
from holdfast._core.saving.job import SaveReport
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import Part, torch_dtype
from holdfast._core.store.base import Reader, Store, Writer, replace_file, storage_errors
from holdfast._core.store.filesystem import make_durably
from holdfast._core.store.local import open_local, open_store
from holdfast._core.store.pins import Pin
from holdfast._core.torch_private import storage_info
from holdfast._frameworks.megatron import enumerations
from holdfast._frameworks.torch_dcp import metadata
from holdfast._frameworks.torch_dcp.metadata import Described, Paths, Stored
from holdfast._frameworks.torch_dcp.stored_object import read_object
from holdfast._models.conversion.folder import delete, label_of, left_in, put_files, refuse_changed
from holdfast._models.conversion.importing import FileMemory, leaf, run_import
from holdfast.errors import BadInput, CorruptCheckpoint

PER_FILE = 4 << 30
"""Bytes in a data file after which an export begins the next one."""
_AT_ONCE = 64 << 20
"""Bytes that an export reads at once; a chunk that is larger is read alone."""
_EXPORT = "holdfast-export-"
"""Prefix of the `save_id` in the `.metadata` of an export."""


class _Checked(FileMemory):
    """A chunk of a torch_dist file, whose CRC-32 is checked on reading."""

    def __init__(self, spec: TensorSpec, box: Box, reader: Reader, location: ChunkLocation, meter: Meter):
        super().__init__(spec, box, reader.read_into, location.position, meter)
        self._spec, self._location, self._crc = spec, location, 0

    def read(self, offset: int, view: memoryview) -> None:
        super().read(offset, view)
        # A save without column panels reads a chunk from its first byte to its last, as a CRC needs them.
        self._crc = zlib.crc32(view, self._crc if offset else 0)
        # A member that several tensors share is not checked.
        is_end = self._location.whole and offset + len(view) == self.nbytes
        # A stored CRC of 0 means none: torch has an option not to compute them.
        if is_end and self._location.crc not in (0, self._crc):
            name = self._spec.name
            raise CorruptCheckpoint(
                f"{name!r} is damaged in the checkpoint to be imported: its bytes do not match their CRC-32.",
                details={"tensor": name},
            )


def import_torch_dist(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    fingerprint: bool = False,
    progress: ReportProgress = quiet,
) -> SaveReport:
    """Convert a torch DCP or megatron-core `torch_dist` checkpoint to a Holdfast one.

    source: the folder with `.metadata`. out: a folder that does not exist, is empty, or in which the same
        import was interrupted, which then starts again; after one that has ended nothing is left to do.
    fingerprint: as in `Options`.
    Raises BadInput, NotCommitted, CorruptCheckpoint (with the tensor or file), StorageError.
    """
    store, target = open_store(source), open_store(out)
    has_config = store.stat(CONFIG) is not None
    # Open until the save has ended, because a chunk is read when it is written.
    with open_source(store) as opened:
        if not isinstance(opened, TorchDist):
            if store.stat(INDEX) is not None:
                raise BadInput(f"{store.url} is a Holdfast checkpoint already.")
            raise BadInput(
                f"{store.url} is no checkpoint of torch DCP or megatron-core: there is no {METADATA}.",
                hint="A published model is for `holdfast import hf`.",
            )
        report = run_import(
            store,
            target,
            begin_call(Job(no_dist=True)),
            lambda: _leaves(store, opened, Meter(progress), has_config),
            identity=opened.identity,
            step=step,
            options=Options(fingerprint=fingerprint),
            imported="torch_dist",
        )
    # After the commit, as in a save: frameworks recognise a distributed checkpoint by this file.
    if has_config:
        replace_file(target, CONFIG, json.dumps(HOLDFAST_CONFIG).encode())
    return report


def _leaves(store: Store, opened: TorchDist, meter: Meter, has_config: bool) -> Iterator[Leaf]:
    for entry, chunk, location, reader in opened.chunks():
        if entry.kind == OBJECT:
            with bounded_memory(f"The object {entry.name!r} of {opened.where}"):
                data = plain_objects.TORCH + _intact(reader.read(chunk.start, chunk.length), entry.name)
            # megatron-core keeps each object in a list. Only its folders have a configuration.
            if SHARD in entry.name and has_config:
                data = _unwrapped(data, entry.name)
            name = COMMON if entry.name == COMMON_SHARD else entry.name
            yield leaf(name, Part.object(name, data))
        else:
            box = Box(chunk.offset, chunk.size)
            spec = TensorSpec(entry.name, dtype_code(entry.dtype, repr(entry.name)), entry.shape)
            yield leaf(entry.name, Part(spec, box, _Checked(spec, box, reader, location, meter)))
    for entry in opened.empty():
        yield leaf(entry.name, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)))
    if (common := read_file(store, COMMON_FILE)) is not None:
        yield leaf(COMMON, Part.object(COMMON, plain_objects.TORCH + _intact(common, COMMON_FILE)))


def _unwrapped(data: bytes, name: str) -> bytes:
    """Take a ShardedObject out of the list of one in which megatron-core stores it."""
    with allowing(enumerations.if_installed()):
        return objects.encode(only_one(objects.decode(data, name), name), name)


def _intact(data: bytes, name: str) -> bytes:
    """Return an archive of torch.save; raise CorruptCheckpoint if the CRC of a member does not match."""
    try:
        damaged = Archive(lambda start, length: data[start : start + length], 0, len(data)).damaged()
    except BadArchive as error:
        raise CorruptCheckpoint(f"{name!r} is damaged: {error}.") from None
    if damaged is not None:
        raise CorruptCheckpoint(f"{name!r} is damaged: {damaged} in its archive is not what was written.")
    return data


def export_torch_dist(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: ReportProgress = quiet
) -> int:
    """Convert a Holdfast checkpoint to a `torch_dist` one; return the bytes written.

    out: a folder that does not exist, is empty, or in which the same export was interrupted, which then
        starts again. `.metadata` is written last. Stock torch DCP loads any export; stock megatron-core loads
        those with common state, which `holdfast.megatron.save` stores.
    """
    store, target = open_store(source), open_local(out, "An export to torch_dist")
    with closing(Pin(store)), open_index(store) as index:
        label = label_of(index.identity)
        small = _small_files(store)
        left = left_in(
            target,
            lambda path: path.startswith("__0_") and f"-{label}-" in path,
            (*small, METADATA),
            "an export",
        )
        refuse_changed(target, small)
        token = _finished(target, label)
        if token is not None:
            delete(target, [path for path in left if token not in path])
            return 0
        is_new = target.stat() is None
        with storage_errors("Making", target.url):
            make_durably(target.root)
        writer = _Writer(target, f"{label}-{secrets.token_hex(4)}")
        try:
            described, planned = _export(store, index, writer, progress)
            # Synced before `.metadata` names it: a reader that finds that file finds all data.
            writer.close()
        except BaseException:
            writer.discard()
            if is_new:
                target.remove()
            raise
        put_files(target, small)
        made = metadata.encode(described, planned, writer.stored, save_id=_EXPORT + writer.suffix)
        target.publish(METADATA, made, None)
        delete(target, left)
    return writer.written


def _small_files(store: Store) -> dict[str, bytes]:
    """Return the additional files that megatron-core needs in an export; none without common state."""
    with allowing(enumerations.if_installed()):
        common = read_object(store, COMMON)
        if common is None:
            return {}
        config = {**HOLDFAST_CONFIG, "sharded_backend": "torch_dist", "common_backend": "torch"}
        return {COMMON_FILE: _archive(common), CONFIG: json.dumps(config).encode()}


def _finished(out: Store, label: str) -> str | None:
    """Return the text in the file names of a finished export, which interrupted ones lack; None if there is
    no finished one."""
    if out.stat(METADATA) is None:
        return None
    with closing(out.open(METADATA)) as reader:
        found = re.search(f"{_EXPORT}({label}-[0-9a-f]+)".encode(), reader.read(0, MARKER_HEAD))
    if found is None:
        raise BadInput(f"{out.url} holds a checkpoint already; an export goes into a new folder.")
    return found[1].decode()


def _export(store: Store, index: Index, writer: _Writer, progress: ReportProgress) -> tuple[Described, Paths]:
    """Write the data; return the descriptions for `.metadata`, and the paths."""
    columns = index.select()
    tensors = {
        spec.name: dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=torch_dtype(spec.dtype)), torch.Size(spec.shape), []
        )
        for spec in columns.specs()
        if spec.kind != OBJECT
    }
    planned: Paths = {name: (name,) for name in tensors}
    described: Described = {**tensors}
    meter = Meter(progress, int(columns.chunk_bytes().sum()))
    for batch in _batches(columns):
        with reading(store, index.identity):
            contents, _ = read_boxes(store, index, batch)
        for (spec, box, _), content in zip(batch, contents, strict=True):
            if spec.kind != OBJECT:
                writer.add(dcp.MetadataIndex(spec.name, box.offset), _archive(content))
                size = torch.Size(box.offset), torch.Size(box.shape)
                tensors[spec.name].chunks.append(dcp.ChunkStorageMetadata(*size))
            elif spec.name != COMMON:
                with allowing(enumerations.if_installed()):
                    parts, paths = _parts(spec.name, objects.decode(content.numpy().tobytes(), spec.name))
                    for part, value in parts.items():
                        writer.add(dcp.MetadataIndex(part), _archive(value))
                        described[part] = dcp.BytesStorageMetadata()
                planned |= paths
            meter.moved(content.nbytes)
    return described, planned


def _batches(columns: Columns) -> Iterator[list[Wanted]]:
    """Yield all chunks in batches of at most `_AT_ONCE` bytes, because each read has a fixed cost."""
    batch, size = list[Wanted](), 0
    sizes = columns.chunk_bytes().tolist()
    for row, spec in enumerate(columns.specs()):
        chunks, ndim = columns.chunks_of(row), len(spec.shape)
        for chunk in range(chunks.start, chunks.stop):
            if batch and size + sizes[chunk] > _AT_ONCE:
                yield batch
                batch, size = [], 0
            box = Box(unpad(columns.offset[chunk], ndim), unpad(columns.size[chunk], ndim))
            batch.append(Wanted(spec, box, spec.dtype))
            size += sizes[chunk]
    yield batch


def _parts(name: str, value: object) -> tuple[dict[str, object], Paths]:
    """Return the parts of an object that an export stores, and their paths."""
    if SHARD in name:
        return {name: [value]}, {name: (name,)}
    return metadata.in_parts(name, value) if isinstance(value, list) else ({name: value}, {name: (name,)})


class _Writer:
    """Writes archives one after another into `.distcp` files."""

    def __init__(self, out: Store, suffix: str) -> None:
        self.suffix, self.written = suffix, 0
        self.stored: Stored = {}
        self._out, self._names = out, list[str]()
        self._writer: Writer | None = None
        self._size = 0
        """Size of the current file so far."""

    def add(self, key: dcp.MetadataIndex, archive: bytes) -> None:
        if self._writer is None or self._size > PER_FILE:
            self.close()
            self._names.append(f"__0_{len(self._names)}-{self.suffix}.distcp")
            self._writer, self._size = self._out.create(self._names[-1]), 0
        self.stored[key] = storage_info(self._names[-1], self._size, len(archive))
        self._writer.write_at(self._size, [archive])
        self._size += len(archive)
        self.written += len(archive)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()
        delete(self._out, self._names)


def _archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
