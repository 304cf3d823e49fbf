"""torch.distributed.checkpoint's functions with their signatures: `import holdfast.dcp as dcp` switches over.

Arguments that choose DCP's implementation (`use_collectives`, `async_checkpointer_type`) have no effect:
there are no collectives, and asynchronous saves always use a process. `arguments` says what each argument
of torch's writers, readers, planners and stagers does. A call with one that only torch DCP can honour goes to
torch DCP; that is logged once. Checkpoints that DCP wrote load as they are. A save also writes a `.metadata`,
by which tools of DCP find the checkpoint (`holdfast._frameworks.torch_dcp.metadata`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from holdfast._core.background.async_save import async_save_into
from holdfast._core.background.queue import LANE
from holdfast._core.base.options import Options
from holdfast._core.base.reporting import warn_once
from holdfast._core.format.names import METADATA
from holdfast._core.loading.job import run_load
from holdfast._core.loading.request import LoadRequest
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, stock
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.state.leaf import Flat
from holdfast._core.state.live import StateDict
from holdfast._core.state.structure import is_stateful
from holdfast._core.store.base import Store
from holdfast._core.store.local import open_store
from holdfast._core.torch_private import stages_in_background
from holdfast._frameworks.arguments import Function
from holdfast._frameworks.foreign_errors import of_torch, raising
from holdfast._frameworks.torch_dcp.arguments import OnlyTorch, Understood, understand
from holdfast._frameworks.torch_dcp.metadata import LazyMetadata, mark
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

__all__ = ["async_save", "load", "load_state_dict", "save", "save_state_dict"]


def _second(name: str) -> Callable[[Function], Function]:
    """Let a function take one keyword-only argument also by position, as torch DCP does."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(state_dict: StateDict, *second: object, **named: object) -> object:
            if len(second) > 1 or (second and name in named):
                raise BadInput(
                    f"holdfast.dcp.{function.__name__} takes the state and {name} by position, nothing else.",
                    hint="Name the other arguments.",
                )
            return function(state_dict, **named, **({name: second[0]} if second else {}))

        return call

    return decorate


@_second("storage_writer")
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
) -> Metadata:
    """Save as `torch.distributed.checkpoint.save` does, by `holdfast.save`.

    As in DCP, later saves into the same folder may have other names.

    objects_may_differ: where ranks have different objects under one name, save the one of the lowest rank and
        warn (DCP does so without a warning); by default that is an error.

    Returns the checkpoint's Metadata, which reads the index once it is looked at. It has the fields of a
    `SaveReport`, too.
    """
    try:
        given = understand("save", checkpoint_id, storage_writer=storage_writer, planner=planner)
    except OnlyTorch as why:
        named = {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer, "planner": planner}
        ranks = _given(process_group=process_group, no_dist=no_dist, use_collectives=use_collectives)
        theirs: Metadata = _torchs("save", why, job, objects_may_differ)(state_dict, **named, **ranks)
        return theirs
    store, job = open_store(given.folder), stock(job, process_group, no_dist)
    ours: Metadata = _Save(store, state_dict, begin_call(job), given, job.options, objects_may_differ).run()
    return ours


@_second("storage_reader")
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
    """Load a checkpoint of Holdfast or DCP in place, as `torch.distributed.checkpoint.load` does.

    A tensor of another dtype than the stored one gets the elements converted, as in DCP.
    """
    try:
        given = understand("load", checkpoint_id, storage_reader=storage_reader, planner=planner)
    except OnlyTorch as why:
        named = {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader, "planner": planner}
        ranks = _given(process_group=process_group, no_dist=no_dist)
        _torchs("load", why, job)(state_dict, **named, **ranks)
        return
    store, job = open_store(given.folder), stock(job, process_group, no_dist)
    request = LoadRequest(
        store=store,
        collect=lambda rank: flatten(state_dict, rank),
        call=begin_call(job),
        cast=True,
        strict=not given.partial,
        options=job.options,
        tells_rest=False,
        may_be_empty=not state_dict,
        lenient="planner=DefaultLoadPlanner(allow_partial_load=True)",
    )
    with _in_torchs_words():
        run_load(request)
    if planner is not None:
        planner.metadata = LazyMetadata(store)  # type: ignore[attr-defined]  # as torch leaves it there
    if isinstance(state_dict, MutableMapping):
        for key, value in [*state_dict.items()]:
            if not is_stateful(value):
                state_dict[key] = value  # as DCP does: a user's dict class may react to it


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
) -> Future[Metadata] | AsyncSaveResponse:
    """Save as `torch.distributed.checkpoint.async_save` does, by `holdfast.async_save`.

    Returns a `Pending`: a Future of the Metadata, with the fields of DCP's AsyncSaveResponse
    (`staging_completion`, `upload_completion`). With a stager that copies in the background, it returns an
    AsyncSaveResponse, as DCP does.
    """
    named = {"storage_writer": storage_writer, "planner": planner, "async_stager": async_stager}
    try:
        given = understand("async_save", checkpoint_id, **named)
    except OnlyTorch as why:
        ranks = _given(process_group=process_group, no_dist=no_dist, use_collectives=use_collectives)
        named = _given(async_checkpointer_type=async_checkpointer_type, **named)
        save_there = _torchs("async_save", why, job, objects_may_differ)
        theirs: Future[Metadata] = save_there(state_dict, checkpoint_id=checkpoint_id, **named, **ranks)
        return theirs
    store, job = open_store(given.folder), stock(job, process_group, no_dist)

    def make() -> SaveJob:
        # Begun once the previous save has ended, so that the deadline does not include that wait. The lane
        # separates its messages from those of the calls that training makes meanwhile.
        call = begin_call(job).lane(LANE)
        return _Save(store, state_dict, call, given, job.options, objects_may_differ)

    pending = async_save_into(store, make, None, job.options)
    future: Future[Any] = pending
    if not stages_in_background(async_stager):
        return future
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    return AsyncSaveResponse(pending.staging_completion, future)


