"""`holdfast.load`: collectively into a state, or without a state, as values in this process alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from holdfast._core.base.values import check_switches
from holdfast._core.io.renamed import Rename
from holdfast._core.loading.job import run_load
from holdfast._core.loading.request import RAISE, LoadReport, LoadRequest
from holdfast._core.loading.stored_checkpoint import StoredCheckpoint
from holdfast._core.protocol.call import begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.state.flatten import flatten
from holdfast._core.state.live import State
from holdfast._core.store.base import Folder
from holdfast._core.store.local import open_store
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
) -> State: ...


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
) -> LoadReport | State:
    """Load a checkpoint into a state, in place; the layout may differ from the one that saved it.

    Tensors are overwritten in place, objects are replaced in their dict or list, and `load_state_dict` of
    stateful values is called. Every byte is verified. Nothing in a checkpoint is executed. All participants
    load the same version, and if one fails, all raise its error (the state may then be partly overwritten).

    `load(path)`, without a state, returns all values as nested dicts (names are split at dots), on this
    process alone.

    state_dict: nested dict to fill; tensors have the shapes and dtypes that were saved, in any layout.
    path: the folder, or a store, of one checkpoint of Holdfast, torch DCP or megatron-core, or of a model in
        Hugging Face's format.
    include, exclude: shell patterns of names; `model` means everything under it.
    strict: a name that is missing in the checkpoint is an error; if False, it keeps its value and is
        reported. If the checkpoint has none of the state's tensors, the load is always an error.
    cast: convert tensors to the dtypes of the state, as `Tensor.copy_` does; without a state, a dtype for all
        floating-point tensors.
    rename: maps names in the checkpoint to names in the state: a dict of names or subtrees, such as
        `{"module": "model"}` or `{"module": ""}`, or a function from name to name.
    on_shape: "raise", or "skip": a tensor of another shape keeps its value, and the report lists it.
    lazy: without a state: return tensors as `holdfast.open` does, which are read when they are indexed.
    job: who takes part, deadlines, options (`holdfast.Job`).

    Raises BadInput for invalid arguments; NotCommitted if there is no checkpoint; MissingTensors,
    ShapeMismatch and CorruptCheckpoint for its content; LoadFailed if `PerRank` values of removed ranks would
    be lost; RankFailed and DeadlineExceeded for failures of other ranks.
    """
    check_switches(lazy=lazy)
    if path is None:
        if isinstance(state_dict, Mapping):
            raise BadInput("load needs the folder of the checkpoint.", hint="holdfast.load(state, path)")
        if strict is not True or on_shape != RAISE or job is not None or cast is True:
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
    state: Any = state_dict  # `flatten` refuses anything but a dict
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
