"""Plan the load of one rank: which rows of its state the checkpoint fills, and from which byte ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast._core.base.values import Json
from holdfast._core.format.columns import Array, Columns
from holdfast._core.format.limits import bounded_memory
from holdfast._core.format.names import PARTIAL, up_to_rank
from holdfast._core.io.file_reader import ReadPlan, plan_read
from holdfast._core.io.renamed import moved
from holdfast._core.io.source import ForeignSource, Source, rows_of
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.tensor import OBJECT, TENSOR, Dims, TensorSpec, listed, nearest
from holdfast._core.loading.filling import check_filled, refuse_expanded
from holdfast._core.loading.lazy_state import LazyStates, refuse_empty, under
from holdfast._core.loading.numbers import add_wholes, not_exchanged
from holdfast._core.loading.request import SKIP, LoadRequest
from holdfast._core.loading.rest import remedy, renaming
from holdfast._core.loading.tied import Tied, rows_read_once
from holdfast._core.plan.agreement import what
from holdfast._core.plan.blocks import widen
from holdfast._core.plan.shard_table import Memory, ShardTable, describe
from holdfast._core.state.from_names import parents_of
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import BytesMemory, TensorMemory, torch_dtype
from holdfast._core.state.subclasses import is_dtensor
from holdfast.errors import MissingTensors, ShapeMismatch


def _of_this_rank(example: str) -> str:
    """Return the hint for values of this rank that the checkpoint lacks, if all that it lacks are such.

    example: the name of a value of this rank that it holds instead; "": it holds none.
    """
    if example:
        return (
            f"It holds this rank's value with other names, such as {example!r}: give holdfast.PerRank a "
            "value with the names that were saved. A loader in holdfast.TrainState(loader) may have others."
        )
    return (
        "The checkpoint has no value of this rank; holdfast.PerRank(value, optional=True) keeps the present "
        "one, holdfast.PerRank(value, merge=rule) makes one from those of the ranks that saved."
    )


class LoadPlan(NamedTuple):
    """The reads of one rank, and the leaves that they fill."""

    wanted: ShardTable
    """The rows to read, with names, shapes and dtypes as stored."""
    filled: list[int]
    """For each row of `wanted`, the index of the leaf that it fills."""
    blank: list[torch.Tensor]
    """Tensors that the checkpoint fills only in part; the remainder is set to zero."""
    found: Array
    """Rows of the checkpoint's index to read, ascending."""
    columns: Columns
    """The same rows, as columns."""
    reads: ReadPlan
    tied: Tied
    """Rows of `wanted` that share memory with another row."""
    lazy: LazyStates
    wholes: dict[int, list[int]]
    """Leaves that were added for stored objects, each with the leaves whose values are parts of it."""
    numbers: frozenset[int]
    """Leaves that are 0-dimensional tensors, where the checkpoint has an object."""
    scalars: dict[int, torch.Tensor]
    """Leaves that are Python numbers, where the checkpoint has a 0-dimensional tensor; each with the tensor
    that it is read into."""
    counts: dict[int, torch.Tensor]
    """Rows of `wanted` for 0-dimensional tensors of another dtype than stored, with the state's tensor."""
    tensors: tuple[int, int]
    """Number of tensors to fill, and how many of these are in the checkpoint, in any shape."""
    absent: tuple[str, ...]
    """Names of the state that the checkpoint lacks."""
    missing: tuple[str, ...]
    """`absent`, preceded by the names of optimizer states that the checkpoint lacks."""
    skipped: tuple[str, ...]
    """Names that were skipped because the stored shape differs."""
    rows_asked: int
    names_stored: int
    step: Json