def save_state_dict(
    state_dict: StateDict,
    storage_writer: object,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: object = None,
) -> Metadata:
    """Save as the deprecated `torch.distributed.checkpoint.save_state_dict` does, by `save`."""
    try:
        understand("save", None, storage_writer=storage_writer, planner=planner)
    except OnlyTorch as why:
        ranks = {"process_group": process_group, "coordinator_rank": coordinator_rank, "no_dist": no_dist}
        theirs: Metadata = _torchs("save_state_dict", why)(
            state_dict, storage_writer, planner=planner, **ranks
        )
        return theirs
    ours: Metadata = save(
        state_dict,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )
    return ours


def load_state_dict(
    state_dict: StateDict,
    storage_reader: object,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: object = None,
) -> None:
    """Load as the deprecated `torch.distributed.checkpoint.load_state_dict` does, by `load`."""
    try:
        understand("load", None, storage_reader=storage_reader, planner=planner)
    except OnlyTorch as why:
        ranks = {"process_group": process_group, "coordinator_rank": coordinator_rank, "no_dist": no_dist}
        _torchs("load_state_dict", why)(state_dict, storage_reader, planner=planner, **ranks)
        return
    load(
        state_dict,
        storage_reader=storage_reader,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
    )


def _torchs(name: str, why: OnlyTorch, job: Job | None = None, objects_may_differ: bool = False) -> Function:
    """Return torch DCP's function for a call, and log it. Raises BadInput if it would ignore an argument."""
    if job is not None or objects_may_differ:
        raise BadInput(
            why.message, hint=f"{why.hint} Or leave out job and objects_may_differ.".lstrip()
        ) from None
    warn_once(f"torch.distributed.checkpoint.{name} does this call, with collectives: {why.message}")
    from torch.distributed import checkpoint as theirs

    function: Function = getattr(theirs, name)
    return function


def _given(**named: object) -> dict[str, object]:
    """Return the arguments that differ from their defaults: an older torch lacks some of them."""
    defaults = {"no_dist": False, "use_collectives": True}
    return {name: value for name, value in named.items() if value is not defaults.get(name)}


@contextmanager
def _in_torchs_words() -> Iterator[None]:
    """Prefix errors with torch DCP's message for them, because programs search for that text."""
    try:
        yield
    except MissingTensors as error:
        names = error.details.get("missing", [])
        error.message = f"Missing key in checkpoint state_dict: {', '.join(names[:1])}. {error.message}"
        raise
    except ShapeMismatch as error:
        if "exchanged" not in error.hint:  # a tensor and an object
            error.message = f"Size mismatch between saved and current tensors. {error.message}"
        raise
    except BadInput as error:
        if "overwrite=False" in error.message:
            error.message = f"Checkpoint already exists. {error.message}"
        raise


class _Save(SaveJob):
    """A save that reads the state on construction, and writes the marker for DCP's tools after its commit."""

    def __init__(
        self,
        store: Store,
        state_dict: StateDict,
        call: Call,
        given: Understood,
        options: Options,
        objects_may_differ: bool,
    ) -> None:
        self._flat = Flat()
        super().__init__(
            SaveRequest(
                store=store,
                collect=lambda rank: self._keep(flatten(state_dict, rank)),
                call=call,
                overwrite=given.overwrite,
                options=replace(options, writer_threads=max(options.writer_threads, given.threads)),
                objects_may_differ=objects_may_differ,
                may_be_empty=not state_dict,
                # After the commit, because tools of DCP take a folder with `.metadata` for a checkpoint.
                mark=lambda: mark(store, self._flat, given.save_id),
                marks=(METADATA,),
            )
        )

    def _keep(self, flat: Flat) -> Flat:
        self._flat = Flat(containers=flat.containers)
        return flat

    def run(self, pause_collector: bool = True) -> Any:
        with _in_torchs_words():
            report = super().run(pause_collector)
        return LazyMetadata(self.store, report)
