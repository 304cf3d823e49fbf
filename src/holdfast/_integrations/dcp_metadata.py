"""torch DCP's `.metadata`: the one of an export, and the marker beside a Holdfast checkpoint.

Tools recognise a checkpoint of torch DCP by its `.metadata` (as torchtitan does to find the newest step). The
marker shows them names, dtypes, shapes, and how names are nested. In a process that has imported
`holdfast.dcp`, stock DCP loads it (`dcp_reader`); elsewhere, that raises FileNotFoundError for a file whose
name says what to do.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from holdfast._format.columns import Columns
from holdfast._format.names import MARKER, METADATA
from holdfast._io.index_file import open_index
from holdfast._layout.tensor import DTYPES, OBJECT
from holdfast._saving.job import SaveReport
from holdfast._state.leaf import Flat
from holdfast._store.base import Store, replace_file
from holdfast._store.local import open_store

log = logging.getLogger("holdfast")
Described = dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata]
"""DCP's description of each name."""
Stored: TypeAlias = "dict[dcp.MetadataIndex, filesystem._StorageInfo]"
"""The file and byte range of each part."""


class SavedMetadata(dcp.Metadata):
    """What `holdfast.dcp.save` returns: DCP's Metadata, read from the index when it is first looked at; and
    the fields of the SaveReport."""

    def __init__(self, report: SaveReport) -> None:
        vars(self).update(report=report, storage_meta=dcp.StorageMeta(checkpoint_id=report.path))

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there yet. An index of a million tensors is read only by who wants it.
        if name == "state_dict_metadata":
            with open_index(open_store(self.report.path)) as index:
                self.state_dict_metadata = describe(index.select())
            return self.state_dict_metadata
        if name in SaveReport.__struct_fields__:
            return getattr(vars(self)["report"], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def encode(
    described: Described,
    planned: Mapping[str, tuple[str | int, ...]],
    stored: Stored,
    save_id: str,
    place: str = "",
) -> bytes:
    """Encode a `.metadata`. What concerns the whole checkpoint comes first, to be found without the rest."""
    # Made by torch, then refilled: pickle writes attributes in the order in which they were set.
    metadata = dcp.Metadata({}, storage_meta=dcp.StorageMeta(save_id=save_id))
    vars(metadata.storage_meta).pop("checkpoint_id")  # to come after the other, as it may be long
    vars(metadata.storage_meta)["checkpoint_id"] = place or None
    # The version is a field since torch 2.9.
    about = {"storage_meta": metadata.storage_meta, "version": "1.0.0"}
    vars(metadata).clear()
    vars(metadata).update(
        about, state_dict_metadata=described, planner_data=dict(planned), storage_data=stored
    )
    return pickle.dumps(metadata, protocol=4)


def dcp_marker(columns: Columns, nesting: Flat, place: str) -> bytes:
    """Make a `.metadata` of every tensor and object in an index; all of them name one file, `MARKER`.

    nesting: has the containers of the committer's state. place: the folder.
    Tensors of one dtype and shape share their description, which is most of the cost.
    """
    described, nowhere = describe(columns), filesystem._StorageInfo(MARKER, 0, 0)
    stored = {
        dcp.MetadataIndex(
            name, None if isinstance(one, dcp.BytesStorageMetadata) else one.chunks[0].offsets
        ): nowhere
        for name, one in described.items()
    }
    planned = {name: nesting.path(name) for name in described}
    return encode(described, planned, stored, save_id=MARKER, place=place)


def describe(columns: Columns) -> Described:
    """Describe every tensor, as one chunk, and every object."""
    bytes_only, described = dcp.BytesStorageMetadata(), Described()
    # A model has 100,000 tensors of some dozen shapes; pickle writes a shared object once.
    shared = cache(_whole_tensor)
    numbers = zip(columns.names, columns.kind.tolist(), columns.dtype.tolist(), strict=True)
    for row, (name, kind, dtype) in enumerate(numbers):
        described[name] = bytes_only if kind == OBJECT else shared(DTYPES[dtype].name, columns.shape_of(row))
    return described


def _whole_tensor(dtype: str, shape: tuple[int, ...]) -> dcp.TensorStorageMetadata:
    size, start = torch.Size(shape), torch.Size((0,) * len(shape))
    properties = dcp.TensorProperties(dtype=getattr(torch, dtype))
    return dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(start, size)])


def mark(store: Store, nesting: Flat) -> None:
    """Write the marker beside a committed checkpoint, which is complete without it; warn if that fails."""
    try:
        with open_index(store) as index:
            columns = index.select()
        replace_file(store, METADATA, dcp_marker(columns, nesting, store.url))
    # Whatever is raised: the checkpoint is committed, and a missing marker must not fail the save.
    except Exception as error:
        log.warning(
            "%s is committed, but tools of torch DCP won't find it: its %s could not be written (%s).",
            store.url,
            METADATA,
            error,
        )
