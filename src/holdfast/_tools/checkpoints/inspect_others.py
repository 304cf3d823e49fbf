"""Describes other formats that a load supports: checkpoints of torch DCP and megatron-core, published models,
and fetched slices. Reads metadata and headers, and executes nothing in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from holdfast._core.base.values import natural
from holdfast._core.io.open_checkpoint import TorchDist, open_source
from holdfast._core.io.slice import IndexSource
from holdfast._core.io.source import Source
from holdfast._core.layout.patterns import matches
from holdfast._core.layout.tensor import DTYPES, KINDS, OBJECT, Dims, dtype_code
from holdfast._core.store.base import Store
from holdfast._tools.checkpoints.inspect import Checkpoint, File, Tensor, about_checkpoint, totals_of

TORCH_DIST = "torch DCP or megatron-core (torch_dist)"
PUBLISHED = "safetensors of Hugging Face"
SLICE = "a slice that `holdfast fetch` took of a checkpoint"


class _Row(NamedTuple):
    """A tensor or an object."""

    name: str
    kind: int
    dtype: int
    shape: Dims
    files: Sequence[str]
    """The file of each chunk."""
    nbytes: int
    """Stored size in bytes."""


def describe_other(store: Store, pattern: str | None = None, limit: int | None = None) -> Checkpoint:
    """Describe a checkpoint without Holdfast's index, with up to `limit` of the names that match.

    NotCommitted if the format is unsupported; the error describes the content of the folder.
    """
    with open_source(store) as source:
        if isinstance(source, IndexSource):
            return replace(about_checkpoint(store, source.index, pattern, limit), format=SLICE)
        is_dist = isinstance(source, TorchDist)
        rows = _of_torch_dist(source) if isinstance(source, TorchDist) else _of_model(source)
    found = [row for row in rows if pattern is None or matches(row.name, pattern)]
    names = sorted({file for row in rows for file in row.files})
    entries = {name: store.stat(name) for name in names}
    files = tuple(File(name, entry.size, None) for name, entry in entries.items() if entry is not None)
    return Checkpoint(
        path=store.url,
        format=TORCH_DIST if is_dist else PUBLISHED,
        step=None,
        created=None,
        versions=None,
        grid=None,
        notes=None,
        metrics=None,
        ranks=None,
        files=files,
        bytes=sum(file.size for file in files),
        tensors=sum(row.kind != OBJECT for row in rows),
        objects=sum(row.kind == OBJECT for row in rows),
        chunks=sum(len(row.files) for row in rows),
        matched=len(found),
        totals=totals_of(
            (row.name, row.kind, row.dtype, math.prod(row.shape), number) for number, row in enumerate(found)
        ),
        shown=tuple(
            Tensor(
                name=row.name,
                kind=KINDS[row.kind],
                dtype="" if row.kind == OBJECT else DTYPES[row.dtype].name,
                shape=row.shape,
                bytes=row.nbytes,
                chunks=len(row.files),
                writers=(),
                value=f"<{row.nbytes} bytes, pickled>" if row.kind == OBJECT else None,
            )
            for row in sorted(found, key=lambda row: natural(row.name))[:limit]
        ),
    )


def _of_torch_dist(source: TorchDist) -> list[_Row]:
    # Without `select`, which reads from every data file.
    rows = []
    for entry in source.entries:
        files = [chunk.file for chunk in entry.chunks]
        if entry.kind == OBJECT:
            nbytes = sum(chunk.length for chunk in entry.chunks)
            rows.append(_Row(entry.name, OBJECT, 0, (), files, nbytes))
            continue
        code = dtype_code(entry.dtype, repr(entry.name))
        nbytes = math.prod(entry.shape) * DTYPES[code].size
        rows.append(_Row(entry.name, entry.kind, code, entry.shape, files, nbytes))
    return rows


def _of_model(source: Source) -> list[_Row]:
    columns = source.select()
    names, files = columns.file_names, columns.file
    return [
        _Row(
            spec.name,
            spec.kind,
            spec.dtype,
            spec.shape,
            [names[file] for file in np.asarray(files[columns.chunks_of(row)]).tolist()],
            math.prod(spec.shape) * DTYPES[spec.dtype].size,
        )
        for row, spec in enumerate(columns.specs())
    ]
