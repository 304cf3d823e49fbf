"""Describe a checkpoint or a run folder, as values to print. Reads only the index and small objects."""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast._format.columns import Array, Columns
from holdfast._format.index import Index
from holdfast._format.names import DATA, INDEX, METADATA
from holdfast._io.index_file import open_index
from holdfast._layout.tensor import DTYPES, KINDS, OBJECT, matches
from holdfast._maintenance.target import checkpoint_or_run, moment, number
from holdfast._store.base import Folder, Kind, Store
from holdfast._store.run_folder import is_only_marked, step_folders
from holdfast._values import Json
from holdfast.errors import HoldfastError

SHOWN_OBJECT = 1 << 20
"""Bytes. Larger objects are not read for their line of output."""


class File(msgspec.Struct, frozen=True):
    name: str
    size: int
    rank: int


class Tensor(msgspec.Struct, frozen=True):
    """A row of the index. `dtype` is empty for an object, `value` is None for a tensor."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int
    writers: tuple[int, ...]
    value: str | None = None


class Checkpoint(msgspec.Struct, frozen=True):
    """A committed checkpoint."""

    path: str
    step: int | None
    created: float | None
    versions: Json
    grid: Json
    notes: Json
    ranks: int | None
    files: tuple[File, ...]
    bytes: int
    """Bytes of all files, the index included."""
    tensors: int
    objects: int
    chunks: int
    matched: int
    """Number of names that the pattern matches; `shown` may have fewer."""
    shown: tuple[Tensor, ...]


class RunStep(msgspec.Struct, frozen=True):
    """One step folder of a run."""

    step: int
    path: str
    committed: bool
    bytes: int
    created: float | None
    problem: str | None = None
    """Why the index can't be read; None if it can."""


class Run(msgspec.Struct, frozen=True):
    path: str
    steps: tuple[RunStep, ...]


def describe(path: Folder, name: str | None = None, limit: int | None = None) -> Checkpoint | Run:
    """Describe a checkpoint, with up to `limit` of the names that match, or the steps of a run folder."""
    store, is_run = checkpoint_or_run(path)
    if is_run:
        return Run(
            store.url, tuple(_step(step, store.child(folder)) for step, folder in step_folders(store).items())
        )
    with open_index(store) as index:
        return _checkpoint(store, index, name, limit)


def _checkpoint(store: Store, index: Index, pattern: str | None, limit: int | None) -> Checkpoint:
    names = index.names()
    rows = [row for row, name in enumerate(names) if pattern is None or matches(name, pattern)]
    # Only the rows that are shown. The counts below come from the header and from one narrow column.
    columns = index.select(np.asarray(rows[:limit], np.int64))
    kinds = index.column("kind")
    files = tuple(
        File(name, int(size), int(rank))
        for name, size, rank in zip(columns.file_names, columns.file_size, columns.file_rank, strict=True)
    )
    return Checkpoint(
        path=store.url,
        step=number(index.about.get("step")),
        created=moment(index.about.get("created")),
        versions=index.about.get("versions"),
        grid=index.about.get("grid"),
        notes=index.about.get("notes"),
        ranks=number(index.about.get("ranks")),
        files=files,
        bytes=sum(file.size for file in files) + index.size,
        tensors=int((kinds != OBJECT).sum()),
        objects=int((kinds == OBJECT).sum()),
        chunks=index.chunks,
        matched=len(rows),
        shown=tuple(
            _tensor(store, index, columns, position, row) for position, row in enumerate(rows[:limit])
        ),
    )


def _tensor(store: Store, index: Index, columns: Columns, position: int, row: int) -> Tensor:
    """Describe a row of the index, which stands at `position` in `columns`."""
    first = int(columns.chunk_end[position - 1]) if position else 0
    mine: Array = columns.file[first : int(columns.chunk_end[position])]
    is_object, shape = int(columns.kind[position]) == OBJECT, columns.shape_of(position)
    dtype = DTYPES[int(columns.dtype[position])]
    # As Python integers, which do not overflow.
    nbytes = int(np.prod(shape, dtype=object)) * dtype.size
    return Tensor(
        name=columns.names[position],
        kind=KINDS[int(columns.kind[position])],
        dtype="" if is_object else dtype.name,
        shape=shape,
        bytes=nbytes,
        chunks=len(mine),
        writers=tuple(sorted(set(columns.file_rank[mine].tolist()))),
        value=_value(store, index, row, nbytes) if is_object else None,
    )


def _value(store: Store, index: Index, row: int, nbytes: int) -> str:
    """Return an object as one line of text. Damage is a text too, so that the rest can still be shown."""
    if nbytes > SHOWN_OBJECT:
        return f"<{nbytes} bytes>"
    # Imported here, because what reads data takes a while to import, and many checkpoints show no object.
    from holdfast._format import objects
    from holdfast._io.raw_read import read_all

    try:
        return objects.preview(read_all(store, index.select(np.asarray([row])), index.where))
    except HoldfastError as error:
        return f"<unreadable: {error.message}>"


def _step(step: int, store: Store) -> RunStep:
    names = store.list()
    if INDEX in names:
        try:
            with open_index(store) as index:
                size = index.size + int(index.column("file_size").sum())
                return RunStep(step, store.url, True, size, moment(index.about.get("created")))
        except HoldfastError as error:
            # A damaged step still counts as committed, because `restore` tries it too.
            return RunStep(step, store.url, True, _present_bytes(store, names), None, error.message)
    other = store.stat(METADATA) if METADATA in names and not is_only_marked(store) else None
    return RunStep(
        step, store.url, other is not None, _present_bytes(store, names), other.modified if other else None
    )


def _present_bytes(store: Store, names: list[str]) -> int:
    """Return the bytes of the files that exist; a file that is deleted meanwhile counts 0."""
    files = [name for name in names if not name.endswith("/")]
    entries = (store.stat(name) for name in [*files, *(f"{DATA}/{name}" for name in store.list(DATA))])
    return sum(entry.size for entry in entries if entry is not None and entry.kind is Kind.FILE)
