"""The load of one rank: collect the state, choose a version, plan, read, fill the state, report.

The protocol (`protocol.core.load_steps`) drives a `LoadJob`: it calls `choose` on the committer, `read` on
all ranks, and `check` on the committer. `fill` then puts into the state what is not there yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, overload

import torch

from holdfast._format import objects
from holdfast._format.limits import bounded_memory
from holdfast._io.file_reader import read_into
from holdfast._io.open_checkpoint import open_source
from holdfast._io.renamed import Rename, Renamed
from holdfast._io.source import ForeignSource, Source
from holdfast._io.unchanged import forget, remember_loaded
from holdfast._layout.tensor import OBJECT, listed
from holdfast._loading.boxes import are_equal
from holdfast._loading.filling import announce, give_back
from holdfast._loading.offset_exchange import OffsetExchange, exchange_offsets, put_in_place, unplaced
from holdfast._loading.plan import LoadPlan, plan_load
from holdfast._loading.request import RAISE, LoadReport, LoadRequest
from holdfast._loading.stored_checkpoint import StoredCheckpoint
from holdfast._loading.unasked import Asked
from holdfast._plan.shard_table import ShardTable
from holdfast._protocol.call import begin_call
from holdfast._protocol.core import load_steps
from holdfast._protocol.job import Job, job_of
from holdfast._protocol.messages import Chosen, HaveRead
from holdfast._protocol.operation import Operation, read_state
from holdfast._protocol.phases import LOAD_TRANSITIONS
from holdfast._state.flatten import build_shard_table, flatten, select
from holdfast._state.leaf import Leaf
from holdfast._state.memory import BytesMemory, CallerStreams
from holdfast._store.base import VISIBLE_WITHIN, Folder, NotFound
from holdfast._store.local import open_store
from holdfast._store.pins import Pin
from holdfast._threads import within
from holdfast.errors import (
    BadInput,
    CorruptCheckpoint,
    HoldfastError,
    LoadFailed,
    NotCommitted,
    Replaced,
    Unplaced,
)


class LoadJob:
    """A load of this rank. It collects the state at once; `run` reads, `fill` puts the result into the state.

    offsets: the exchanged lengths of all ranks' shards; None in the first pass, which finds out whether they
        are needed.
    """

    def __init__(self, request: LoadRequest, offsets: OffsetExchange | None = None) -> None:
        self.request, self.store, self._offsets = request, request.store, offsets
        self.rank = request.call.rank
        self.table = ShardTable(self.rank)
        self.leaves: list[Leaf] = []
        self.owner: list[int] = []
        """Per row of `table`, its leaf."""
        self.after: list[Callable[[], None]] = []
        """Functions to call once all is in the state: `load_state_dict` of stateful values."""
        self.streams = CallerStreams(self.table)
        self.plan: LoadPlan | None = None
        self.asked: Asked | None = None
        """What is asked for of a published model."""
        self.bytes_read = 0
        self.objects: dict[int, object] = {}
        """Objects that were read, by leaf."""
        self.built: list[tuple[Leaf, object]] = []
        """Leaves, and the created values that take their place."""
        self._pin: Pin | None = None
        """On the committer: keeps the checkpoint until all ranks have read it."""
        self._opened = ExitStack()
        self._source: Source | None = None
        """On the committer: the version that it chose, open until it has read it."""
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
        self.collect_error = read_state(self._collect, self.rank)
        """The error of collecting the state, if any. The protocol reports it to the other ranks."""
        # A shard without an offset is raised as an error (`Unplaced`), because errors reach all ranks. Every
        # rank then exchanges lengths and loads again (`run_load_once`).
        if offsets is None and self.collect_error is None:
            self.collect_error = unplaced(self.table, self.operation.context.title)

    def run(self) -> None:
        try:
            self.operation.run(load_steps(self.operation.context, self), self.collect_error)
        except BaseException as error:
            if isinstance(error, CorruptCheckpoint):  # on all ranks
                forget(self.store, self.rank)
            with suppress(HoldfastError):  # storage may be what hangs
                within(1.0, f"letting go of {self.store.url}", self._let_go)
            raise

    def _let_go(self) -> None:
        self._opened.close()
        if self._pin is not None:
            self._pin.close()

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
        # Pinned on one rank only, and until all have read: file servers search a list of the locks of a file.
        self._pin = Pin(self.store)
        try:
            self._source = index = self._opened.enter_context(open_source(self.store))
            self.operation.cancel.check()  # the caller may have gone on without this thread
            return Chosen(index.identity, index.about.get("created"))
        except BaseException:
            self._let_go()
            raise

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

    def _open(self, chosen: Chosen) -> Source:
        """Open the version that the committer chose, as soon as it is visible here; a network file system may
        show it late. Raises Replaced if there is a newer version."""
        if self._source is not None:
            return self._source
        context = self.operation.context
        ends = context.clock.now() + min(VISIBLE_WITHIN, context.deadline.left())
        while True:
            with suppress(NotCommitted):
                index = self._opened.enter_context(open_source(self.store))
                if index.identity == chosen.identity:
                    return index
                # By the clocks at the two commits: a clock that was set back costs time, but never loads a
                # wrong version.
                created, before = index.about.get("created"), chosen.created
                if isinstance(created, float) and isinstance(before, float) and created > before:
                    raise self._replaced()
                self._opened.close()
            self.operation.cancel.check()
            if context.clock.now() >= ends:
                raise self._replaced()
            context.clock.sleep(0.05)

    # -- plan and read ----------------------------------------------------------------------------

    def read(self, chosen: Chosen) -> HaveRead:
        """Read this rank's part of the chosen version, tensors directly into the state."""
        request = self.request
        with self._opened:
            index = self._open(chosen)
            try:
                if request.rename is not None:
                    index = Renamed(index, request.rename)
                self.plan = plan = plan_load(index, request, self.leaves, self.table, self.owner)
                self.operation.step = plan.step  # events have it from here on
                if isinstance(index, ForeignSource):
                    left_out = self._left_out(index, index.tied, plan)
                    names = index.names()
                    self.asked = Asked(self.store.url, names, plan.found, left_out, index.is_weight)
                self._read(index, plan)
                if request.options.link_unchanged:
                    remember_loaded(self.store, self.rank, index.about.get("attempt"))
            except NotFound as error:
                # An overwrite deletes the old data once its index is in place. A missing file is damage only
                # if the index is still the same.
                if self._still(chosen.identity):
                    raise CorruptCheckpoint(
                        f"A data file of {self.store.url} is missing: {error.message}",
                        hint="Load an older step, or another copy of this one.",
                    ) from None
                raise self._replaced() from None
        return HaveRead(self.bytes_read, plan.rows_asked)

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
        # The caller's streams do not wait for copies on this thread's streams, so finish them here.
        self.streams.finish()
        self.bytes_read = read + index.bytes_read
        # Decoded before this rank reports that it has read: an object that can't be decoded fails the load on
        # all ranks.
        for spec, memory, leaf in zip(plan.wanted.specs, plan.wanted.memory, plan.filled, strict=True):
            if spec.kind == OBJECT:
                assert isinstance(memory, BytesMemory)
                with bounded_memory(f"The object {spec.name!r} of {self.store.url}"):
                    data = index.object_prefix + memory.value(spec.shape[0])
                    self.objects[leaf] = objects.decode(data, spec.name, self.leaves[leaf].value)
        self.built = plan.lazy.build(self.objects)

    def _left_out(self, index: Source, tied: tuple[str, str] | None, plan: LoadPlan) -> frozenset[str]:
        """Return the tensors that this rank does not ask for on purpose."""
        # transformers takes an output that is not the embedding, whatever the configuration says.
        if (
            tied is not None
            and self.operation.context.is_committer
            and index.find_one(tied[0]) not in plan.found
            and not index.fetched_for
            and are_equal(self.store, index, tied, self.operation.tick)
        ):
            return self.request.left_out | {tied[0]}
        return self.request.left_out

    def check(self, reports: dict[int, HaveRead]) -> None:
        """Committer: refuse a load in which no rank asks for anything, though the checkpoint holds
        something."""
        assert self._pin is not None
        assert self.plan is not None
        self._pin.close()
        asked = self.request.may_be_empty or any(report.asked for report in reports.values())
        if self.plan.names_stored and not asked:
            raise BadInput(
                f"The load of {self.store.url}, which holds {self.plan.names_stored} names, asks for "
                "nothing: no rank has a value in its state.",
                hint="Give the values that are to be filled: a module, its state_dict(), what "
                "holdfast.get_state_dict gives, tensors.",
            )

    # -- fill the state ---------------------------------------------------------------------------

    def fill(self, unasked: tuple[str, ...] = ()) -> LoadReport:
        """Put objects and created values into the state. Other ranks do not hear of an error here."""
        plan, context = self.plan, self.operation.context
        assert plan is not None
        # Only now that all ranks have read: until then any rank may fail the load of all.
        give_back(self.leaves, plan.filled, self.objects, self.built)
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
            plan.step,
            len(set(plan.filled)),
            plan.reads.bytes_needed,
            self.bytes_read,
            self.operation.seconds(),
            plan.missing,
            unasked,
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
    unasked = job.asked.by_none(request.call) if job.asked is not None else ()
    refused = [name for name in unasked if not request.may_be_left(name)]
    if refused:  # on all ranks
        raise LoadFailed(
            f"No rank asks for {len(refused)} weights of {request.store.url}: {listed(refused)}.",
            hint="Build the model with all that is published; another strict= of "
            "holdfast.megatron.load, or install(huggingface=False), leaves such weights out.",
            details={"unasked": refused[:100]},
        )
    return job.fill(unasked)


