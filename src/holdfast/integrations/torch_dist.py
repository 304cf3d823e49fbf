"""Conversion of torch DCP's and megatron-core's checkpoints (`torch_dist`) to Holdfast's format and back.

Neither direction holds more than one chunk in memory. An import copies the stored bytes, checks the CRC-32 of
each archive, and executes nothing. Stock torch DCP and stock megatron-core load an export.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp

from holdfast.errors import BadInput, CorruptCheckpoint
from holdfast.format import objects, torch_dist
from holdfast.format.archive import Archive, BadArchive
from holdfast.format.columns import Array, Columns, unpad
from holdfast.format.limits import bounded_memory
from holdfast.format.names import COMMON, COMMON_FILE, COMMON_SHARD, CONFIG, HOLDFAST_CONFIG, METADATA, SHARD
from holdfast.format.torch_dist import only_one
from holdfast.format.torch_objects import Allowed, allowing
from holdfast.integrations import dcp_metadata as metadata
from holdfast.integrations.dcp_metadata import Described, Stored, stored_at
from holdfast.integrations.reporting import Progress, quiet
from holdfast.io.index_file import open_index
from holdfast.io.open_checkpoint import TorchDist, open_source
from holdfast.io.raw_read import read_all, read_box
from holdfast.io.small_files import read_file
from holdfast.layout.box import Box
from holdfast.layout.tensor import OBJECT, TensorSpec, dtype_code
from holdfast.options import Options
from holdfast.plan.shard_table import contiguous_at
from holdfast.protocol.call import begin_call
from holdfast.roster.memory import MemoryRoster
from holdfast.saving.job import SaveJob, SaveReport
from holdfast.saving.request import SaveRequest
from holdfast.state.leaf import Flat, Leaf
from holdfast.state.memory import Part, torch_dtype
from holdfast.store.base import Reader, Store, replace_file, storage_errors
from holdfast.store.local import open_store
from holdfast.values import Buffer

PER_FILE = 4 << 30
"""Bytes in a data file after which an export begins the next one."""
CHECKED_AT_ONCE = 8 << 20
"""Bytes of a chunk that are read at a time to check its CRC."""


class _FileMemory:
    """A chunk of a torch_dist file as the source of a save, which reads it when it writes."""

    # 0, so that a save calls `gather`: there is no memory to write from.
    address = 0

    def __init__(
        self, reader: Reader, member: torch_dist.Member, box: Box, name: str, moved: Callable[[int], None]
    ) -> None:
        self._reader, self._member, self._shape = reader, member, box.shape
        self._name, self._moved = name, moved
        self._itemsize = member.nbytes // max(box.volume, 1)
        self._crc, self._next = 0, 0

    def gather(self, box: Box, out: Buffer) -> None:
        view = memoryview(out).cast("B")
        if not self._in_order(box):
            self._check_all()
        start = contiguous_at(self._shape, box)
        if start is None:
            # A box with gaps (some columns) needs the whole chunk, which may be held in memory.
            whole = np.frombuffer(self._reader.read(self._member.position, self._member.nbytes), np.uint8)
            view[:] = whole.reshape(*self._shape, self._itemsize)[box.slices()].tobytes()
        else:
            offset = start * self._itemsize
            if self._reader.read_into(self._member.position + offset, [view]) != len(view):
                raise CorruptCheckpoint(f"The file that holds {self._name!r} ends too early.")
            self._check(offset, view)
        self._moved(len(view))

    def _in_order(self, box: Box) -> bool:
        """Return whether a box continues a read from front to back."""
        start = contiguous_at(self._shape, box)
        return start is not None and start * self._itemsize == self._next

    def _check_all(self) -> None:
        """Check the CRC of the whole chunk, before a part of it is read out of order."""
        if self._next == self._member.nbytes or not self._member.whole:
            return
        crc = 0
        for low in range(0, self._member.nbytes, CHECKED_AT_ONCE):
            size = min(CHECKED_AT_ONCE, self._member.nbytes - low)
            crc = zlib.crc32(self._reader.read(self._member.position + low, size), crc)
        self._next = self._member.nbytes
        self._refuse_damage(crc)

    def _check(self, offset: int, view: memoryview) -> None:
        """Continue the CRC of a chunk that is read from front to back, and check it at the end."""
        # A CRC can only be continued: parts in another order, or of a member that several tensors share, are
        # not checked.
        if offset != self._next or not self._member.whole:
            return
        self._crc, self._next = zlib.crc32(view, self._crc), offset + len(view)
        if self._next == self._member.nbytes:
            self._refuse_damage(self._crc)

    def _refuse_damage(self, crc: int) -> None:
        # A stored CRC of 0 means none: torch has an option not to compute them.
        if self._member.crc not in (0, crc):
            raise CorruptCheckpoint(
                f"{self._name!r} is damaged in the checkpoint to be imported: "
                f"its bytes do not match their CRC-32.",
                details={"tensor": self._name},
            )

    def scatter(self, box: Box, data: Buffer, shape: tuple[int, ...], inside: Box) -> None:
        raise AssertionError("a file that is imported is not written to")


def import_torch_dist(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    options: Options | None = None,
    progress: Progress = quiet,
) -> SaveReport:
    """Convert a torch DCP or megatron-core `torch_dist` checkpoint to a Holdfast one.

    source: the folder with `.metadata`. out: a folder that does not exist or is empty.
    Raises BadInput, NotCommitted, CorruptCheckpoint (with the tensor or file), StorageError.
    """
    store, folder = open_store(source), Path(os.fspath(source))
    # Before the source is read, which may take a long time.
    _refuse_what_is_there(out, "an import")
    # Open until the save has ended, because a chunk is read when it is written.
    with open_source(store) as opened:
        if not isinstance(opened, TorchDist):
            raise BadInput(f"{store.url} is a Holdfast checkpoint already.")
        chunks = list(opened.chunks())
        total, done = sum(member.nbytes for _, _, member, _ in chunks), 0

        def moved(size: int) -> None:
            nonlocal done
            done += size
            progress(done, total)

        def values() -> Iterator[tuple[str, object]]:
            for entry, chunk, member, reader in chunks:
                if entry.kind == OBJECT:
                    with bounded_memory(f"The object {entry.name!r} of {opened.where}"):
                        data = objects.TORCH + _intact(reader.read(chunk.start, chunk.length), entry.name)
                    # megatron-core keeps each object in a list. Only its folders have a configuration.
                    if SHARD in entry.name and (folder / CONFIG).exists():
                        data = _unwrapped(data, entry.name)
                    name = COMMON if entry.name == COMMON_SHARD else entry.name
                    yield name, Part.object(name, data)
                else:
                    box = Box(chunk.offset, chunk.size)
                    spec = TensorSpec(entry.name, dtype_code(entry.dtype, repr(entry.name)), entry.shape)
                    yield entry.name, Part(spec, box, _FileMemory(reader, member, box, entry.name, moved))
            for entry in opened.empty():
                yield entry.name, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            if (common := read_file(store, COMMON_FILE)) is not None:
                yield COMMON, Part.object(COMMON, objects.TORCH + _intact(common, COMMON_FILE))

        def collect(rank: int) -> Flat:
            return Flat([Leaf(name, value, _ignore) for name, value in values()])

        request = SaveRequest(
            store=open_store(out),
            collect=collect,
            # One process alone: no rank waits for it, and terabytes may take days.
            call=begin_call(MemoryRoster(), timeout=7 * 86400.0, stall_timeout=3600.0),
            step=step,
            notes={"imported": "torch_dist"},
            overwrite=False,
            options=options or Options(),
        )
        report = SaveJob(request).run()
    # After the commit, as in a save: frameworks recognise a distributed checkpoint by this file.
    if (folder / CONFIG).exists():
        replace_file(open_store(out), CONFIG, json.dumps(HOLDFAST_CONFIG).encode())
    return report


def _refuse_what_is_there(out: str | os.PathLike[str], what: str) -> None:
    folder = Path(os.fspath(out))
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; {what} goes into a new folder.")
    if open_store(out).list():
        raise BadInput(f"{folder} is not empty; {what} goes into a new folder.")


def _unwrapped(data: bytes, name: str) -> bytes:
    """Take a ShardedObject out of the list of one in which megatron-core stores it."""
    with allowing(_safe_types()):
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


def _ignore(value: object) -> None:
    """Ignore a loaded value: a conversion loads nothing."""


def export_torch_dist(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: Progress = quiet
) -> int:
    """Convert a Holdfast checkpoint to a `torch_dist` one; return the bytes written.

    out: a folder that does not exist or is empty. `.metadata` is written last. Stock torch DCP loads any
        export; stock megatron-core loads those with common state, which `holdfast.megatron.save` stores.
    """
    folder = Path(os.fspath(out))
    _refuse_what_is_there(out, "an export")
    store = open_store(source)
    with open_index(store) as index:
        columns, where = index.select(), index.where
    with storage_errors("Writing to", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        writer = _Writer(folder)
        described = _export(store, columns, where, writer, progress)
        # Synced before `.metadata` names it: a reader that finds that file finds all data.
        writer.close()
        if COMMON in columns.names:
            (folder / CONFIG).write_text(
                json.dumps({**HOLDFAST_CONFIG, "sharded_backend": "torch_dist", "common_backend": "torch"})
            )
        flat = {name: (name,) for name in described}
        replace_file(open_store(out), METADATA, metadata.encode(described, flat, writer.stored))
    return writer.written


def _export(store: Store, columns: Columns, where: str, writer: _Writer, progress: Progress) -> Described:
    """Write everything but `.metadata`; return the descriptions for it."""
    described: Described = {}
    done, total, first = 0, int(columns.chunk_bytes().sum()), 0
    for row, name in enumerate(columns.names):
        last = int(columns.chunk_end[row])
        one = _one(columns, row, first, last)
        if int(columns.kind[row]) == OBJECT:
            with allowing(_safe_types()):
                value = objects.decode(read_all(store, one, where), name)
                if name == COMMON:
                    torch.save(value, writer.folder / COMMON_FILE)
                else:
                    writer.add(dcp.MetadataIndex(name), _archive([value] if SHARD in name else value))
                    described[name] = dcp.BytesStorageMetadata()
        else:
            dtype = torch_dtype(int(columns.dtype[row]))
            chunks = []
            for chunk in range(first, last):
                ndim = int(columns.ndim[row])
                # One at a time, so that no more than one chunk is in memory.
                box = Box(unpad(columns.offset[chunk], ndim), unpad(columns.size[chunk], ndim))
                content = read_box(store, one, box, where)
                writer.add(dcp.MetadataIndex(name, box.offset), _archive(_tensor(content, dtype, box.shape)))
                chunks.append(dcp.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
                done += content.nbytes
                progress(done, total)
            shape = torch.Size(columns.shape_of(row))
            described[name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), shape, chunks)
        first = last
    return described


def _safe_types() -> tuple[Allowed, ...]:
    """Return megatron-core's enumerations, which common state may contain; none if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of CUDA extensions that are missing
        try:
            from holdfast.integrations.megatron.mcore import safe_types
        except ImportError:
            return ()
    return safe_types()