def plan_load(
    index: Source, request: LoadRequest, leaves: list[Leaf], state: ShardTable, owner: Sequence[int]
) -> LoadPlan:
    """Plan how the rows of a state are filled. No data is read, so errors are raised before the state is
    changed.

    leaves: extended by leaves for optimizer states that the optimizer has not created yet. owner: for each
        row, the index of its leaf.
    """
    table, owners, partly = rows_of(index, state, owner)
    lazy = LazyStates(request.store.url, leaves, owners, table, request.call.participants)
    others: dict[int, Memory] = {}
    if request.on_shape == SKIP:
        others = _of_other_shapes(index, table, [leaves[leaf] for leaf in owners])
        lazy.leave_out(
            [
                (memory.tensor, table.specs[row].shape)
                for row, memory in others.items()
                if isinstance(memory, TensorMemory)
            ]
        )
    # Create missing optimizer states first: this adds rows to the table, which are then filled like others.
    lazy.look(index, request.patterns, request.strict, request.cast)
    rows = index.find([spec.name for spec in table.specs])
    of_row = [leaves[leaf] for leaf in owners]
    gone = [row for row in (rows < 0).nonzero()[0].tolist() if not of_row[row].optional]
    otherwise, example = _stored_otherwise(index, table, rows, of_row)
    gone = sorted({*gone, *otherwise})
    wholes: dict[int, list[int]] = {}
    if gone:
        before = len(table)
        wholes = add_wholes(index, leaves, owners, table, gone, request.call.participants)
        rows = np.concatenate([rows, index.find([spec.name for spec in table.specs[before:]])])
        of_row = [leaves[leaf] for leaf in owners]
        parts = {leaf for some in wholes.values() for leaf in some}
        gone = [row for row in gone if owners[row] not in parts]
    missing, rows_asked = _check_missing(request, index, table, of_row, gone, example)
    # Read only this part of the index: of 100,000 tensors a rank usually requests few.
    keep = [row for row in (rows >= 0).nonzero()[0].tolist() if row not in others]
    found, position = np.unique(rows[keep], return_inverse=True)
    columns = index.select(found)
    blank = [state.memory[row].tensor for row in partly]  # type: ignore[attr-defined]
    wanted = table.take(keep)
    numbers: set[int] = set()
    scalars: dict[int, torch.Tensor] = {}
    counts: dict[int, torch.Tensor] = {}
    # Few rows: most are stored as the state has them.
    for at in (~_as_stored(wanted, columns, position)).nonzero()[0].tolist():
        row, column = keep[at], int(position[at])
        spec, box, memory = table.specs[row], table.boxes[row], table.memory[row]
        stored = columns.spec_of(column)
        if spec.kind == OBJECT and stored.shape == () and isinstance(of_row[row].value, int | float):
            scalars[owners[row]] = torch.empty((), dtype=torch_dtype(stored.dtype), device="cpu")
            wanted.put(at, stored, whole(()), TensorMemory(scalars[owners[row]]))
            continue
        if stored.kind == OBJECT and spec.kind == TENSOR and spec.shape == ():
            numbers.add(owners[row])
            spec, memory = stored, BytesMemory(b"")
        if spec.kind == OBJECT == stored.kind:
            assert isinstance(memory, BytesMemory)
            # The length comes from the file, and may be forged.
            with bounded_memory(f"The object {spec.name!r} of {request.store.url}"):
                memory.resize(stored.shape[0])
            wanted.put(at, spec._replace(shape=stored.shape), whole(stored.shape), memory)
            continue
        converts = request.cast or of_row[row].converts
        if spec.shape == stored.shape == () and isinstance(memory, TensorMemory) and not converts:
            counts[at] = memory.tensor
            wanted.put(
                at, stored, box, TensorMemory(torch.empty((), dtype=torch_dtype(stored.dtype), device="cpu"))
            )
            continue
        fitted, part, target = _fit(spec, box, memory, stored, of_row[row], request.cast)
        if part is not box:
            blank.append(memory.tensor)  # type: ignore[attr-defined]
        wanted.put(at, fitted, part, target)
    reads = plan_read(wanted, position, columns, index.where, index.fetched_for)
    check_filled(wanted, reads)
    refuse_expanded(wanted)
    tied = rows_read_once(wanted, position, columns, index.where)
    kinds = table.arrays().kind == TENSOR
    absent = kinds & (rows < 0)
    absent[gone] = False
    # Absent optional tensors, and parts of a stored object, count neither as wanted nor as filled.
    wants = kinds.sum() - absent.sum()
    return LoadPlan(
        wanted,
        [owners[row] for row in keep],
        blank,
        found,
        columns,
        reads.without(tied.rows, wanted),
        tied,
        lazy,
        wholes,
        frozenset(numbers),
        scalars,
        counts,
        (int(wants), int((kinds & (rows >= 0)).sum())),
        tuple(missing),
        (*lazy.missing, *missing),
        tuple(dict.fromkeys([*(table.specs[row].name for row in others), *lazy.skipped])),
        rows_asked,
        index.tensors,
        index.about.get("step"),
    )


