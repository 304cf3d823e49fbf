"""torch DCP's `.metadata`: that of an export, and the marker beside a Holdfast checkpoint.

Tools recognise a torch DCP checkpoint by its `.metadata` (as torchtitan does to find the newest step). The
marker has names, dtypes, shapes, and the nesting of names. In a process that has imported `holdfast.dcp`,
stock DCP loads such a checkpoint (`reader`); elsewhere, it raises FileNotFoundError for a file whose name
says what to do.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from holdfast._core.format.columns import Columns
from holdfast._core.format.names import MARKER, METADATA
from holdfast._core.io.index_file import open_index
from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.layout.tensor import DTYPES, OBJECT
from holdfast._core.saving.job import SaveReport
from holdfast._core.state.leaf import Flat
from holdfast._core.state.live import State
from holdfast._core.store.base import Store, replace_file
from holdfast._core.torch_private import StorageInfo, storage_info

log = logging.getLogger("holdfast")
Described = dict[str, dcp.TensorStorageMetadata | dcp.BytesStorageMetadata]
"""DCP's description of each name."""
Paths = dict[str, tuple[str | int, ...]]
"""The keys that lead to each name in a nested state."""
Stored: TypeAlias = "dict[dcp.MetadataIndex, StorageInfo]"
"""The file and byte range of each part."""


VERSION = "1.0.0"
"""Value of `Metadata.version`, a field since torch 2.9."""


class LazyMetadata(dcp.Metadata):
    """DCP's Metadata of a checkpoint, read from its index on first access.

    The result of `holdfast.dcp.save` also has the fields of the SaveReport.
    """

    def __init__(self, store: Store, report: SaveReport | None = None) -> None:
        meta = dcp.StorageMeta(checkpoint_id=store.url)
        vars(self).update(version=VERSION, storage_meta=meta, _store=store, _report=report)

    def __repr__(self) -> str:
        # Not that of a dataclass, which would read the index and list every tensor.
        report: SaveReport | None = vars(self).get("_report")
        written = "" if report is None else f": {report.bytes_written:,} bytes in {report.seconds:.1f} s"
        return f"<Metadata of {self._store.url}{written}>"

    def __getattr__(self, name: str) -> Any:
        # Called only for missing attributes: an index may have a million tensors, so it is read on demand.
        if name == "state_dict_metadata":
            with open_source(self._store) as source:
                self.state_dict_metadata = describe(source.select())
            return self.state_dict_metadata
        if name in SaveReport.__struct_fields__ and vars(self).get("_report") is not None:
            return getattr(self._report, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def encode(
    described: Described,
    planned: Mapping[str, tuple[str | int, ...]],
    stored: Stored,
    save_id: str,
    place: str = "",
    modules: list[str] | None = None,
) -> bytes:
    """Encode a `.metadata`. Fields about the whole checkpoint come first, to be found without the rest."""
    # Made by torch, then refilled: pickle writes attributes in the order in which they were set.
    metadata = dcp.Metadata({}, storage_meta=dcp.StorageMeta(save_id=save_id))
    vars(metadata.storage_meta).pop("checkpoint_id")  # to come after the others, as it may be long
    vars(metadata.storage_meta).update(modules=modules or [], checkpoint_id=place or None)
    about = {"storage_meta": metadata.storage_meta, "version": VERSION}
    vars(metadata).clear()
    vars(metadata).update(
        about, state_dict_metadata=described, planner_data=dict(planned), storage_data=stored
    )
    return pickle.dumps(metadata, protocol=4)


def dcp_marker(columns: Columns, nesting: Flat, place: str, save_id: str) -> bytes:
    """Make a `.metadata` of all tensors and objects in an index, which all refer to one file, `MARKER`.

    nesting: has the containers of the committer's state. place: the folder. save_id: of the given writer.
    Tensors of the same dtype and shape share their description, as descriptions are most of the cost.
    """
    described, nowhere = describe(columns), storage_info(MARKER, 0, 0)
    stored = {
        dcp.MetadataIndex(
            name, None if isinstance(one, dcp.BytesStorageMetadata) else one.chunks[0].offsets
        ): nowhere
        for name, one in described.items()
    }
    planned = {name: nesting.path(name) for name in described}
    return encode(described, planned, stored, save_id, place, [MARKER])


def describe(columns: Columns) -> Described:
    """Describe every tensor, as one chunk, and every object."""
    bytes_only, described = dcp.BytesStorageMetadata(), Described()
    # A model has 100,000 tensors of some dozen shapes; pickle writes a shared object once.
    shared = cache(_whole_tensor)
    for name, dtype, shape, kind in columns.specs():
        described[name] = bytes_only if kind == OBJECT else shared(DTYPES[dtype].name, shape)
    return described


def in_parts(name: str, value: list[object]) -> tuple[State, Paths]:
    """Return the parts of a list as torch DCP saves them, and their paths: it splits a list with dicts in it
    (`param_groups.0.lr`), which is one object here."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner({name: value})
    return planner.state_dict, planner.mappings


def _whole_tensor(dtype: str, shape: tuple[int, ...]) -> dcp.TensorStorageMetadata:
    size, start = torch.Size(shape), torch.Size((0,) * len(shape))
    properties = dcp.TensorProperties(dtype=getattr(torch, dtype))
    return dcp.TensorStorageMetadata(properties, size, [dcp.ChunkStorageMetadata(start, size)])


def mark(store: Store, nesting: Flat, save_id: str) -> None:
    """Write the marker beside a committed checkpoint, which is complete without it; warn if that fails."""
    try:
        with open_index(store) as index:
            columns = index.select()
        replace_file(store, METADATA, dcp_marker(columns, nesting, store.url, save_id))
    # Any error: the checkpoint is committed, and a missing marker must not fail the save.
    except Exception as error:
        log.warning(
            "%s is committed, but tools of torch DCP won't find it: its %s could not be written (%s).",
            store.url,
            METADATA,
            error,
        )
