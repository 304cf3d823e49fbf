"""The way back: stock torch DCP, and the tools that stand on it, read a Holdfast checkpoint.

A tool that takes a `storage_reader` is given a `HoldfastReader`. Most make a `FileSystemReader` themselves
(`dcp_to_torch_save`, Accelerate's `merge_fsdp_weights`, Lightning's consolidation): `readable_by_torch` lets
it read a Holdfast folder, where it could only fail, and changes nothing else.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from holdfast._format.names import INDEX, MARKER, METADATA
from holdfast._integrations.dcp_metadata import describe
from holdfast._integrations.patching import ORIGINAL
from holdfast._io.open_checkpoint import open_source
from holdfast._layout.box import Box
from holdfast._layout.tensor import TensorSpec
from holdfast._loading.boxes import Wanted
from holdfast._loading.stored_checkpoint import StoredCheckpoint
from holdfast._store.base import Folder
from holdfast._store.local import open_store
from holdfast.errors import HoldfastError


class HoldfastReader(StorageReader):
    """Reads whatever `holdfast.load` reads, for stock `torch.distributed.checkpoint`.

        torch.distributed.checkpoint.load(state, storage_reader=holdfast.dcp.HoldfastReader("run/step-100"))

    Every byte is verified. The ranks then plan and wait as stock DCP does: with collectives.
    """

    def __init__(self, path: Folder) -> None:
        super().__init__()
        self._path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: object, **named: object) -> Metadata:
        with open_source(open_store(self._path)) as source:
            described = describe(source.select())
        return Metadata(described, storage_meta=StorageMeta(checkpoint_id=str(self._path)))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **named: object
    ) -> None:
        """Nothing: the folder is opened when it is read."""

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
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(checkpoint[item.storage_index.fqn], data)  # the planner reads it by torch.load
                    data.seek(0)
                    planner.load_bytes(item, data)
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            with open_source(open_store(checkpoint_id)):
                return True
        except HoldfastError:
            return False


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
    def read_metadata(self: FileSystemReader, *args: Any, **named: Any) -> Metadata:
        folder = Path(self.path)
        # `holdfast.save` wrote it; `holdfast.dcp.save` leaves a `.metadata`, which says more of the names.
        if (folder / METADATA).exists() or not (folder / INDEX).exists():
            return original(self, *args, **named)
        metadata = HoldfastReader(folder).read_metadata()
        metadata.storage_data = {}
        return metadata

    return read_metadata


def _reads_ours(original: Callable[..., Future[None]]) -> Callable[..., Future[None]]:
    def read_data(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        stored = next(iter(self.storage_data.values()), None)
        is_ours = not self.storage_data if stored is None else stored.relative_path == MARKER
        if is_ours and (Path(self.path) / INDEX).exists():
            return HoldfastReader(self.path).read_data(plan, planner)
        return original(self, plan, planner)

    return read_data


READS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "read_metadata": _reads_index,
    "read_data": _reads_ours,
}
"""Methods of torch's reader, and what makes one of them read our folders, too."""
