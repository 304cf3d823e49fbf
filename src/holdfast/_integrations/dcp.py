"""torch.distributed.checkpoint's functions with their signatures: `import holdfast.dcp as dcp` switches over.

Arguments that choose DCP's implementation (`use_collectives`, `async_checkpointer_type`) have no effect:
there are no collectives, and asynchronous saves always use a process. `dcp_arguments` says what each argument
of torch's writers, readers, planners and stagers does; those with code of their own are refused with one
sentence. Checkpoints that DCP wrote load as they are. A save also writes a `.metadata`, by which tools of DCP
find the checkpoint (`holdfast._integrations.dcp_metadata`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast._background.async_save import async_save_into
from holdfast._background.pending import Pending
from holdfast._background.queue import LANE
from holdfast._integrations.dcp_arguments import Understood, understand
from holdfast._integrations.dcp_metadata import Paths, mark, paths_of
from holdfast._integrations.foreign_errors import of_torch, raising
from holdfast._loading.job import run_load
from holdfast._loading.request import LoadRequest
from holdfast._options import Options
from holdfast._protocol.call import Call, begin_call
from holdfast._protocol.job import Job, stock
from holdfast._saving.job import SaveJob, SaveReport
from holdfast._saving.request import SaveRequest
from holdfast._state.flatten import flatten
from holdfast._state.leaf import Flat
from holdfast._state.live import StateDict
from holdfast._store.base import Store
from holdfast._store.local import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["async_save", "load", "save"]


@raising(of_torch)
def save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    objects_may_differ: bool = False,
    job: Job | None = None,
) -> SaveReport:
    """Save as `torch.distributed.checkpoint.save` does, by `holdfast.save`.

    As in DCP, later saves into the same folder may have other names.

    objects_may_differ: where ranks have different objects under one name, save the one of the lowest rank and
        warn (DCP does so without a warning); by default that is an error.
    """
    given = understand("save", checkpoint_id, storage_writer=storage_writer, planner=planner)
    store, job = open_store(given.folder), stock(job, process_group, no_dist)
    return _reading(store, state_dict, begin_call(job), given, job.options, objects_may_differ).run()


@raising(of_torch)
def load(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    job: Job | None = None,
) -> None:
    """Load a checkpoint of Holdfast or DCP in place, as `torch.distributed.checkpoint.load` does."""
    given = understand("load", checkpoint_id, storage_reader=storage_reader, planner=planner)
    store, job = open_store(given.folder), stock(job, process_group, no_dist)
    request = LoadRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=begin_call(job),
        strict=not given.partial,
        options=job.options,
        lenient="planner=DefaultLoadPlanner(allow_partial_load=True)",
    )
    run_load(request)


@raising(of_torch)
def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: object = None,
    async_stager: object = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    objects_may_differ: bool = False,
    job: Job | None = None,
) -> Pending:
    """Save as `torch.distributed.checkpoint.async_save` does, by `holdfast.async_save`.

    The returned object has the methods of the future that DCP returns (`result`, `done`, `exception`,
    `add_done_callback`), and the fields of its AsyncSaveResponse (`staging_completion`, `upload_completion`).
    """
    given = understand(
        "async_save", checkpoint_id, storage_writer=storage_writer, planner=planner, async_stager=async_stager
    )
    store, job = open_store(given.folder), stock(job, process_group, no_dist)

    def make() -> SaveJob:
        # Begun once the previous save has ended, so that the deadline does not include that wait. The lane
        # separates its messages from those of the calls that training makes meanwhile.
        call = begin_call(job).lane(LANE)
        return _reading(store, state_dict, call, given, job.options, objects_may_differ)

    return async_save_into(store, make, None, job.options)


def _reading(
    store: Store,
    state_dict: StateDict,
    call: Call,
    given: Understood,
    options: Options,
    objects_may_differ: bool,
) -> SaveJob:
    """Make a save that reads the state now, and writes the marker for tools of DCP after its commit."""
    paths: Paths = {}

    def collect(rank: int) -> Flat:
        if isinstance(state_dict, Mapping):  # not a module by itself
            paths.update(paths_of(state_dict))
        return flatten(state_dict, rank)

    request = SaveRequest(
        store=store,
        collect=collect,
        call=call,
        overwrite=given.overwrite,
        options=replace(options, writer_threads=max(options.writer_threads, given.threads)),
        objects_may_differ=objects_may_differ,
        # After the commit, because tools of DCP take a folder with `.metadata` for a checkpoint.
        after=lambda: mark(store, paths),
    )
    return SaveJob(request)
