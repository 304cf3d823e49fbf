"""`async_save`: training waits for a copy of its state in memory, and goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.background.manager import LANE, background_of_this_thread
from holdfast.background.pending import Pending
from holdfast.errors import BadInput
from holdfast.layout.grid import Grid
from holdfast.options import Options
from holdfast.protocol.call import begin_call, check_arguments, one_folder
from holdfast.roster.base import Roster
from holdfast.saving.job import SaveJob
from holdfast.saving.request import PREVIOUS, SaveRequest
from holdfast.state.flatten import flatten
from holdfast.store.base import Store
from holdfast.store.local import open_store
from holdfast.values import Json

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def async_save(
    state_dict: Mapping[str, object],
    path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    step: int | None = None,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    expected: str | Iterable[str] | None = PREVIOUS,
    overwrite: bool = True,
    grid: Grid | None = None,
    notes: Json = None,
    options: Options | None = None,
    roster: Roster | None = None,
    host_memory_budget: int | None = None,
    retries: int = 0,
) -> Pending:
    """Copy a state and save the copy in the background: the state as it is at this call.

    The copy lies in shared memory that is reused from save to save; a process of this rank's own, which
    imports no torch, hashes and writes it. No rank enters a collective. If an earlier save of this thread is
    still under way, this call waits for it first.

    host_memory_budget: bytes that the copy may take on this rank. A state that is larger is copied in waves,
        each written before the next, and this call waits for the last copy; one tensor that is larger is
        refused, with the numbers.
    retries: how often a save that failed is tried again, on all ranks, before its deadline.
    state_dict: nested dict of tensors, DTensors, `Shard`s, `PerRank`s, objects, stateful values.
    path, checkpoint_id: the folder of this checkpoint.
    step: its number, a whole number from 0 on, or None.
    participants: ranks of the default process group that take part, ascending or not; default all. Other
        ranks must not call.
    process_group: the same, as a group of torch.distributed.
    no_dist: this process saves alone, whether or not torch.distributed is initialised.
    timeout: seconds until the work in the background fails, from the end of this thread's previous save.
    stall_timeout: seconds that a rank may go without any progress before it is given up.
    include, exclude: shell patterns of names; `model` means everything under it.
    expected: names that must be in the save, or "previous": those of the checkpoint that it replaces; None:
        no such check.
    overwrite: replace a checkpoint that is there; it stays whole until the instant of commit.
    grid, notes: the layout, and any JSON value, kept in the index for whoever reads it.
    options: sizes of files, how replicas are compared (`holdfast.Options`).
    roster: a coordination store to use in place of torch.distributed's.

    Returns a `Pending`. Its `committed` raises what is wrong with a state, on all ranks. `BadInput` is raised
    here, before anything was started.
    """
    store = open_store(one_folder(path, checkpoint_id))

    # Called once this thread's previous save has ended: the deadline counts from then, so waiting for that
    # save takes none of this one's time.
    def make() -> SaveJob:
        call = begin_call(
            roster,
            no_dist=no_dist,
            participants=participants,
            process_group=process_group,
            timeout=timeout,
            stall_timeout=stall_timeout,
        )
        request = SaveRequest(
            store=store,
            collect=lambda rank: flatten(state_dict, rank),
            # Messages of its own, so that this save does not meet a synchronous call made while it goes on.
            call=call.lane(LANE),
            step=step,
            include=include,
            exclude=exclude,
            expected=expected,
            overwrite=overwrite,
            grid=grid,
            notes=notes,
            options=options or Options(),
        )
        return SaveJob(request)

    return async_save_into(store, make, step, host_memory_budget, retries)


def async_save_into(
    store: Store,
    make: Callable[[], SaveJob],
    step: int | None,
    host_memory_budget: int | None,
    retries: int,
) -> Pending:
    """Save the job that `make` begins, by this thread's own arena and writer process: a thread waits for its
    own saves only."""
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise BadInput(f"retries must be a whole number from 0 on, not {retries!r}.")
    check_arguments(host_memory_budget=host_memory_budget)
    return background_of_this_thread().save(make, store.url, step, host_memory_budget, retries)
