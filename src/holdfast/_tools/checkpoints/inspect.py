"""Describes a checkpoint or a run folder, as values to print. Reads only the index and small objects.

For other formats that a load supports, it reads the metadata, or the headers.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from msgspec.structs import replace

from holdfast._core.base.values import Json, natural
from holdfast._core.existing.target import checkpoint_or_run, is_unanswered, moment, number
from holdfast._core.format.columns import Array, Columns
from holdfast._core.format.index import Index
from holdfast._core.format.names import DATA, INDEX, METADATA, split_reference
from holdfast._core.io.index_file import open_index
from holdfast._core.layout.patterns import matches
from holdfast._core.layout.tensor import DTYPES, KINDS, OBJECT
from holdfast._core.store.base import Folder, Kind, Store
from holdfast._core.store.branches import is_left, left_behind
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import is_pinned
from holdfast._core.store.retention import facts_of, retention_of
from holdfast._core.store.run_folder import (
    is_linked,
    is_only_marked,
    is_spelled_as_ours,
    linked_steps,
    removed_steps,
    step_folders,
)
from holdfast.errors import HoldfastError, NotCommitted

OURS = "Holdfast"
"""The format of a checkpoint with Holdfast's index."""


class File(msgspec.Struct, frozen=True):
    name: str
    size: int
    rank: int | None
    """The rank that wrote the file; None if the format does not record it."""


class Tensor(msgspec.Struct, frozen=True):
    """A row of the index. `dtype` is empty for an object, `value` is None for a tensor. `tied_to`: the name
    of a tensor with the same bytes."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int
    writers: tuple[int, ...]
    value: str | None = None
    tied_to: str | None = None


class Total(msgspec.Struct, frozen=True):
    """All tensors of a module that have one dtype. `module` is up to two parts of their names. Elements and
    bytes of tied tensors count once."""

    module: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint."""

    path: str
    format: str = OURS
    step: int | None
    created: float | None
    versions: Json
    grid: Json
    notes: Json
    metrics: Json
    ranks: int | None
    files: tuple[File, ...]
    bytes: int
    """Bytes of all files, Holdfast's index included."""
    tensors: int
    objects: int
    chunks: int
    matched: int
    """Number of names that match the pattern; `shown` may have fewer."""
    totals: tuple[Total, ...]
    """Totals of the names that match the pattern."""
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
    metrics: Json = None
    kept: str | None = None
    """The reason why `keep=` retains it, by the rules of the newest step; None if it is not retained, or
    without rules."""
    is_read: bool = False
    """Whether a process is reading it, so that it can't be removed."""
    is_left: bool = False
    """Whether the run abandoned it by resuming from an older step."""
    is_removed: bool = False
    """Whether it was removed but for data that later steps refer to, or that somebody reads."""
    is_unknown: bool = False
    """Whether storage did not let the index be read, so that `problem` is no damage."""
    is_partial: bool = False
    """Whether it was saved with `include=` or `exclude=`."""


class Run(msgspec.Struct, frozen=True):
    path: str
    rules: str | None
    """The retention rules of the newest step, because a restarted job may have other rules."""
    steps: tuple[RunStep, ...]


def describe(path: Folder, name: str | None = None, limit: int | None = None) -> Checkpoint | Run:
    """Describe a checkpoint, with up to `limit` of the names that match, or the steps of a run folder."""
    try:
        store, is_run = checkpoint_or_run(path)
    except NotCommitted:
        # Imported here, because most folders are Holdfast's. Raises the error for an unsupported folder.
        from holdfast._tools.checkpoints.inspect_others import describe_other

        return describe_other(open_store(path), name, limit)
    if is_run:
        return describe_run(store)
    with open_index(store) as index:
        return about_checkpoint(store, index, name, limit)


def describe_run(store: Store) -> Run:
    """Describe the steps of a run folder, and why each is retained."""
    abouts: dict[int, Json] = {}
    folders = step_folders(store)
    steps = [_step(step, store.child(folder), abouts) for step, folder in folders.items()]
    left = left_behind(store)
    gone = {step for step in abouts if is_left(store, left, folders[step], INDEX)}
    newest = max(abouts, key=lambda step: (step not in gone, step), default=None)
    rules = None if newest is None else retention_of(abouts[newest].get("retention"))
    why: dict[int, str] = {}
    if rules is not None:
        counted = [step for step in abouts if is_spelled_as_ours(folders[step])]
        counted = [step for step in counted if not is_linked(store, folders[step])]
        why = dict.fromkeys(folders, "never removed: a link, or made or named by others")
        why |= dict.fromkeys(counted, "")
        linked = linked_steps(store)
        why |= {
            step: f"the link {linked[folders[step]]} leads to it"
            for step in counted
            if folders[step] in linked
        }
        why |= rules.kept([facts_of(step, abouts[step])._replace(left=step in gone) for step in counted])
    removed = removed_steps(store)
    described = tuple(
        replace(step, kept=why.get(step.step) or None, is_left=step.step in gone)
        if step.committed and not step.problem
        else replace(step, is_removed=not step.committed and folders[step.step] in removed)
        for step in steps
    )
    return Run(store.url, None if rules is None else str(rules), described)


