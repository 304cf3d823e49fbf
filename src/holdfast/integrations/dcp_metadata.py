"""torch DCP's `.metadata`: the one of an export, and the marker beside a Holdfast checkpoint.

Tools know a checkpoint of torch DCP by its `.metadata` (torchtitan's search for the newest step, say). The
marker shows them the names, types and shapes that are there; who loads it with stock DCP gets a
FileNotFoundError for a file whose name says what to do.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from holdfast.format.columns import Columns
from holdfast.format.marker import MARKER
from holdfast.format.names import METADATA
from holdfast.io.index_file import open_index
from holdfast.layout.tensor import DTYPES, OBJECT
from holdfast.store.base import Store, replace_file

log = logging.getLogger("holdfast")
Described = dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata]
"""What DCP says of each name."""
Stored: TypeAlias = "dict[dcp.MetadataIndex, filesystem._StorageInfo]"
"""Where DCP finds each part."""


def stored_at(file: str, start: int, length: int) -> filesystem._StorageInfo:
    """Where DCP finds something."""
    return filesystem._StorageInfo(file, start, length)


def encode(
    described: Described,
    planned: Mapping[str, tuple[str, ...]],
    stored: Stored,
    save_id: str | None = None,
) -> bytes:
    """The bytes of `.metadata`. What is said of the whole stands first, so that it can be found without
    reading all."""
    # Made by torch and then refilled: pickle writes attributes in the order in which they were set.
    metadata = dcp.Metadata({}, storage_meta=dcp.StorageMeta(save_id=save_id))
    about = {
        "storage_meta": metadata.storage_meta,
        "version": "1.0.0",
    }  # the version is a field since torch 2.9
    vars(metadata).clear()
    vars(metadata).update(
        about, state_dict_metadata=described, planner_data=dict(planned), storage_data=stored
    )
    return pickle.dumps(metadata, protocol=4)


def dcp_marker(columns: Columns) -> bytes:
    """A `.metadata` of every tensor and object in an index, all of it stored in a file that says where it is.

    Tensors of one type and shape share what is said of them, which is most of the cost.
    """
    described: Described = {}
    stored: Stored = {}
    nowhere, bytes_only = stored_at(MARKER, 0, 0), dcp.BytesStorageMetadata()
    shared: dict[tuple[int, tuple[int, ...]], tuple[dcp.TensorStorageMetadata, torch.Size]] = {}
    numbers = zip(columns.names, columns.kind.tolist(), columns.dtype.tolist(), strict=True)
    for row, (name, kind, dtype) in enumerate(numbers):
        if kind == OBJECT:
            described[name] = bytes_only
            stored[dcp.MetadataIndex(name)] = nowhere
            continue
        shape = columns.shape_of(row)
        # A model has 100,000 tensors of some dozen shapes; pickle writes a shared object once.
        if (dtype, shape) not in shared:
            shared[dtype, shape] = _whole_tensor(DTYPES[dtype].name, shape)
        described[name], start = shared[dtype, shape]
        stored[dcp.MetadataIndex(name, start)] = nowhere
    return encode(described, {}, stored, save_id=MARKER)


def _whole_tensor(dtype: str, shape: tuple[int, ...]) -> tuple[dcp.TensorStorageMetadata, torch.Size]:
    """A tensor in one chunk, and where that begins."""
    size, start = torch.Size(shape), torch.Size((0,) * len(shape))
    properties = dcp.TensorProperties(dtype=getattr(torch, dtype))
    return dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(start, size)]), start


def mark(store: Store) -> None:
    """After a commit: put the marker of what is committed beside it. The checkpoint is whole without."""
    try:
        with open_index(store) as index:
            columns = index.select()
        replace_file(store, METADATA, dcp_marker(columns))
    # Whatever it is: the checkpoint is committed, and must not fail for a tool's sake.
    except Exception as error:
        log.warning(
            "%s is committed, but tools of torch DCP won't find it: its %s could not be written (%s).",
            store.url,
            METADATA,
            error,
        )
