"""The load of one rank, from top to bottom: collect the state, choose a version, plan, read, fill, report.

`run_load_once` is the whole of it. Between the ranks, the protocol (`protocol.core.load_steps`) calls the
steps of a `LoadJob`: `choose` on the committer, `read` on all ranks, and `check` on the committer. `read`
reads tensors directly into the state; `fill` then puts the other values there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from holdfast._core.base.threads import within
from holdfast._core.base.values import Json, amount, told
from holdfast._core.format.names import PARTIAL
from holdfast._core.io.renamed import Renamed
from holdfast._core.io.unchanged import forget, remember_loaded
from holdfast._core.loading.asked import AskedRows, ask
from holdfast._core.loading.filling import give_back
from holdfast._core.loading.merging import Merged, merge_ranks
from holdfast._core.loading.offset_exchange import OffsetExchange, exchange_offsets, put_in_place, unplaced
from holdfast._core.loading.plan import LoadPlan, plan_load
from holdfast._core.loading.reading import decode_objects, read_tensors
from holdfast._core.loading.request import LoadReport, LoadRequest
from holdfast._core.loading.rest import KEPT, compare, warn
from holdfast._core.loading.version import Version
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.core import load_steps
from holdfast._core.protocol.messages import Chosen, HaveRead, LoadRest, to_message
from holdfast._core.protocol.operation import Operation
from holdfast._core.protocol.phases import LOAD_TRANSITIONS
from holdfast._core.ready import ready
from holdfast._core.state.flatten import build_shard_table, select
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import CallerStreams
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    LoadFailed,
    MissingTensors,
    Replaced,
    Unplaced,
)


def run_load(request: LoadRequest) -> LoadReport:
    """Load. Raises the error that all ranks raise; the state may then be partly overwritten.

    If the checkpoint is replaced meanwhile, all ranks begin again with the version that is there then.
    """
    while True:
        try:
            return run_load_once(request)
        except Replaced:  # raised on every rank
            if request.call.deadline.elapsed() > request.call.deadline.seconds / 2:
                raise


def run_load_once(request: LoadRequest) -> LoadReport:
    """Load as `run_load` does, but raise Replaced to a caller that can choose another checkpoint."""
    job = LoadJob(request)
    try:
        loaded, rest = job.run()
    # Only loads of uneven shards pay for the second pass: most states know all their offsets.
    except Unplaced:  # raised on every rank: the offsets depend on what all ranks hold
        offsets = exchange_offsets(request.store, request.call, job.target.table, job.collect_error)
        job = LoadJob(request, offsets)
        loaded, rest = job.run()
    # Only after all ranks have read: until then a failure on any rank fails the load on all.
    names = fill(request, job.target, loaded, job.operation)
    plan = loaded.plan
    if request.call.rank == request.call.participants[0]:
        warn(request.store.url, rest, plan.names_stored)
    return LoadReport(
        request.store.url,
        plan.step,
        names,
        plan.reads.bytes_needed,
        loaded.bytes_read,
        job.operation.seconds(),
        (*plan.missing, *loaded.lacking),
        rest.unasked,
        plan.skipped,
    )


class Target(NamedTuple):
    """The state of this rank, as a load fills it."""

    leaves: list[Leaf]
    """The selected ones; the plan adds those of states that the optimizer does not have yet."""
    table: ShardTable
    owner: list[int]
    """For each row of `table`, the index of its leaf."""
    after: list[tuple[list[Leaf], Callable[[], None]]]
    """As `Flat.after`."""
    streams: CallerStreams

    def rows_but(self, leaves: Collection[int]) -> tuple[ShardTable, list[int]]:
        """Return the rows of all but these leaves, each with its owner."""
        keep = [row for row, leaf in enumerate(self.owner) if leaf not in leaves]
        return self.table.take(keep), [self.owner[row] for row in keep]


def nothing_yet(rank: int) -> Target:
    """Return the target of a rank whose state is not read. If it can't be read, the rank still takes part, to
    report the error."""
    table = ShardTable(rank)
    return Target([], table, [], [], CallerStreams(table))


def collect(request: LoadRequest, offsets: OffsetExchange | None) -> Target:
    """Collect the state, on the caller's thread: another one reads, with other current streams."""
    rank = request.call.rank
    flat = request.collect(rank)
    leaves = select(flat.leaves, request.include, request.exclude)
    table, owner = build_shard_table(leaves, rank, request.call.participants, for_load=True)
    streams = CallerStreams(table)
    if offsets is not None:
        put_in_place(table, offsets)
    return Target(leaves, table, owner, flat.after, streams)


class Loaded(NamedTuple):
    """What this rank has read. Its tensors are in the state already."""

    plan: LoadPlan
    merged: Merged
    objects: dict[int, object]
    """Decoded objects, by index of the leaf."""
    built: list[tuple[Leaf, object]]
    """Leaves, each with the newly created value that replaces its own."""
    lacking: tuple[str, ...]
    """Names that the stored objects in which they would lie do not have. Known only once these are read."""
    bytes_read: int


