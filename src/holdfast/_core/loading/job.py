"""The load of one rank: collect the state, choose a version, plan, read, fill the state, report.

The protocol (`protocol.core.load_steps`) drives a `LoadJob`: it calls `choose` on the committer, `read` on
all ranks, and `check` on the committer. `read` reads tensors directly into the state; `fill` then assigns
objects and newly created values.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec
import torch

from holdfast._core.base.threads import within
from holdfast._core.base.values import Json
from holdfast._core.format import objects
from holdfast._core.format.limits import bounded_memory
from holdfast._core.io.file_reader import read_into
from holdfast._core.io.renamed import Renamed
from holdfast._core.io.source import ForeignSource, Source
from holdfast._core.io.unchanged import forget, remember_loaded
from holdfast._core.layout.patterns import selector
from holdfast._core.layout.ranks import runs
from holdfast._core.layout.tensor import OBJECT
from holdfast._core.loading.boxes import are_equal
from holdfast._core.loading.filling import announce, give_back
from holdfast._core.loading.merging import Merged, merge_ranks
from holdfast._core.loading.numbers import check_number, put_exactly, taken_apart
from holdfast._core.loading.offset_exchange import OffsetExchange, exchange_offsets, put_in_place, unplaced
from holdfast._core.loading.plan import LoadPlan, plan_load
from holdfast._core.loading.request import LoadReport, LoadRequest
from holdfast._core.loading.rest import KEPT, Stored, compare, warn
from holdfast._core.loading.tied import check_same
from holdfast._core.loading.version import Version
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.protocol.core import load_steps
from holdfast._core.protocol.messages import Chosen, HaveRead, LoadRest, to_message
from holdfast._core.protocol.operation import Operation, read_state
from holdfast._core.protocol.phases import LOAD_TRANSITIONS
from holdfast._core.ready import ready
from holdfast._core.state.flatten import build_shard_table, select
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.memory import BytesMemory, CallerStreams
from holdfast._core.store.base import NotFound
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    LoadFailed,
    Replaced,
    Unplaced,
)


class LoadJob:
    """A load of this rank. The constructor collects the state; `run` reads, `fill` updates the state.

    offsets: the exchanged lengths of all ranks' shards; None in the first pass, which finds out whether they
        are needed.
    """

    def __init__(self, request: LoadRequest, offsets: OffsetExchange | None = None) -> None:
        self.request, self.store, self._offsets = request, request.store, offsets
        self.rank = request.call.rank
        self.table = ShardTable(self.rank)
        self.leaves: list[Leaf] = []
        self.owner: list[int] = []
        """For each row of `table`, the index of its leaf."""
        self.after: list[tuple[list[Leaf], Callable[[], None]]] = []
        """Functions to call after the state is filled: `load_state_dict` of stateful values."""
        self.streams = CallerStreams(self.table)
        self.plan: LoadPlan | None = None
        self.merged = Merged()
        self.stored: Stored | None = None
        """Committer: the names of the checkpoint, if unrequested ones are to be reported."""
        self.rest = LoadRest()
        self.bytes_read = 0
        self.objects: dict[int, object] = {}
        """Decoded objects, by index of the leaf."""
        self.built: list[tuple[Leaf, object]] = []
        """Leaves, each with the newly created value that replaces its own."""
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
                "cast": request.cast,
                "on_shape": request.on_shape,
                "signature": request.signature,
                # The second pass is another call: a rank that is late in the first pass must not join it.
                "lengths": offsets is not None,
            },
        )
        self.version = Version(self.store, self.operation)
        self.collect_error = read_state(self._collect, self.rank)
        """The error of collecting the state, if any. The protocol reports it to the other ranks."""
        # A shard without an offset is raised as an error (`Unplaced`), because errors reach all ranks. Every
        # rank then exchanges lengths and loads again (`run_load_once`).
        if offsets is None and self.collect_error is None:
            self.collect_error = unplaced(self.table, self.operation.context.title)

    def run(self) -> None:
        try:
            value = self.operation.run(load_steps(self.operation.context, self), self.collect_error)
            self.rest = msgspec.convert(value, ready(LoadRest))
        except BaseException as error:
            if isinstance(error, CorruptCheckpoint):  # on all ranks
                forget(self.store, self.rank)
            with suppress(HoldfastError):  # storage may be what hangs
                within(1.0, f"letting go of {self.store.url}", self.version.let_go)
            raise

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

    # -- choose a version -------------------------------------------------------------------------

    def choose(self) -> Chosen:
        """Committer: choose the version that is loaded."""
        return self.version.choose()

    # -- plan and read ----------------------------------------------------------------------------

    def read(self, chosen: Chosen) -> HaveRead:
        """Read this rank's part of the chosen version, tensors directly into the state."""
        request = self.request
        with self.version.open(chosen) as index:
            try:
                if request.rename is not None:
                    index = Renamed(index, request.rename)
                self.merged = merge_ranks(index, request, self.leaves, self.operation.tick)
                keep = [row for row, leaf in enumerate(self.owner) if leaf not in self.merged.values]
                table, owner = self.table.take(keep), [self.owner[row] for row in keep]
                self.plan = plan = plan_load(index, request, self.leaves, table, owner)
                self.operation.step = plan.step  # events have it from here on
                rows, left_out = self._asked(index, plan)
                self._read(index, plan)
                if request.options.link_unchanged:
                    remember_loaded(self.store, self.rank, index.about.get("attempt"))
            except NotFound as error:
                # An overwrite deletes the old data once its index is in place. A missing file is damage only
                # if the index is still the same.
                if self.version.is_still(chosen):
                    raise CorruptCheckpoint(
                        f"A data file of {self.store.url} is missing: {error.message}",
                        hint="Load an older step, or another copy of this one.",
                    ) from None
                raise self.version.replaced() from None
        kept = (*plan.absent, *plan.skipped)[:KEPT]
        asked = plan.rows_asked + len(self.merged.rows)
        return HaveRead(self.bytes_read, asked, plan.tensors, kept, rows, left_out)

    def _read(self, index: Source, plan: LoadPlan) -> None:
        self.operation.bytes_total = plan.reads.bytes_needed
        # Autograd is told before the first byte: a load that fails half way has changed tensors, too.
        announce(plan.wanted, [self.leaves[leaf] for leaf in plan.filled])
        self.streams.wait()  # what training has queued on the GPU still reads and writes these tensors
        with torch.no_grad():
            for tensor in plan.blank:
                tensor.detach().zero_()
        threads, progress = self.request.options.writer_threads, self.operation.progress
        read = read_into(self.store, plan.wanted, plan.columns, plan.reads, threads, progress)
        check_same(self.store, index, plan.wanted, plan.tied.unknown, self.operation.tick)
        for row, target in plan.counts.items():
            number = plan.wanted.memory[row].tensor  # type: ignore[attr-defined]
            put_exactly(plan.wanted.specs[row].name, number, target)
        # The caller's streams do not wait for copies on this thread's streams, so finish them here.
        self.streams.finish()
        self.bytes_read = read + index.bytes_read + self.merged.bytes_read
        # Decoded before this rank reports that it has read: an object that can't be decoded fails the load on
        # all ranks.
        for spec, memory, leaf in zip(plan.wanted.specs, plan.wanted.memory, plan.filled, strict=True):
            if spec.kind == OBJECT:
                assert isinstance(memory, BytesMemory)
                with bounded_memory(f"The object {spec.name!r} of {self.store.url}"):
                    data = index.object_prefix + memory.value(spec.shape[0])
                    present = self.leaves[leaf].value if leaf not in plan.numbers else None
                    value = objects.decode(data, spec.name, present)
                if leaf in plan.numbers:
                    check_number(spec, value)
                if leaf in plan.wholes:
                    parts, strict = plan.wholes[leaf], self.request.strict
                    self.objects.update(taken_apart(self.leaves, leaf, parts, value, strict))
                else:
                    self.objects[leaf] = value
        self.objects.update(plan.scalars)
        self.built = plan.lazy.build(self.objects)

    def _asked(self, index: Source, plan: LoadPlan) -> tuple[list[tuple[int, int]], list[str]]:
        """Return the rows that this rank requests, as runs, and the names that it leaves out on purpose."""
        counts, left_out = selector(self.request.patterns), list(plan.skipped)
        tells = self.request.tells_rest and not index.fetched_for
        if isinstance(index, ForeignSource):
            tells, counts, left_out = True, index.is_weight, sorted(self._left_out(index, index.tied, plan))
        # Only the committer reads the names, and only if needed: to report unrequested ones, or for the error
        # that no tensor was filled.
        asked = sorted({*plan.found.tolist(), *self.merged.rows})
        rest = tells and len(asked) < index.tensors
        if self.operation.context.is_committer and (rest or not plan.tensors[1]):
            self.stored = Stored(index.names(), counts if tells else lambda name: False)
        return list(runs(asked)), left_out

    def _left_out(self, index: Source, tied: tuple[str, str] | None, plan: LoadPlan) -> frozenset[str]:
        """Return the names of tensors that this rank leaves out on purpose."""
        # transformers loads an output layer whose values differ from the embedding's, even if the
        # configuration says that they are tied.
        if (
            tied is not None
            and self.operation.context.is_committer
            and index.find_one(tied[0]) not in plan.found
            and not index.fetched_for
            and are_equal(self.store, index, tied, self.operation.tick)
        ):
            return self.request.left_out | {tied[0]}
        return self.request.left_out

    def check(self, reports: dict[int, HaveRead]) -> Json:
        """Committer: find the names that the load does not fill or does not request.

        Raises an error if the checkpoint has names but no rank requests any, or if no tensor was filled.
        """
        assert self.plan is not None
        self.version.let_go()
        asked = self.request.may_be_empty or any(report.asked for report in reports.values())
        if self.plan.names_stored and not asked:
            raise BadInput(
                f"The load of {self.store.url}, which holds {self.plan.names_stored} names, asks for "
                "nothing: no rank has a value in its state.",
                hint="Give the values that are to be filled: a module, its state_dict(), what "
                "holdfast.get_state_dict gives, tensors.",
            )
        stored = self.stored or Stored((), lambda name: True)
        return to_message(compare(stored, reports, self.request, self.leaves))

    # -- fill the state ---------------------------------------------------------------------------

    def fill(self) -> LoadReport:
        """Put objects and created values into the state. An error here is not reported to other ranks."""
        plan, context = self.plan, self.operation.context
        assert plan is not None
        # Only after all ranks have read: until then a failure on any rank fails the load on all.
        self.objects.update(self.merged.fill(self.leaves))
        at = [*plan.filled, *self.merged.values]
        give_back(self.leaves, at, self.objects, self.built)
        filled = {id(self.leaves[leaf]) for leaf in at} | {id(leaf) for leaf, _ in self.built}
        everything = self.request.include is None and not self.request.exclude
        for leaves, finish in self.after:
            if not everything and not any(id(leaf) in filled for leaf in leaves):
                continue  # it was left out of the load
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
            plan.step,
            len(set(at)),
            plan.reads.bytes_needed,
            self.bytes_read,
            self.operation.seconds(),
            plan.missing,
            self.rest.unasked,
            plan.skipped,
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
        job.run()
    # Only loads of uneven shards pay for the second pass: most states know all their offsets.
    except Unplaced:  # raised on every rank: the offsets depend on what all ranks hold
        job = LoadJob(request, exchange_offsets(request.store, request.call, job.table, job.collect_error))
        job.run()
    report = job.fill()
    if request.call.rank == request.call.participants[0] and job.plan is not None:
        warn(request.store.url, job.rest, job.plan.names_stored)
    return report
