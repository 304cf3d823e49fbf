"""`async_save`: training waits only until its state is copied in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast._core.background.pending import Pending
from holdfast._core.background.queue import LANE, queue_of_this_thread
from holdfast._core.base.options import Options
from holdfast._core.base.values import Json
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import PREVIOUS, SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.store.base import Folder, Store
from holdfast._core.store.local import open_store


def async_save(
    state_dict: Mapping[str, object],
    path: Folder,
    *,
    step: int | None = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    expected: str | Iterable[str] | None = PREVIOUS,
    overwrite: bool = True,
    notes: Json = None,
    job: Job | None = None,
) -> Pending:
    """Copy the state as it is now, and save the copy in the background.

    The copy is in shared memory, which later saves reuse. A writer process of this rank, without torch,
    hashes and writes it. No rank enters a collective. If an earlier save of this thread is
    still running, this call waits for it first, and the job's `timeout` counts from its end.

    state_dict: nested dict of tensors, DTensors, `Shard`s, `PerRank`s, objects, stateful values.
    path: the folder of this checkpoint, or a store. For a store class that is not
        Holdfast's own, a thread of this process writes instead of the writer process.
    step: its number, a whole number from 0 on, or None.
    include, exclude: shell patterns of names; `model` means everything under it.
    expected: names that the save must contain, or "previous": the names in the checkpoint that it replaces.
        None: no check.
    overwrite: replace an existing checkpoint, which stays intact until the commit.
    notes: any JSON value, stored in the index.
    job: who takes part, deadlines, options such as `host_memory_budget` and `retries` (`holdfast.Job`).

    Returns a `Pending`, whose `committed()` raises the errors of the save, also those of the state, on all
    ranks. Invalid arguments raise `BadInput` here, before anything is started.
    """
    store, job = open_store(path), job_of(job)

    # Called after this thread's previous save has ended: the deadline counts from then, so the wait for the
    # previous save does not shorten it.
    def make() -> SaveJob:
        request = SaveRequest(
            store=store,
            collect=lambda rank: flatten(state_dict, rank),
            # A separate lane of messages, so that this save can't be mixed up with synchronous calls.
            call=begin_call(job).lane(LANE),
            step=step,
            include=include,
            exclude=exclude,
            expected=expected,
            overwrite=overwrite,
            grid=job.grid,
            notes=notes,
            options=job.options,
        )
        return SaveJob(request)

    return async_save_into(store, make, step, job.options)


def async_save_into(store: Store, make: Callable[[], SaveJob], step: int | None, options: Options) -> Pending:
    """Run the save job that `make` creates, after the running saves of this thread."""
    return queue_of_this_thread().save(
        make, store.url, step, budget=options.host_memory_budget, retries=options.retries
    )
