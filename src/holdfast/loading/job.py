"""`load`: from a committed checkpoint into a user's state, in place, in any layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    LoadFailed,
    MissingTensors,
    NotCommitted,
    Replaced,
    ShapeMismatch,
    Unplaced,
)
from holdfast.format import objects
from holdfast.format.columns import Columns
from holdfast.format.limits import bounded_memory
from holdfast.io.file_reader import plan_read, read_into
from holdfast.io.open_checkpoint import Source, open_source
from holdfast.layout.box import Box, Dims, whole
from holdfast.layout.tensor import DTYPES, KINDS, OBJECT, TENSOR, TensorSpec, listed, nearest
from holdfast.loading.filling import announce, check_filled, give_back
from holdfast.loading.lazy_state import LazyStates, refuse_empty
from holdfast.loading.offset_exchange import Lengths, put_in_place, unplaced
from holdfast.options import Options
from holdfast.plan.merge import what
from holdfast.plan.shard_table import Holding, describe
from holdfast.protocol.call import Call, begin_call, one_folder
from holdfast.protocol.core import VISIBLE_WITHIN, load_steps
from holdfast.protocol.operation import Operation, read_state
from holdfast.protocol.phases import LOAD_TRANSITIONS
from holdfast.roster.base import Message, Roster
from holdfast.state.cuda_streams import CallerStreams
from holdfast.state.flatten import Flat, Leaf, Patterns, flatten, hold, select
from holdfast.state.memory import BytesMemory, TensorMemory
from holdfast.store.base import NotFound, Store
from holdfast.store.local import open_store


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Names that were filled, objects included."""
    bytes_needed: int
    """Of the checkpoint's tensors, by this rank."""
    bytes_read: int
    """By this rank, the index included."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint does not: they kept their values (strict=False), or an optimizer still has
    no state under them."""