class LoadJob:
    """A load of this rank. The constructor collects the state; `run` reads.

    offsets: the exchanged lengths of all ranks' shards; None in the first pass, which finds out whether they
        are needed.
    """

    def __init__(self, request: LoadRequest, offsets: OffsetExchange | None = None) -> None:
        self.request, self.target = request, nothing_yet(request.call.rank)
        # Before the state is read: a rank that hangs in user code can then be asked where it is.
        self.operation = Operation(
            "load",
            f"load of {request.store.url}",
            request.call.place or request.store.url,
            request.call,
            LOAD_TRANSITIONS,
            arguments={
                "include": request.include,
                "exclude": request.exclude,
                "strict": request.strict,
                "cast": request.cast,
                "on_shape": request.on_shape,
                "signature": request.signature,
                # The second pass is another call: a rank that is late in the first pass must not join it.
                "lengths": offsets is not None,
            },
        )
        self.version = Version(request.store, self.operation)
        self._is_partial = False
        """Whether `include=` or `exclude=` selected the names of the checkpoint."""
        self._asked: AskedRows | None = None
        self._loaded: Loaded | None = None

        def read() -> None:
            self.target = collect(request, offsets)

        self.collect_error = self.operation.read_state(read)
        """The error of collecting the state, if any. The protocol reports it to the other ranks."""
        # A shard without an offset is raised as an error (`Unplaced`), because errors reach all ranks. Every
        # rank then exchanges lengths and loads again (`run_load_once`).
        if offsets is None and self.collect_error is None:
            self.collect_error = unplaced(self.target.table, self.operation.context.title)

    def run(self) -> tuple[Loaded, LoadRest]:
        """Run the protocol. Returns what this rank has read, and what all ranks have left."""
        store = self.request.store
        try:
            value = self.operation.run(load_steps(self.operation.context, self), self.collect_error)
            assert self._loaded is not None
            return self._loaded, msgspec.convert(value, ready(LoadRest))
        except BaseException as error:
            if isinstance(error, CorruptCheckpoint):  # on all ranks
                forget(store, self.request.call.rank)
            with suppress(HoldfastError):  # storage may be what hangs
                within(1.0, f"letting go of {store.url}", self.version.let_go)
            raise

    # -- called by the protocol -------------------------------------------------------------------

    def choose(self) -> Chosen:
        """Committer: choose the version that is loaded."""
        return self.version.choose()

    def read(self, chosen: Chosen) -> HaveRead:
        """Read this rank's part of the chosen version, tensors directly into the state."""
        request, leaves, operation = self.request, self.target.leaves, self.operation
        with self._telling_partial(), self.version.open(chosen) as source:
            self._is_partial = source.about.get(PARTIAL) is True
            if request.rename is not None:
                source = Renamed(source, request.rename)
            merged = merge_ranks(source, request, leaves, operation.tick)
            plan = plan_load(source, request, leaves, *self.target.rows_but(merged.values))
            operation.step = plan.step  # events have it from here on
            asked = ask(source, request, plan, merged.rows, operation)
            read = read_tensors(source, request, plan, leaves, self.target.streams, operation)
            bytes_read = read + source.bytes_read + merged.bytes_read
            # Decoded before this rank reports that it has read: an object that can't be decoded fails the
            # load on all ranks.
            objects = decode_objects(source, request, plan, leaves)
            parts = (part for some in plan.wholes.values() for part in some)
            lacking = tuple(leaves[part].name for part in parts if part not in objects)
            self._asked = asked
            self._loaded = Loaded(plan, merged, objects, plan.lazy.build(objects), lacking, bytes_read)
            if request.options.link_unchanged:
                remember_loaded(request.store, request.call.rank, source.about.get("attempt"))
        kept = (*plan.absent, *lacking, *plan.skipped)[:KEPT]
        rows = plan.rows_asked + len(merged.rows)
        return HaveRead(bytes_read, rows, plan.tensors, kept, asked.rows, asked.left_out)

    def check(self, reports: dict[int, HaveRead]) -> Json:
        """Committer: find the names that the load does not fill or does not request.

        Raises an error if the checkpoint has names but no rank requests any, or if no tensor was filled.
        """
        assert self._loaded is not None
        assert self._asked is not None
        self.version.let_go()
        request, stored = self.request, self._loaded.plan.names_stored
        if stored and not request.may_be_empty and not any(report.asked for report in reports.values()):
            raise BadInput(
                f"The load of {request.store.url}, which holds {amount(stored, 'name')}, asks for nothing: "
                "no rank has a value in its state.",
                hint="Give the values that are to be filled: a module, its state_dict(), what "
                "holdfast.get_state_dict gives, tensors.",
            )
        with self._telling_partial():
            return to_message(compare(self._asked.stored, reports, request, self.target.leaves))

    @contextmanager
    def _telling_partial(self) -> Iterator[None]:
        """Note in a MissingTensors, for all ranks, that the names may be missing because the save left them
        out."""
        try:
            yield
        except MissingTensors as error:
            if self._is_partial:
                error.details[PARTIAL] = True
            raise


def fill(request: LoadRequest, target: Target, loaded: Loaded, operation: Operation) -> int:
    """Put objects and created values into the state. Return the number of names that the load has filled.

    An error here is not reported to other ranks.
    """
    leaves, context = target.leaves, operation.context
    objects = loaded.objects | loaded.merged.fill(leaves)
    # Of an object that was read for its parts, the parts are filled.
    every = dict.fromkeys([*loaded.plan.filled, *objects, *loaded.merged.values])
    at = [leaf for leaf in every if leaf not in loaded.plan.wholes]
    try:
        give_back(leaves, at, objects, loaded.built)
    except HoldfastError as error:
        error.message = f"{context.title}: all was read, but not all fits{context.there}: {error.message}"
        if context.there:
            error.hint = f"{error.hint} Other ranks don't know of this.".strip()
        raise
    filled = {id(leaves[leaf]) for leaf in at} | {id(leaf) for leaf, _ in loaded.built}
    everything = request.include is None and not request.exclude
    for inner, finish in target.after:
        if not everything and not any(id(leaf) in filled for leaf in inner):
            continue  # it was left out of the load
        try:
            finish()
        except Exception as error:
            raise LoadFailed(
                f"{context.title}: all was read, but load_state_dict failed{context.there}: {told(error)}",
                rank=request.call.rank,
                hint="Other ranks don't know of this." if context.there else "",
            ) from error
    return len(at)