def state(step: RunStep) -> str:
    """Format whether a step is committed."""
    if step.problem:
        return f"{'not known' if step.is_unknown else 'damaged'}: {step.problem}"
    return "committed" if step.committed else "removed" if step.is_removed else "not committed"


def fate(run: Run, step: RunStep) -> str:
    """Format why a step is retained, if known, or that it will be removed."""
    goes = run.rules is not None and step.committed and not (step.problem or step.kept)
    reasons = [
        "left behind" if step.is_left else "",
        "saved with include= or exclude=" if step.is_partial else "",
        step.kept,
        "goes at the next save" if goes else "",
        "is being read" if step.is_read else "",
        "later steps refer to its data, or it is being read" if step.is_removed else "",
    ]
    return ", ".join(filter(None, reasons))


def about_checkpoint(
    store: Store, index: Index, pattern: str | None = None, limit: int | None = 0
) -> Checkpoint:
    """Describe a checkpoint, with up to `limit` of the names that match."""
    names = index.names()
    rows = [row for row, name in enumerate(names) if pattern is None or matches(name, pattern)]
    # Read chunks only for the rows shown. Everything else comes from the header and from narrow columns.
    shown = sorted(rows, key=lambda row: natural(names[row]))[:limit]
    order = sorted(shown)
    columns = index.select(np.asarray(order, np.int64))
    place = dict(zip(order, range(len(order)), strict=True))
    kinds, dtypes, tied = index.column("kind"), index.column("dtype"), index.tied()
    # As Python integers, which do not overflow.
    elements = index.column("shape").astype(object).prod(axis=1).tolist()
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
        metrics=index.about.get("metrics"),
        ranks=number(index.about.get("ranks")),
        files=files,
        bytes=sum(file.size for file in files) + index.size,
        tensors=int((kinds != OBJECT).sum()),
        objects=int((kinds == OBJECT).sum()),
        chunks=index.chunks,
        matched=len(rows),
        totals=totals_of(
            [
                (names[row], int(kinds[row]), int(dtypes[row]), elements[row], tied.get(row, row))
                for row in rows
            ]
        ),
        shown=tuple(
            _tensor(store, index, columns, place[row], row, names[tied[row]] if row in tied else None)
            for row in shown
        ),
    )


def module_of(name: str) -> str:
    """Return up to two parts of a tensor's name, without its last one and without numbers."""
    return ".".join([part for part in name.split(".")[:-1] if not part.isdecimal()][:2])


def totals_of(rows: Iterable[tuple[str, int, int, int, int]]) -> tuple[Total, ...]:
    """Sum up tensors. rows: name, kind, dtype and number of elements of each, and a number that is the same
    for tied tensors."""
    found: dict[tuple[str, int], list[int]] = {}
    counted = set[int]()
    for name, kind, dtype, elements, one in rows:
        if kind != OBJECT:
            total = found.setdefault((module_of(name), dtype), [0, 0])
            total[0] += 1
            # Count tied tensors once, for the first one that matches the pattern.
            if one not in counted:
                total[1] += elements
                counted.add(one)
    return tuple(
        Total(module, DTYPES[code].name, tensors, count, count * DTYPES[code].size)
        for (module, code), (tensors, count) in sorted(found.items(), key=lambda item: natural(item[0][0]))
    )


def _tensor(
    store: Store, index: Index, columns: Columns, position: int, row: int, tied_to: str | None
) -> Tensor:
    """Describe a row of the index, which is at `position` in `columns`."""
    mine: Array = columns.file[columns.chunks_of(position)]
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
        tied_to=tied_to,
    )


def _value(store: Store, index: Index, row: int, nbytes: int) -> str:
    # Imported here, because what reads data takes a while to import, and many checkpoints show no object.
    from holdfast._tools.checkpoints.object_text import object_text

    return object_text(store, index, row, nbytes)


def _step(step: int, store: Store, abouts: dict[int, Json]) -> RunStep:
    """Describe a step's folder, and store its index metadata in `abouts`."""
    names = store.list()
    if INDEX in names:
        try:
            with open_index(store) as index:
                sizes = zip(index.file_names(), index.column("file_size").tolist(), strict=True)
                # Data of another step counts there.
                size = index.size + sum(size for name, size in sizes if not split_reference(name))
                abouts[step] = about = index.about
                created, metrics = moment(about.get("created")), about.get("metrics")
                is_partial = facts_of(step, about).partial is True
                read = is_pinned(store)
                return RunStep(
                    step, store.url, True, size, created, None, metrics, is_read=read, is_partial=is_partial
                )
        except HoldfastError as error:
            # A damaged step still counts as committed, because `restore` tries it too.
            size, unknown = _present_bytes(store, names), is_unanswered(error)
            return RunStep(step, store.url, True, size, None, error.message, is_unknown=unknown)
    other = store.stat(METADATA) if METADATA in names and not is_only_marked(store) else None
    return RunStep(
        step, store.url, other is not None, _present_bytes(store, names), other.modified if other else None
    )


def _present_bytes(store: Store, names: list[str]) -> int:
    """Return the bytes of the files that exist; a file that is deleted meanwhile counts 0."""
    files = [*names, *(f"{DATA}/{name}" for name in store.list(DATA))]
    entries = (store.stat(name) for name in files if not name.endswith("/"))
    return sum(entry.size for entry in entries if entry is not None and entry.kind is Kind.FILE)
