"""`holdfast.load`: into a state, by the job of all ranks; or without one, as values of this process alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from holdfast._io.renamed import Rename
from holdfast._loading.job import run_load
from holdfast._loading.request import RAISE, LoadReport, LoadRequest
from holdfast._loading.stored_checkpoint import StoredCheckpoint
from holdfast._protocol.call import begin_call
from holdfast._protocol.job import Job, job_of
from holdfast._state.flatten import flatten
from holdfast._store.base import Folder
from holdfast._store.local import open_store
from holdfast.errors import BadInput


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
    strict: a name that the checkpoint lacks is an error; else it keeps its value and is reported. A load that
        fills no tensor at all is an error in any case.
    cast: convert tensors to the dtypes that the state has, as `Tensor.copy_` does; without a state, a
        floating-point dtype for all tensors of such.
    rename: what names of the checkpoint are called in the state: a dict of names or subtrees, as
        `{"module": "model"}` or `{"module": ""}`, or a function of one name.
    on_shape: "raise", or "skip": a tensor of another shape keeps its value, and the report lists it.
    lazy: without a state: tensors as `holdfast.open` gives them, which are read when they are indexed.
    job: who takes part, deadlines, options (`holdfast.Job`).

    Raises BadInput for arguments, NotCommitted if there is no checkpoint, MissingTensors, ShapeMismatch and
    CorruptCheckpoint for what is in it, LoadFailed for values of ranks that are gone (`PerRank`), RankFailed
    and DeadlineExceeded for other ranks.
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
        return StoredCheckpoint(state_dict, rename).nested((include, exclude), cast or None, lazy)
    if not isinstance(cast, bool):
        raise BadInput(f"With a state, cast is True or False, not {cast!r}: the state's own dtypes count.")
    if lazy:
        raise BadInput("With a state, lazy must be False: it is filled at once.")
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