def _stored_otherwise(
    index: Source, table: ShardTable, rows: Array, of_row: list[Leaf]
) -> tuple[list[int], str]:
    """Return rows of values of this rank (`PerRank`) that the checkpoint lacks, but of which it holds the
    value of this rank under other names; and one of these names.

    Such a rank is not new: it would go on with its present value in place of the one that it has saved.
    """
    private: dict[str, list[int]] = {}
    for row, leaf in enumerate(of_row):
        if leaf.private and (top := up_to_rank(leaf.name)) is not None:
            private.setdefault(top, []).append(row)
    absent = {top: [row for row in some if rows[row] < 0] for top, some in private.items()}
    if not any(absent.values()):
        return [], ""
    have = index.names()
    found, example = list[int](), ""
    for top, some in absent.items():
        of_top = _other_form(index, have, top, top) if some else ""
        # Of a value that is there in part, only what has another form is lost: other names are new.
        whole = of_top and len(some) == len(private[top])
        found += [row for row in some if whole or _other_form(index, have, of_row[row].name, top)]
        example = example or of_top
    return found, example


def _other_form(index: Source, have: list[str], name: str, top: str) -> str:
    """Return a stored name that lies under `name`, or that `name` lies in, from `top` on; "" if none does."""
    first, stop = under(have, name)
    if first < stop:
        return have[first]
    parents = [parent for parent in parents_of(name, len(top)) if index.find_one(parent) >= 0]
    return parents[-1] if parents else ""


def _check_missing(
    request: LoadRequest, index: Source, table: ShardTable, of_row: list[Leaf], gone: list[int], example: str
) -> tuple[list[str], int]:
    """Raise MissingTensors for rows that the checkpoint lacks, if the load is strict. Return their names, and
    the number of rows that are not empty containers.

    example: the name of a value of this rank that the checkpoint holds, in place of some of them.
    """
    empty = [table.specs[row].name for row in gone if of_row[row].is_empty()]
    refuse_empty(request.store.url, empty, index)
    names = list(dict.fromkeys(table.specs[row].name for row in gone if not of_row[row].is_empty()))
    if names and request.strict:
        # All names are read for this error only, to show the nearest one to each.
        have = index.names()

        def say(name: str) -> str:
            near = nearest(name, have)
            return f"{name!r}" + (f" (nearest: {near!r})" if near else "")

        found = _renaming(index, table, gone, have)
        raise MissingTensors(
            f"{request.store.url} does not hold {len(names)} of the names in the state: "
            f"{listed(names, say, most=3 if found else 10)}.",
            hint=found
            or _quantized({table.specs[row].name: of_row[row] for row in gone}, have)
            or (_of_this_rank(example) if all(of_row[row].private for row in gone) else "")
            or _partial(index)
            or f"It holds {index.tensors} names; leave these out of the load, or pass {request.lenient} to "
            "load the others.",
            details={"missing": names[:100]},
        )
    return names, len(table) - len(empty)


def _renaming(index: Source, table: ShardTable, gone: list[int], have: list[str]) -> str:
    """Return a hint to rename missing names; "" if no renaming fits, or if the values under the other names
    have another kind or shape."""
    missing = {table.specs[row].name: table.specs[row] for row in gone}
    asked = {spec.name for spec in table.specs}
    mapping, fits = renaming([*missing], [name for name in have if name not in asked])
    if not mapping:
        return ""
    [(theirs, ours)] = mapping.items()
    stored = {name: moved(name, ours, theirs) for name in missing}
    rows = {name: index.find_one(other) for name, other in stored.items() if other is not None}
    found = np.unique([row for row in rows.values() if row >= 0])
    specs = {spec.name: spec for spec in index.select(found).specs()}
    alike = all(
        specs[other].kind == spec.kind and (spec.kind == OBJECT or specs[other].shape == spec.shape)
        for name, spec in missing.items()
        if (other := stored[name]) is not None and other in specs
    )
    if alike and isinstance(index, ForeignSource):  # takes no `rename`
        fit = f"{fits} of these {len(missing)} names fit so."
        if theirs:
            return "" if ours else f"Load {{{theirs!r}: state}}: {fit}"
        return f"Load the part of the state under {ours!r} alone: {fit}"
    return remedy(mapping, fits, len(missing)) if alike else ""