@dataclass
class _Work:
    """The load of one rank, as the protocol wants it."""

    store: Store
    held: Holding
    strict: bool
    options: Options
    operation: Operation
    leaves: list[Leaf] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """Per row of `held`, its leaf."""
    trouble: HoldfastError | None = None
    streams: CallerStreams = field(default_factory=lambda: CallerStreams(Holding()))
    step: int | None = None
    needed: int = 0
    bytes_read: int = 0
    missing: list[str] = field(default_factory=list)
    filled: list[int] = field(default_factory=list)
    """Leaves that were filled."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each object that was read, by leaf."""
    prefix: bytes = b""
    values: dict[int, Any] = field(default_factory=dict)
    """Objects that were read, by leaf."""
    patterns: Patterns = (None, None)
    built: list[tuple[Leaf, Any]] = field(default_factory=list)
    """What was made for leaves, to take their place."""
    lazy: LazyStates | None = None
    asked: int = 0
    """Rows that this rank asks for."""
    there: int = 0
    """Names in the checkpoint."""

    def choose(self) -> Message:
        if self.trouble is not None:
            raise self.trouble
        with open_source(self.store) as index:
            return {"identity": index.identity, "created": index.about.get("created")}

    def read(self, chosen: Message) -> Message:
        if self.trouble is not None:
            raise self.trouble
        self._wait_for(chosen)
        with open_source(self.store) as index:
            if index.identity != chosen["identity"]:
                raise self._replaced()
            self.step = index.about.get("step")
            try:
                self._read(index)
            except NotFound as error:
                if self._still(chosen["identity"]):
                    raise CorruptCheckpoint(
                        f"A data file of {self.store.url} is missing: {error.message}",
                        hint="Load an older step, or another copy of this one.",
                    ) from None
                raise self._replaced() from None
        self._decode()
        return {"bytes": self.bytes_read, "asked": self.asked}

    def check(self, reports: dict[int, Message]) -> None:
        """A load into nothing, where there is something, is one into the wrong state."""
        if self.there and not any(report["asked"] for report in reports.values()):
            raise BadInput(
                f"The load of {self.store.url}, which holds {self.there} names, asks for nothing: no rank has a value in its state.",
                hint="Give the values that are to be filled (a module, its state_dict(), what holdfast.get_state_dict gives, tensors), "
                "or look at include= and exclude=.",
            )

    def _read(self, index: Source) -> None:
        self.lazy = LazyStates(
            self.store.url, self.leaves, self.owner, self.held, self.operation.at.participants
        )
        self.lazy.look(index, self.patterns, self.strict)
        self.missing, self.there = self.lazy.missing, index.tensors
        rows = index.find([spec.name for spec in self.held.specs])
        keep = self._check_missing(rows, index)
        held = Holding(self.held.rank)
        tensors, position = np.unique(rows[keep], return_inverse=True)
        columns = index.select(tensors)
        for place, row in enumerate(keep):
            self._take(held, row, columns, int(position[place]))
        plan = plan_read(held, position, columns, index.where)
        check_filled(held, plan)
        self.needed = plan.bytes_needed
        announce(held, [self.leaves[self.owner[row]] for row in keep])
        self.streams.wait()
        read = read_into(
            self.store,
            held,
            columns,
            plan,
            self.options.writer_threads,
            lambda moved: self.operation.progress(moved, self.needed),
        )
        self.streams.finish()
        self.bytes_read = read + index.bytes_read
        self.prefix = index.object_prefix
        self.filled = [self.owner[row] for row in keep]
        objects_read = [place for place in range(len(keep)) if held.specs[place].kind == OBJECT]
        self.sizes = {self.filled[place]: held.specs[place].shape[0] for place in objects_read}

    def _replaced(self) -> Replaced:
        return Replaced(
            f"{self.store.url} was replaced or removed while rank {self.held.rank} loaded it.",
            hint="Load again.",
        )

    def _still(self, identity: str) -> bool:
        """Is the version that this load began with the one that is there?"""
        try:
            with open_source(self.store) as index:
                return index.identity == identity
        except HoldfastError:
            return False

    def _wait_for(self, chosen: Message) -> None:
        """Until the version that the committer chose is visible here; a network file system may show it
        late. Another version that is newer, or that the committer itself sees, has replaced it."""
        at = self.operation.at
        ends = at.clock.now() + min(VISIBLE_WITHIN, at.deadline.left())
        while True:
            with suppress(NotCommitted), open_source(self.store) as index:
                if index.identity == chosen["identity"]:
                    return
                created, before = index.about.get("created"), chosen["created"]
                newer = isinstance(created, float) and isinstance(before, float) and created > before
                if at.leads or newer:
                    raise self._replaced()
            self.operation.still_wanted()
            if at.leads or at.clock.now() >= ends:
                raise self._replaced()
            at.clock.sleep(0.05)

    def _check_missing(self, rows: Any, index: Source) -> list[int]:
        """Rows of the holding that the checkpoint has; the others are an error unless excused."""
        gone = [row for row in range(len(self.held)) if rows[row] < 0]
        empty = {
            row for row in gone if (leaf := self.leaves[self.owner[row]]).is_empty() and not leaf.optional
        }
        refuse_empty(self.store.url, [self.held.specs[row].name for row in sorted(empty)], index)
        names = list(
            dict.fromkeys(
                self.held.specs[row].name
                for row in gone
                if row not in empty and not self.leaves[self.owner[row]].optional
            )
        )
        self.asked = len(self.held) - len(empty)
        if names and self.strict:
            have = index.names()

            def say(name: str) -> str:
                near = nearest(name, have)
                return f"{name!r}" + (f" (nearest: {near!r})" if near else "")

            raise MissingTensors(
                f"{self.store.url} does not hold {len(names)} of the names in the state: {listed(names, say)}.",
                hint=f"It holds {index.tensors} names; load a part with include= or exclude=, or pass strict=False to keep "
                "present values.",
                details={"missing": names[:100]},
            )
        self.missing += names
        return [row for row in range(len(self.held)) if rows[row] >= 0]

    def _take(self, held: Holding, row: int, columns: Columns, tensor: int) -> None:
        """A row to fill, once what the checkpoint holds fits it."""
        spec, memory = self.held.specs[row], self.held.memory[row]
        kind, shape = int(columns.kind[tensor]), columns.shape_of(tensor)
        if spec.kind == OBJECT and kind == OBJECT:
            assert isinstance(memory, BytesMemory)
            with bounded_memory(f"The object {spec.name!r} of {self.store.url}"):
                memory.resize(shape[0])
            held.add(spec._replace(shape=shape), whole(shape), (0, 1), True, memory)
            return
        dtype, box = int(columns.dtype[tensor]), self.held.boxes[row]
        leaf = self.leaves[self.owner[row]]
        if spec.kind == TENSOR == kind and (leaf.converts or leaf.fits):
            assert isinstance(memory, TensorMemory)
            if leaf.converts and spec.dtype != dtype:
                memory = TensorMemory(memory.tensor, getattr(torch, DTYPES[dtype].name))
                spec = spec._replace(dtype=dtype)
            if leaf.fits and spec.shape != shape and len(spec.shape) == len(shape):
                spec, box, memory = _fitted(spec, box, memory, shape)
        stored = what(kind, dtype, shape)
        if spec.kind != kind or spec.shape != shape or spec.dtype != dtype:
            raise ShapeMismatch(
                f"{spec.name!r}: the checkpoint holds {stored}, the state wants {describe(spec)}.",
                hint=f"{KINDS[kind]} and {KINDS[spec.kind]} can't be exchanged."
                if spec.kind != kind
                else "Build the model as it was saved, or leave this name out with exclude=.",
                details={"tensor": spec.name},
            )
        held.add(spec, box, (0, 1), False, memory)

    def _decode(self) -> None:
        """Objects, before this rank says that it has read: one that can't be decoded fails the load everywhere."""
        rows = dict(zip(self.owner, range(len(self.owner)), strict=True))
        for owner, size in self.sizes.items():
            memory = self.held.memory[rows[owner]]
            assert isinstance(memory, BytesMemory)
            name = self.leaves[owner].name
            with bounded_memory(f"The object {name!r} of {self.store.url}"):
                self.values[owner] = objects.decode(self.prefix + memory.value(size), name)
        self.built = self.lazy.build(self.values) if self.lazy is not None else []

    def give_back(self) -> None:
        """What was read into the state."""
        give_back(self.leaves, self.filled, self.values, self.built)