class _Writer:
    """Writes archives one after another into `.distcp` files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number, self.written = folder, 0, 0
        self.stored: Stored = {}
        self._file: BinaryIO | None = None

    def add(self, key: dcp.MetadataIndex, archive: bytes) -> None:
        if self._file is None or self._file.tell() > PER_FILE:
            self.close()
            path = self.folder / f"__0_{self.number}.distcp"
            self._file = open(path, "xb")  # noqa: SIM115 (closed by close)
            self.number += 1
        start = self._file.tell()
        self._file.write(archive)
        self.written += len(archive)
        self.stored[key] = stored_at(f"__0_{self.number - 1}.distcp", start, len(archive))

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _tensor(data: Array, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def _one(columns: Columns, row: int, first: int, last: int) -> Columns:
    """Select one tensor, with chunks [first, last), as columns of its own."""
    low = int(columns.digest_end[first - 1]) if first else 0
    part = slice(first, last)
    return Columns(
        names=[columns.names[row]],
        dtype=columns.dtype[row : row + 1],
        kind=columns.kind[row : row + 1],
        ndim=columns.ndim[row : row + 1],
        shape=columns.shape[row : row + 1],
        chunk_end=np.asarray([last - first], "<i8"),
        offset=columns.offset[part],
        size=columns.size[part],
        file=columns.file[part],
        position=columns.position[part],
        block=columns.block[part],
        digest_end=columns.digest_end[part] - low,
        digests=columns.digests[low : int(columns.digest_end[last - 1]) if last > first else low],
        file_names=columns.file_names,
        file_size=columns.file_size,
        file_rank=columns.file_rank,
    )