def _quantized(missing: dict[str, Leaf], have: list[str]) -> str:
    """Return a hint about a tensor that is quantized in either the state or the checkpoint, but not in both;
    "" if there is none."""
    for name, leaf in missing.items():
        below = [other for other in have if is_dtensor(leaf.value) and other.startswith(f"{name}.")]
        whole = name.rpartition(".")[0]
        if below or (whole in have and (leaf.outer is not None or name != leaf.name)):
            return (
                f"It holds {whole!r}, which is not quantized there and is here."
                if not below
                else f"It holds {name!r} in parts, {listed(below, most=3)}: it is quantized there, not here."
            ) + (
                " Some optimizers leave small parts of a parameter plain; load it on a number of ranks that "
                "leaves it as it was, or leave it out of the load."
            )
    return ""


def _partial(index: Source) -> str:
    """Return a hint about a checkpoint whose names `include=` or `exclude=` selected; "" for others."""
    if index.about.get(PARTIAL) is not True:
        return ""
    return (
        f"It was saved with include= or exclude=, and holds {index.tensors} names. Load it with the same "
        "patterns, or a step that was saved without: holdfast inspect lists the steps of a run."
    )


def _as_stored(table: ShardTable, columns: Columns, position: Array) -> Array:
    """Return for each row whether a tensor with its dtype and shape is stored. position: in `columns`."""
    rows, dims = table.arrays(), max(table.arrays().dims, columns.dims)
    given = np.stack([rows.kind, rows.dtype, rows.ndim], axis=1)
    stored = np.stack([columns.kind, columns.dtype, columns.ndim], axis=1)[position]
    shapes = widen(rows.shape, dims, 1) == widen(columns.shape, dims, 1)[position]
    alike: Array = (given == stored).all(axis=1) & shapes.all(axis=1) & (given[:, 0] == TENSOR)
    return alike


def _of_other_shapes(index: Source, table: ShardTable, of_row: list[Leaf]) -> dict[int, Memory]:
    """Return the rows for which a tensor of another shape is stored, each with its memory."""
    rows = index.find([spec.name for spec in table.specs])
    there = (rows >= 0).nonzero()[0]
    found, position = np.unique(rows[there], return_inverse=True)
    columns = index.select(found)
    return {
        row: table.memory[row]
        for row, at in zip(there.tolist(), position.tolist(), strict=True)
        if table.specs[row].kind == columns.kind[at] == TENSOR
        and table.specs[row].shape != columns.shape_of(at)
        and not of_row[row].fits
    }


def _fit(
    spec: TensorSpec, box: Box, memory: Memory, stored: TensorSpec, leaf: Leaf, cast: bool
) -> tuple[TensorSpec, Box, Memory]:
    """Return the row that a stored tensor fills. Raises ShapeMismatch if it does not fit."""
    if spec.kind == TENSOR == stored.kind and isinstance(memory, TensorMemory):
        if (cast or leaf.converts) and spec.dtype != stored.dtype:
            # Read in the stored dtype and then converted, so never directly into the tensor's memory.
            memory = TensorMemory(memory.tensor, torch_dtype(stored.dtype))
            spec = spec._replace(dtype=stored.dtype)
        if leaf.fits and spec.shape != stored.shape and len(spec.shape) == len(stored.shape):
            spec, box, memory = _overlap(spec, box, memory, stored.shape)
    if spec != stored:
        raise ShapeMismatch(
            f"{spec.name!r}: the checkpoint holds {what(stored)}, the state wants {describe(spec)}.",
            hint=not_exchanged(stored.kind)
            if spec.kind != stored.kind
            else "holdfast.load(cast=True) converts."
            if spec.shape == stored.shape
            else "Build the model as it was saved, or leave it out: holdfast.load(on_shape='skip').",
            details={"tensor": spec.name},
        )
    return spec, box, memory


def _overlap(
    spec: TensorSpec, box: Box, memory: TensorMemory, shape: Dims
) -> tuple[TensorSpec, Box, TensorMemory]:
    """Return the part of a shard that a stored tensor of another shape fills; the caller zeroes the rest."""
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    # A row without elements stays: the name counts as found, and nothing is read for it.
    common = box.intersect(whole(shape)) or nothing
    part = memory.tensor.detach()
    if common.volume:
        part = part[common.relative_to(box.offset).slices()]
    return spec._replace(shape=shape), common, TensorMemory(part, memory.stored)