@overload
def load(
    state_dict: Mapping[str, object],
    path: Folder,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    rename: Rename | None = None,
    on_shape: str = RAISE,
    job: Job | None = None,
) -> LoadReport: ...


@overload
def load(
    state_dict: Folder,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    cast: bool | torch.dtype = False,
    rename: Rename | None = None,
    lazy: bool = False,
) -> dict[str, Any]: ...


def load(
    state_dict: Mapping[str, object] | Folder,
    path: Folder | None = None,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    strict: bool = True,
    cast: bool | torch.dtype = False,
    rename: Rename | None = None,
    on_shape: str = RAISE,
    lazy: bool = False,
    job: Job | None = None,
) -> LoadReport | dict[str, Any]:
    """Load a checkpoint into a state, in place; the layout may differ from the one that saved it.

    Tensors are overwritten in place, objects are replaced in their dict or list, and `load_state_dict` of
    stateful values is called. Every byte is verified. Nothing in a checkpoint is executed. All participants
    load the same version, and if one fails, all raise its error (the state may then be partly overwritten).

    `load(path)`, without a state, returns all values as nested dicts, a dict for each part of a name between
    dots, on this process alone.

    state_dict: nested dict of what is to be filled; tensors of shape and dtype as they were saved, in any
        layout.
    path: the folder, or a store, of one checkpoint, of Holdfast, torch DCP or megatron-core, or of a model
        that Hugging Face publishes.
    include, exclude: shell patterns of names; `model` means everything under it.
    strict: a name that the checkpoint lacks is an error; else it keeps its value and is reported.
    cast: convert tensors to the dtypes that the state has, as `Tensor.copy_` does; without a state, a
        floating-point dtype for all tensors of such.
    rename: what names of the checkpoint are called in the state: a dict of names or subtrees, as
        `{"module": "model"}` or `{"module": ""}`, or a function of one name.
    on_shape: "raise", or "skip": a tensor of another shape keeps its value, and the report lists it.
    lazy: without a state: tensors as `holdfast.open` gives them, which are read when they are indexed.
    job: who takes part, deadlines, options (`holdfast.Job`).

    Raises BadInput for arguments, NotCommitted if there is no checkpoint, MissingTensors, ShapeMismatch and
    CorruptCheckpoint for what is in it, RankFailed and DeadlineExceeded for other ranks.
    """
    if path is None:
        if isinstance(state_dict, Mapping):
            raise BadInput("load needs the folder of the checkpoint.", hint="holdfast.load(state, path)")
        if not strict or on_shape != RAISE or job is not None or cast is True:
            raise BadInput(
                "Without a state, load takes no strict, on_shape or job, and cast is a dtype: it returns "
                "what is stored, on this process alone.",
                hint="holdfast.load(state, path) fills a state.",
            )
        # Not closed here: tensors that are read later need it, and it is closed with the last of them.
        checkpoint = StoredCheckpoint(state_dict, rename)
        return checkpoint.nested((include, exclude), None if isinstance(cast, bool) else cast, lazy)
    if lazy or not isinstance(cast, bool):
        raise BadInput(
            f"With a state, cast is True or False and lazy is False, not {cast!r} and {lazy!r}: the state's "
            "own dtypes count, and it is filled at once."
        )
    store, job = open_store(path), job_of(job)
    state: Any = state_dict  # what is no dict of values is refused by `flatten`
    request = LoadRequest(
        store=store,
        collect=lambda rank: flatten(state, rank),
        call=begin_call(job),
        include=include,
        exclude=exclude,
        strict=strict,
        cast=cast,
        rename=rename,
        on_shape=on_shape,
        options=job.options,
    )
    return run_load(request)
