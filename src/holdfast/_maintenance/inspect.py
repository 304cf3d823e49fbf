"""Describe a checkpoint or a run folder, as values to print. Reads only the index and small objects."""

from __future__ import annotations

import msgspec
import numpy as np

from holdfast._format import objects
from holdfast._format.columns import Array, Columns
from holdfast._format.index import Index
from holdfast._format.names import DATA, INDEX, METADATA
from holdfast._io.index_file import open_index
from holdfast._io.raw_read import read_all
from holdfast._layout.box import Box
from holdfast._layout.tensor import DTYPES, KINDS, OBJECT, matches, nearest
from holdfast._maintenance.target import checkpoint_at, checkpoint_or_run, moment, number
from holdfast._plan import explain as plan_explain
from holdfast._plan.explain import ChunkPart
from holdfast._store.base import Folder, Kind, Store
from holdfast._store.run_folder import is_only_marked, step_folders
from holdfast._values import Json
from holdfast.errors import BadInput, HoldfastError, MissingTensors

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
    parts: tuple[ChunkPart, ...] | None = None


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


class Explained(msgspec.Struct, frozen=True):
    """Where a tensor is stored, and what a reader of a box (if one was given) needs."""

    path: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ChunkPart, ...]
    offset: tuple[int, ...] | None = None
    size: tuple[int, ...] | None = None
    bytes_wanted: int | None = None
    bytes_read: int | None = None
    """More than `bytes_wanted` where digest blocks also hold other bytes."""


def describe(
    path: Folder, name: str | None = None, limit: int | None = None, chunks: bool = False
) -> Checkpoint | Run:
    """Describe a checkpoint, with up to `limit` of the names that match, or the steps of a run folder."""
    store, is_run = checkpoint_or_run(path)
    if is_run:
        return Run(
            store.url, tuple(_step(step, store.child(folder)) for step, folder in step_folders(store).items())
        )
    with open_index(store) as index:
        return _checkpoint(store, index, name, limit, chunks)


def _checkpoint(
    store: Store, index: Index, pattern: str | None, limit: int | None, chunks: bool
) -> Checkpoint:
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
            _tensor(store, index, columns, rows, position, chunks) for position in range(len(columns.names))
        ),
    )


def _tensor(
    store: Store, index: Index, columns: Columns, rows: list[int], position: int, chunks: bool
) -> Tensor:
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
        writers=tuple(np.unique(columns.file_rank[mine]).tolist()),
        value=_value(store, index, rows[position], nbytes) if is_object else None,
        parts=plan_explain.parts(columns, position) if chunks else None,
    )


def _value(store: Store, index: Index, row: int, nbytes: int) -> str:
    """Return an object as one line of text. Damage is a text too, so that the rest can still be shown."""
    if nbytes > SHOWN_OBJECT:
        return f"<{nbytes} bytes>"
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


def explain(path: Folder, name: str, box: str | None = None) -> Explained:
    """Return where a tensor's parts are stored; with a box such as `0:4,10:20`, what a reader of it needs.

    A run folder stands for its newest committed step.
    """
    store = checkpoint_at(path)
    with open_index(store) as index:
        row = index.find_one(name)
        if row < 0:
            near = nearest(name, index.names())
            raise MissingTensors(
                f"{store.url} does not hold {name!r}.",
                hint=f"The nearest name that is there is {near!r}." if near else "",
            )
        columns = index.select(np.asarray([row]))
    shape, is_object = columns.shape_of(0), int(columns.kind[0]) == OBJECT
    dtype = DTYPES[int(columns.dtype[0])]
    explained = Explained(
        store.url,
        name,
        KINDS[int(columns.kind[0])],
        "" if is_object else dtype.name,
        shape,
        plan_explain.parts(columns, 0),
    )
    if box is None:
        return explained
    wanted = parse_box(box, shape)
    needs = plan_explain.needed(columns, 0, wanted)
    return msgspec.structs.replace(
        explained,
        parts=needs,
        offset=wanted.offset,
        size=wanted.shape,
        bytes_wanted=wanted.volume * dtype.size,
        bytes_read=sum(stop - start for part in needs for start, stop in part.ranges),
    )


def parse_box(text: str, shape: tuple[int, ...]) -> Box:
    """Parse a box such as `0:4,10:20`, one item per axis; `:` is a whole axis, `3` is one index of it."""
    items = text.split(",") if text.strip() else []
    if len(items) != len(shape):
        raise BadInput(f"The box {text!r} has {len(items)} axes, the tensor has {len(shape)}: {list(shape)}.")
    offset, size = [], []
    for item, length in zip(items, shape, strict=True):
        low, colon, high = item.strip().partition(":")
        try:
            start = int(low) if low else 0
            stop = (int(high) if high else length) if colon else int(low) + 1
        except ValueError:
            raise BadInput(f"{item!r} in the box {text!r} is not a range such as 0:4.") from None
        offset.append(start)
        size.append(stop - start)
    wanted = Box(tuple(offset), tuple(size))
    if not wanted.within(shape):
        raise BadInput(f"The box {text!r} does not lie inside the tensor's shape {list(shape)}.")
    return wanted
