"""torch DCP's `.metadata`: the one of an export, and the marker beside a Holdfast checkpoint.

Tools recognise a checkpoint of torch DCP by its `.metadata` (as torchtitan does to find the newest step). The
marker shows them names, dtypes and shapes. Loading it with stock DCP raises FileNotFoundError for a file
whose name says what to do.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from functools import cache
from typing import TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from holdfast._format.columns import Columns
from holdfast._format.names import MARKER, METADATA
from holdfast._io.index_file import open_index
from holdfast._layout.tensor import DTYPES, OBJECT
from holdfast._store.base import Store, replace_file

log = logging.getLogger("holdfast")
Described = dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata]
"""DCP's description of each name."""
Stored: TypeAlias = "dict[dcp.MetadataIndex, filesystem._StorageInfo]"
"""The file and byte range of each part."""
Paths = dict[str, tuple[str, ...]]
"""The keys that lead to each name."""


def encode(
    described: Described, planned: Mapping[str, tuple[str, ...]], stored: Stored, save_id: str
) -> bytes:
    """Encode a `.metadata`. What concerns the whole checkpoint comes first, to be found without the rest."""
    # Made by torch, then refilled: pickle writes attributes in the order in which they were set.
    metadata = dcp.Metadata({}, storage_meta=dcp.StorageMeta(save_id=save_id))
    # The version is a field since torch 2.9.
    about = {"storage_meta": metadata.storage_meta, "version": "1.0.0"}
    vars(metadata).clear()
    vars(metadata).update(
        about, state_dict_metadata=described, planner_data=dict(planned), storage_data=stored
    )
    return pickle.dumps(metadata, protocol=4)


def paths_of(state: Mapping[str, object]) -> Paths:
    """Return the path of each name of a nested state, by which tools of DCP nest it again.

    Names alone don't say it: those of parameters have dots in them. What is no dict counts as one value.
    """
    found: Paths = {}

    def walk(values: Mapping[str, object], path: tuple[str, ...]) -> None:
        for key, value in values.items():
            here = (*path, str(key))
            if isinstance(value, Mapping):
                walk(value, here)
            else:
                found[".".join(here)] = here

    walk(state, ())
    return found


def dcp_marker(columns: Columns, paths: Paths | None = None) -> bytes:
    """Make a `.metadata` of every tensor and object in an index; all of them name one file, `MARKER`.

    Tensors of one dtype and shape share their description, which is most of the cost.
    """
    described, nowhere = describe(columns), filesystem._StorageInfo(MARKER, 0, 0)
    stored = {
        dcp.MetadataIndex(
            name, None if isinstance(one, dcp.BytesStorageMetadata) else one.chunks[0].offsets
        ): nowhere
        for name, one in described.items()
    }
    planned = {name: path for name, path in (paths or {}).items() if name in described}
    return encode(described, planned, stored, save_id=MARKER)


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


def mark(store: Store, paths: Paths) -> None:
    """Write the marker beside a committed checkpoint, which is complete without it; warn if that fails."""
    try:
        with open_index(store) as index:
            columns = index.select()
        replace_file(store, METADATA, dcp_marker(columns, paths))
    # Whatever is raised: the checkpoint is committed, and a missing marker must not fail the save.
    except Exception as error:
        log.warning(
            "%s is committed, but tools of torch DCP won't find it: its %s could not be written (%s).",
            store.url,
            METADATA,
            error,
        )
