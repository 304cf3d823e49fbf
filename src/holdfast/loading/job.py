"""The load of one rank: collect the state, choose a version, plan, read, put what was read into the state,
report.

The protocol (`protocol.core.load_steps`) drives a `LoadJob`: it calls `choose` on the committer, `read` on
all ranks, and `check` on the committer. `apply` then puts the values into the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from holdfast.format.columns import Array, Columns
from holdfast.format.limits import bounded_memory
from holdfast.io.file_reader import plan_read, read_into
from holdfast.io.open_checkpoint import open_source
from holdfast.io.source import Source
from holdfast.layout.box import Box, whole
from holdfast.layout.tensor import KINDS, OBJECT, TENSOR, Dims, Patterns, TensorSpec, listed, nearest
from holdfast.loading.filling import announce, check_filled, give_back
from holdfast.loading.lazy_state import LazyStates, refuse_empty
from holdfast.loading.offset_exchange import OffsetExchange, exchange_offsets, put_in_place, unplaced
from holdfast.loading.published import see_published
from holdfast.options import Options
from holdfast.plan.merge import what
from holdfast.plan.shard_table import ShardTable, describe
from holdfast.protocol.call import Call, begin_call, check_arguments, one_folder
from holdfast.protocol.core import load_steps
from holdfast.protocol.messages import Chosen, HaveRead
from holdfast.protocol.operation import Operation, read_state
from holdfast.protocol.phases import LOAD_TRANSITIONS
from holdfast.roster.base import Roster
from holdfast.state.flatten import build_shard_table, flatten, select
from holdfast.state.leaf import Flat, Leaf
from holdfast.state.memory import BytesMemory, CallerStreams, TensorMemory, torch_dtype
from holdfast.store.base import VISIBLE_WITHIN, NotFound, Store
from holdfast.store.local import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LoadReport(msgspec.Struct, frozen=True):
    """What a load did on this rank."""

    path: str
    step: int | None
    tensors: int
    """Names that were filled, objects included."""
    bytes_needed: int
    """Bytes of the checkpoint's tensors that this rank needs."""
    bytes_read: int
    """Bytes that this rank read, the index included."""
    seconds: float
    missing: tuple[str, ...] = ()
    """Names that the state has and the checkpoint does not: they kept their values (strict=False), or an
    optimizer still has no state under them."""


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What a load of this rank was asked for. The same type for plain, DCP and Megatron loads.

    collect: returns the leaves of the state for a rank. What it raises is reported to the other ranks.
    signature: what else distinguishes this call from others on the same folder; the same on all ranks.
    The other fields are the arguments of `holdfast.load`.
    """

    store: Store
    collect: Callable[[int], Flat]
    call: Call
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    strict: bool = True
    options: Options = field(default_factory=Options)
    signature: object = None

    def __post_init__(self) -> None:
        check_arguments(options=self.options, include=self.include, exclude=self.exclude)

    def run(self) -> LoadReport:
        """Load. Raises the error that all ranks raise; the state may then be partly overwritten.

        If the checkpoint is replaced meanwhile, all ranks begin again with the version that is there then.
        """
        while True:
            try:
                return self.run_once()
            except Replaced:  # raised on every rank
                if self.call.deadline.left() < self.call.deadline.seconds / 2:
                    raise

    def run_once(self) -> LoadReport:
        """Load as `run` does, but raise Replaced to a caller that can choose another checkpoint."""
        job = LoadJob(self)
        try:
            job.run()
        # Only loads of uneven shards pay for the second pass: most states know all their offsets.
        except Unplaced:  # raised on every rank: the offsets depend on what all ranks hold
            offsets = exchange_offsets(self.store, self.call, job.table, job.collect_error)
            job = LoadJob(self, offsets)
            job.run()
        return job.apply()


class LoadJob:
    """A load of this rank. The constructor collects the state, `run` reads, `apply` puts the result into the
    state.

    offsets: the exchanged lengths of all ranks' shards; None in the first pass, which finds out whether they
        are needed.
    """

    def __init__(self, request: LoadRequest, offsets: OffsetExchange | None = None) -> None:
        self.request, self.store, self._offsets = request, request.store, offsets
        self.rank = request.call.rank
        self.patterns: Patterns = (request.include, request.exclude)
        self.table = ShardTable(self.rank)
        self.leaves: list[Leaf] = []
        self.owner: list[int] = []
        """Per row of `table`, its leaf."""
        self.after: list[Callable[[], None]] = []
        """Functions to call once all is in the state: `load_state_dict` of stateful values."""
        self.streams = CallerStreams(self.table)
        self.step: int | None = None
        self.bytes_needed = self.bytes_read = 0
        self.rows_asked = 0
        """Rows that this rank asks for."""
        self.names_stored = 0
        """Names in the checkpoint."""
        self.missing: list[str] = []
        self.blank: list[torch.Tensor] = []
        """Tensors that the checkpoint fills only in part; the rest becomes zero."""
        self.filled: list[int] = []
        """Leaves that were filled."""
        self.sizes: dict[int, int] = {}
        """Bytes of each object that was read, by row of `table`."""
        self.prefix = b""
        self.values: dict[int, object] = {}
        """Objects that were read, by leaf."""
        self.lazy: LazyStates | None = None
        self.built: list[tuple[Leaf, object]] = []
        """Leaves, and the created values that take their place."""
        self.operation = Operation(
            "load",
            f"load of {self.store.url}",
            self.store.url,
            request.call,
            LOAD_TRANSITIONS,
            arguments={
                "include": request.include,
                "exclude": request.exclude,
                "strict": request.strict,
                "signature": request.signature,
                # The second pass is another call: a rank that is late in the first pass must not join it.
                "lengths": offsets is not None,
            },
        )
        self.collect_error = read_state(self._collect, self.rank)
        """The error of collecting the state, if any. The protocol reports it to the other ranks."""
        # A shard without an offset is raised as an error (`Unplaced`), because errors reach all ranks. Every
        # rank then exchanges lengths and loads again (`LoadRequest.run_once`).
        if offsets is None and self.collect_error is None:
            self.collect_error = unplaced(self.table, self.operation.context.title)

    def run(self) -> None:
        """Run the protocol to its end."""
        self.operation.run(load_steps(self.operation.context, self), self.collect_error)

    # -- collect ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        request = self.request
        flat = request.collect(self.rank)
        self.after = flat.after
        self.leaves = select(flat.leaves, request.include, request.exclude)
        self.table, self.owner = build_shard_table(
            self.leaves, self.rank, request.call.participants, for_load=True
        )
        # Here, on the caller's thread: another thread reads, with other current streams.
        self.streams = CallerStreams(self.table)
        if self._offsets is not None:
            put_in_place(self.table, self._offsets)

    # -- choose a version and read it -------------------------------------------------------------

    def choose(self) -> Chosen:
        if self.collect_error is not None:
            raise self.collect_error
        with open_source(self.store) as index:
            return Chosen(index.identity, index.about.get("created"))

    def read(self, chosen: Chosen) -> HaveRead:
        if self.collect_error is not None:
            raise self.collect_error
        self._wait_for(chosen)
        with open_source(self.store) as index:
            if index.identity != chosen.identity:  # it was replaced since the check above
                raise self._replaced()
            self.step = index.about.get("step")
            try:
                self._read(index)
            except NotFound as error:
                # An overwrite deletes the old data once its index is in place. A missing file is damage only
                # if the index is still the same.
                if self._still(chosen.identity):
                    raise CorruptCheckpoint(
                        f"A data file of {self.store.url} is missing: {error.message}",
                        hint="Load an older step, or another copy of this one.",
                    ) from None
                raise self._replaced() from None
        self._decode()
        return HaveRead(self.bytes_read, self.rows_asked)

    def check(self, reports: dict[int, HaveRead]) -> None:
        """Refuse a load in which no rank asks for anything, though the checkpoint holds something."""
        if self.names_stored and not any(report.asked for report in reports.values()):
            raise BadInput(
                f"The load of {self.store.url}, which holds {self.names_stored} names, asks for nothing: no "
                "rank has a value in its state.",
                hint="Give the values that are to be filled (a module, its state_dict(), what "
                "holdfast.get_state_dict gives, tensors), or look at include= and exclude=.",
            )

    def _read(self, index: Source) -> None:
        self.table, self.owner = see_published(index, self.table, self.owner, self.blank)
        self.lazy = LazyStates(
            self.store.url, self.leaves, self.owner, self.table, self.request.call.participants
        )
        # Create what the state lacks first: it adds rows to the table, which are then filled like others.
        self.lazy.look(index, self.patterns, self.request.strict)
        self.missing, self.names_stored = self.lazy.missing, index.tensors
        rows = index.find([spec.name for spec in self.table.specs])
        keep = self._check_missing(rows, index)
        wanted = ShardTable(self.table.rank)
        # Read only this part of the index: of 100,000 tensors a rank mostly wants a few.
        tensors, position = np.unique(rows[keep], return_inverse=True)
        columns = index.select(tensors)
        for place, row in enumerate(keep):
            self._take(wanted, row, columns, int(position[place]))
        # Errors of the plan are found before the first byte goes into the state. Autograd is also told before
        # that: a load that fails half way has changed tensors, too.
        plan = plan_read(wanted, position, columns, index.where, index.fetched_for)
        check_filled(wanted, plan)
        self.bytes_needed = self.operation.bytes_total = plan.bytes_needed
        announce(wanted, [self.leaves[self.owner[row]] for row in keep])
        self.streams.wait()  # what training has queued on the GPU still reads and writes these tensors
        with torch.no_grad():
            for tensor in self.blank:
                tensor.detach().zero_()
        read = read_into(
            self.store,
            wanted,
            columns,
            plan,
            self.request.options.writer_threads,
            self.operation.progress,
        )
        # The caller's streams do not wait for copies on this thread's streams, so finish them here.
        self.streams.finish()
        self.bytes_read = read + index.bytes_read
        self.prefix = index.object_prefix
        self.filled = [self.owner[row] for row in keep]
        self.sizes = {
            row: spec.shape[0] for row, spec in zip(keep, wanted.specs, strict=True) if spec.kind == OBJECT
        }

    def _replaced(self) -> Replaced:
        return Replaced(
            f"{self.store.url} was replaced or removed while rank {self.table.rank} loaded it.",
            hint="Load again.",
        )

    def _still(self, identity: str) -> bool:
        """Return whether the version that this load began with is still there."""
        try:
            with open_source(self.store) as index:
                return index.identity == identity
        except HoldfastError:
            # Gone or unreadable: in both cases it is not the version that this load began with.
            return False

    def _wait_for(self, chosen: Chosen) -> None:
        """Wait until the version that the committer chose is visible here; a network file system may show it
        late. Raises Replaced if there is a newer version, or if the committer itself sees another one."""
        context = self.operation.context
        ends = context.clock.now() + min(VISIBLE_WITHIN, context.deadline.left())
        while True:
            with suppress(NotCommitted), open_source(self.store) as index:
                if index.identity == chosen.identity:
                    return
                # By the clocks at the two commits: a clock that was set back costs time, but never loads a
                # wrong version.
                created, before = index.about.get("created"), chosen.created
                newer = isinstance(created, float) and isinstance(before, float) and created > before
                if context.is_committer or newer:
                    raise self._replaced()
            self.operation.cancel.check()
            if context.is_committer or context.clock.now() >= ends:
                raise self._replaced()
            context.clock.sleep(0.05)

    def _check_missing(self, rows: Array, index: Source) -> list[int]:
        """Return the rows of the shard table that the checkpoint has; refuse others that are not optional."""
        gone = [row for row in range(len(self.table)) if rows[row] < 0]
        empty = {
            row for row in gone if (leaf := self.leaves[self.owner[row]]).is_empty() and not leaf.optional
        }
        refuse_empty(self.store.url, [self.table.specs[row].name for row in sorted(empty)], index)
        names = list(
            dict.fromkeys(
                self.table.specs[row].name
                for row in gone
                if row not in empty and not self.leaves[self.owner[row]].optional
            )
        )
        self.rows_asked = len(self.table) - len(empty)
        if names and self.request.strict:
            # All names are read for this error only, to show the nearest one to each.
            have = index.names()

            def say(name: str) -> str:
                near = nearest(name, have)
                return f"{name!r}" + (f" (nearest: {near!r})" if near else "")

            raise MissingTensors(
                f"{self.store.url} does not hold {len(names)} of the names in the state: "
                f"{listed(names, say)}.",
                hint=f"It holds {index.tensors} names; load a part with include= or exclude=, or pass "
                "strict=False to keep present values.",
                details={"missing": names[:100]},
            )
        self.missing += names
        return [row for row in range(len(self.table)) if rows[row] >= 0]

    def _take(self, wanted: ShardTable, row: int, columns: Columns, tensor: int) -> None:
        """Add a row to `wanted`, if what the checkpoint holds fits it. Raises ShapeMismatch otherwise."""
        spec, memory = self.table.specs[row], self.table.memory[row]
        kind, shape = int(columns.kind[tensor]), columns.shape_of(tensor)
        if spec.kind == OBJECT and kind == OBJECT:
            assert isinstance(memory, BytesMemory)
            # The length comes from the file, and may be forged.
            with bounded_memory(f"The object {spec.name!r} of {self.store.url}"):
                memory.resize(shape[0])
            wanted.add(spec._replace(shape=shape), whole(shape), (0, 1), True, memory)
            return
        dtype, box = int(columns.dtype[tensor]), self.table.boxes[row]
        leaf = self.leaves[self.owner[row]]
        if spec.kind == TENSOR == kind and (leaf.converts or leaf.fits):
            assert isinstance(memory, TensorMemory)
            if leaf.converts and spec.dtype != dtype:
                # Read as it is stored and converted on the way in, so never directly into its memory.
                memory = TensorMemory(memory.tensor, torch_dtype(dtype))
                spec = spec._replace(dtype=dtype)
            if leaf.fits and spec.shape != shape and len(spec.shape) == len(shape):
                self.blank.append(memory.tensor)
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
        wanted.add(spec, box, (0, 1), False, memory)

    def _decode(self) -> None:
        """Decode objects before this rank reports that it has read: one that can't be decoded fails the load
        on all ranks."""
        for row, size in self.sizes.items():
            owner, memory = self.owner[row], self.table.memory[row]
            assert isinstance(memory, BytesMemory)
            name = self.leaves[owner].name
            with bounded_memory(f"The object {name!r} of {self.store.url}"):
                self.values[owner] = objects.decode(self.prefix + memory.value(size), name)
        self.built = self.lazy.build(self.values) if self.lazy is not None else []

    # -- put it into the state --------------------------------------------------------------------

    def apply(self) -> LoadReport:
        """Put what was read into the state. Other ranks do not hear of an error here."""
        # Only now that all ranks have read: until then any rank may fail the load of all.
        give_back(self.leaves, self.filled, self.values, self.built)
        context = self.operation.context
        for finish in self.after:
            try:
                finish()
            except Exception as error:
                raise LoadFailed(
                    f"{context.title}: all was read, but load_state_dict failed on {context.who}: "
                    f"{type(error).__name__}: {error}",
                    rank=self.rank,
                    hint="Other ranks don't know of this.",
                ) from error
        return LoadReport(
            self.store.url,
            self.step,
            len(set(self.filled)),
            self.bytes_needed,
            self.bytes_read,
            self.operation.seconds(),
            tuple(self.missing),
        )


def _fitted(
    spec: TensorSpec, box: Box, memory: TensorMemory, shape: Dims
) -> tuple[TensorSpec, Box, TensorMemory]:
    """Return the part of a shard that a stored tensor of another shape fills; the rest is zeroed."""
    nothing = Box((0,) * len(shape), (0,) * len(shape))
    # A row without elements stays: the name counts as found, and nothing is read for it.
    common = box.intersect(whole(shape)) or nothing
    part = memory.tensor.detach()
    if common.volume:
        part = part[common.relative_to(box.offset).slices()]
    return spec._replace(shape=shape), common, TensorMemory(part, memory.stored)


def load(
    state_dict: Mapping[str, object],
    path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
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

    Tensors are overwritten in place, objects are replaced in their dict or list, and `load_state_dict` of
    stateful values is called. Every byte is verified. Nothing in a checkpoint is executed. All participants
    load the same version, and if one fails, all raise its error (the state may then be partly overwritten).

    state_dict: nested dict of what is to be filled; tensors of shape and dtype as they were saved, in any
        layout.
    path, checkpoint_id: the folder of one checkpoint, of Holdfast, torch DCP or megatron-core, or of a model
        that Hugging Face publishes.
    participants: ranks of the default process group that take part, ascending or not; default all. Other
        ranks must not call.
    process_group: the same, as a group of torch.distributed.
    no_dist: this process loads alone, whether or not torch.distributed is initialised.
    timeout: seconds from this call until it fails, however well it goes.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    include, exclude: shell patterns of names; `model` means everything under it.
    strict: a name that the checkpoint lacks is an error; else it keeps its value and is reported.
    options: how many threads read, among others (`holdfast.Options`).
    roster: a coordination store to use in place of torch.distributed's.

    Raises BadInput for arguments, NotCommitted if there is no checkpoint, MissingTensors, ShapeMismatch and
    CorruptCheckpoint for what is in it, RankFailed and DeadlineExceeded for other ranks.
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
    request = LoadRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=call,
        include=include,
        exclude=exclude,
        strict=strict,
        options=options or Options(),
    )
    return request.run()
