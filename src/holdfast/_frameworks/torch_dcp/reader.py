"""Lets stock torch DCP, and tools based on it, read a Holdfast checkpoint.

Give a `HoldfastReader` to a tool that takes a `storage_reader`. Most create a `FileSystemReader` themselves
(`dcp_to_torch_save`, Accelerate's `merge_fsdp_weights`, Lightning's consolidation): `readable_by_torch` lets
that class read Holdfast folders, where it would fail otherwise, and changes nothing else.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from weakref import finalize

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast._core.format.names import INDEX, MARKER, METADATA, rank_in_name
from holdfast._core.format.plain_objects import PLAIN
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import OBJECT, TensorSpec
from holdfast._core.loading.boxes import Wanted
from holdfast._core.loading.stored_checkpoint import StoredCheckpoint
from holdfast._core.state.live import State
from holdfast._core.store.base import Folder
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import Pin
from holdfast._core.torch_private import StorageInfo
from holdfast._frameworks.arguments import Function
from holdfast._frameworks.patching import ORIGINAL
from holdfast._frameworks.torch_dcp.metadata import describe, in_parts
from holdfast.errors import HoldfastError, LoadFailed


class HoldfastReader(StorageReader):
    """Reads whatever `holdfast.load` reads, for stock `torch.distributed.checkpoint`.

        torch.distributed.checkpoint.load(state, storage_reader=holdfast.dcp.HoldfastReader("run/step-100"))

    Every byte is verified. The ranks then plan and wait as stock DCP does: with collectives.
    """

    def __init__(self, path: Folder) -> None:
        super().__init__()
        self._path = path
        self._release: Callable[[], object] = lambda: None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: object, **named: object) -> Metadata:
        # Pinned until the data is read, or this reader is garbage-collected.
        self._release()
        store = open_store(self._path)
        self._release = finalize(self, Pin(store).let_go)
        with open_source(store) as source:
            described = describe(source.select())
        planned = {name: (name,) for name in described}
        metadata = Metadata(described, planned, storage_meta=StorageMeta(checkpoint_id=str(self._path)))
        self.split(metadata)
        return metadata

    def split(self, metadata: Metadata) -> None:
        """Replace lists in the metadata by their parts, as torch DCP stores them."""
        with StoredCheckpoint(self._path) as checkpoint:
            lists = _lists(checkpoint)
        described, planned = metadata.state_dict_metadata, metadata.planner_data
        metadata.state_dict_metadata = _Described(described, lists)
        for name, value in lists.items():
            _, paths = in_parts(name, value)
            del metadata.state_dict_metadata[name]
            metadata.state_dict_metadata.update(dict.fromkeys(paths, BytesStorageMetadata()))
            start = planned.pop(name)
            planned.update({part: (*start, *path[1:]) for part, path in paths.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **named: object
    ) -> None:
        """Do nothing: the folder is opened for each read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done: Future[None] = Future()
        with StoredCheckpoint(self._path) as checkpoint:
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            specs = {spec.name: spec for spec in checkpoint.specs(item.storage_index.fqn for item in tensors)}
            boxes = [_wanted(specs[item.storage_index.fqn], item) for item in tensors]
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            checkpoint.fill(boxes, targets)  # into the state itself: a rank's memory may be full
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
            objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
            values = _values(checkpoint, {_stored_in(item.storage_index.fqn, checkpoint) for item in objects})
            for item in objects:
                data = io.BytesIO()
                torch.save(values[item.storage_index.fqn], data)  # the planner reads it by torch.load
                data.seek(0)
                planner.load_bytes(item, data)
        self._release()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            with open_source(open_store(checkpoint_id)):
                return True
        except HoldfastError:
            return False


class _Described(dict[str, STORAGE_TYPES]):
    """DCP's descriptions. A list stored in parts is also found under its own name, for a state with another
    object in its place; iteration leaves that name out, as DCP would take the checkpoint for one of
    torch 2.3."""

    def __init__(self, described: Mapping[str, STORAGE_TYPES], lists: Container[str]) -> None:
        super().__init__(described)
        self._lists = lists

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._lists

    def __missing__(self, name: str) -> BytesStorageMetadata:
        if name not in self._lists:
            raise KeyError(name)
        return BytesStorageMetadata()


def _lists(checkpoint: StoredCheckpoint) -> dict[str, list[object]]:
    """Return the objects that DCP stores in parts. Objects of a single rank don't occur in DCP's states."""
    names = [spec.name for spec in checkpoint.specs(checkpoint) if spec.kind == OBJECT]
    found = {}
    for name, data in checkpoint.encoded(name for name in names if rank_in_name(name) is None).items():
        if data[:1] == PLAIN and data[1:2] != b"[":
            continue
        with suppress(LoadFailed):  # a class that is not allowed: not a list from DCP
            value = checkpoint.decoded(name, data)
            if isinstance(value, list) and [*in_parts(name, value)[0]] != [name]:
                found[name] = value
    return found


def _stored_in(name: str, checkpoint: StoredCheckpoint) -> str:
    """Return the stored object for a DCP name, which may be that of a part."""
    while name not in checkpoint and "." in name:
        name = name.rpartition(".")[0]
    return name


def _values(checkpoint: StoredCheckpoint, names: set[str]) -> State:
    """Return the values of objects, and of the parts of lists, by their names."""
    values: State = {}
    for name, data in checkpoint.encoded(names).items():
        value = checkpoint.decoded(name, data)
        values |= {**(in_parts(name, value)[0] if isinstance(value, list) else {}), name: value}
    return values


def _wanted(spec: TensorSpec, item: ReadItem) -> Wanted:
    return Wanted(spec, Box(tuple(item.storage_offsets), tuple(item.lengths)), spec.dtype)


def readable_by_torch() -> None:
    """Let torch's FileSystemReader read Holdfast folders, in this process."""
    for name, make in READS.items():
        original = getattr(FileSystemReader, name)
        if not hasattr(original, ORIGINAL):
            new = wraps(original)(make(original))
            setattr(new, ORIGINAL, original)
            setattr(FileSystemReader, name, new)


def _reads_index(original: Callable[..., Metadata]) -> Callable[..., Metadata]:
    def read_metadata(self: FileSystemReader, *args: object, **named: object) -> Metadata:
        folder = Path(self.path)
        reader, is_ours = HoldfastReader(folder), (folder / INDEX).exists()
        # From `holdfast.save`. If there is a `.metadata` beside the index, it has the nesting of names, too.
        if is_ours and not (folder / METADATA).exists():
            metadata = reader.read_metadata()
            metadata.storage_data = {}
            return metadata
        metadata = original(self, *args, **named)
        if is_ours and _is_marker(metadata.storage_data):
            reader.split(metadata)
        return metadata

    return read_metadata


def _reads_ours(original: Callable[..., Future[None]]) -> Callable[..., Future[None]]:
    def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if _is_marker(self.storage_data) and (Path(self.path) / INDEX).exists():
            return HoldfastReader(self.path).read_data(plan, planner)
        return original(self, plan, planner)

    return read_data


def _is_marker(storage_data: Mapping[MetadataIndex, StorageInfo]) -> bool:
    """Return whether a `.metadata` is a marker: the file that it refers to does not exist."""
    stored = next(iter(storage_data.values()), None)
    return stored is None or stored.relative_path == MARKER


READS: dict[str, Callable[[Function], Function]] = {
    "read_metadata": _reads_index,
    "read_data": _reads_ours,
}
"""By method of torch's reader: a function that makes the method read Holdfast folders, too."""