def _fitted(
    spec: TensorSpec, box: Box, memory: TensorMemory, shape: Dims
) -> tuple[TensorSpec, Box, TensorMemory]:
    """The part of a shard that a stored tensor of another shape fills; the rest of it is zeroed."""
    with torch.no_grad():
        memory.tensor.zero_()
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    common = box.intersect(whole(shape)) or nothing
    part = memory.tensor.detach()
    if common.volume:
        part = part[common.relative_to(box.offset).slices()]
    return spec._replace(shape=shape), common, TensorMemory(part, memory.stored)


def load(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    participants: Iterable[int] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    options: Options | None = None,
    roster: Roster | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, in place; the layout may differ from the one that saved it.

    Tensors are overwritten where they lie, objects are replaced in their dict or list, stateful
    values get their `load_state_dict`. Every byte is verified. Nothing in a checkpoint is
    executed. All participants load the same version, and if one fails all raise its error (the
    state may then be partly overwritten).

    strict: a name that the checkpoint lacks is an error; else it keeps its value and is reported.
    The other arguments are those of `save`.
    """
    store = open_store(one_folder(path, checkpoint_id))
    call = begin_call(
        roster,
        no_dist=no_dist,
        participants=participants,
        process_group=process_group,
        timeout=timeout,
        stall_timeout=stall_timeout,
    )
    while True:
        try:
            return load_from(
                store,
                lambda rank: flatten(state_dict, rank),
                call,
                include=include,
                exclude=exclude,
                strict=strict,
                options=options,
            )
        except Replaced:  # the same on every rank: all begin anew, with the version that is there now
            if call.deadline.left() < timeout / 2:
                raise


def load_from(
    store: Store,
    take: Callable[[int], Flat],
    call: Call,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    options: Options | None = None,
    signature: object = None,
) -> LoadReport:
    """`load` from a store, into what `take(rank)` yields; what that raises is told to the other ranks.

    signature: what else tells this call from others on the same folder, the same on all ranks.
    """
    flat = Flat()
    lengths: Lengths | None = None

    def begin() -> _Work:
        operation = Operation(
            "load",
            f"load of {store.url}",
            store.url,
            call,
            LOAD_TRANSITIONS,
            include=include,
            exclude=exclude,
            strict=strict,
            signature=signature,
            lengths=lengths is not None,
        )
        held = Holding(call.rank)
        return _Work(store, held, strict, options or Options(), operation, patterns=(include, exclude))

    def read() -> None:
        taken = take(call.rank)
        flat.after = taken.after
        work.leaves = select(taken.leaves, include, exclude)
        work.held, work.owner = hold(work.leaves, call.rank, call.participants, for_load=True)
        work.streams = CallerStreams(work.held)
        if lengths is not None:
            put_in_place(work.held, lengths)

    while True:
        work = begin()
        operation = work.operation
        work.trouble = read_state(read, call.rank)
        if lengths is None and work.trouble is None:
            work.trouble = unplaced(work.held, operation.at.title)
        try:
            operation.run(lambda: load_steps(operation.at, work), work.trouble)  # noqa: B023
            break
        except Unplaced:  # the same on every rank
            lengths = Lengths(
                f"lengths for the {operation.at.title}",
                f"{store.url}|lengths",
                call,
            ).of(work.held, work.trouble)
            lengths.run()
    work.give_back()
    for finish in flat.after:
        try:
            finish()
        except Exception as error:
            raise LoadFailed(
                f"{operation.at.title}: all was read, but load_state_dict failed on {operation.at.who}: "
                f"{type(error).__name__}: {error}",
                rank=call.rank,
                hint="Other ranks don't know of this.",
            ) from error
    return LoadReport(
        store.url,
        work.step,
        len(set(work.filled)),
        work.needed,
        work.bytes_read,
        operation.seconds(),
        tuple(work.missing),
    )
