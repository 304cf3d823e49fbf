"""What the committer reads before the ranks write: the version that it may replace, and the expected
names."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np

from holdfast._core.base.values import Message
from holdfast._core.format.columns import Columns
from holdfast._core.format.names import INDEX, METADATA, rank_in_name
from holdfast._core.io.index_file import note_other_metadata, open_index
from holdfast._core.io.removal import Named, named_by_index
from holdfast._core.layout.patterns import selector
from holdfast._core.protocol.operation import Operation
from holdfast._core.saving.commit import Commit
from holdfast._core.saving.one_at_a_time import wait_for_publishing
from holdfast._core.saving.request import PREVIOUS, SaveRequest
from holdfast._core.store.base import Store, version_of
from holdfast.errors import BadInput, HoldfastError


def begin_commit(
    request: SaveRequest, operation: Operation, grid: Message | None, makes_folder: bool
) -> Commit:
    """Return the commit of a save, with the version that it may replace. Called before the ranks write."""
    store, deadline = request.store, request.call.deadline
    wait_for_publishing(store.url, request.title, deadline, operation.cancel.check)
    # Read once, at the beginning: the commit replaces exactly this version, or raises Conflict.
    replaced_version = version_of(store, INDEX)
    # A `.metadata` alone is a checkpoint of torch DCP's, which a save would replace as well.
    if not request.overwrite and any(version_of(store, name) is not None for name in (INDEX, METADATA)):
        raise BadInput(f"{store.url} holds a committed checkpoint already, and overwrite=False.")
    names: list[str] | None = None
    source = ""
    compared: Store | None = None
    if isinstance(request.expected, str):
        if request.expected != PREVIOUS:
            raise BadInput(f"expected={request.expected!r}: give a list of names, {PREVIOUS!r}, or None.")
        # An overwrite is compared with what it replaces, a new step of a run with the step before it.
        if replaced_version is not None:
            compared = store
        elif request.previous is not None:
            compared = request.previous()
        if compared is not None:
            names, source = _previous_names(compared), f"the checkpoint {compared.url}"
    elif request.expected is not None:
        names, source = list(request.expected), "expected="

    selected = selector((request.include, request.exclude))

    def keep(name: str) -> bool:
        owner = rank_in_name(name) if compared is not None else None
        if owner is not None and owner not in request.call.participants:
            return False  # a value of a rank that does not take part: the world is smaller now
        return selected(name)

    # Deleted only after the commit (`SaveJob.tidy`). If the index can't be read, its data stays.
    replaced = Named()
    if replaced_version is not None:
        with suppress(HoldfastError):
            replaced = named_by_index(store)
    return Commit(
        store=store,
        title=request.title,
        deadline=deadline,
        about={
            **request.about,
            "step": request.step,
            "grid": grid,
            "notes": request.notes,
            "attempt": request.label + operation.attempt,
            **note_other_metadata(store, makes_folder),
        },
        replaced_version=replaced_version,
        expected=None if names is None else list(filter(keep, names)),
        expected_from=source,
        # Called only if a name is missing: it opens the old index once more.
        last_writer=partial(_writers, compared),
        may_be_empty=request.may_be_empty,
        is_part=request.is_part,
        tick=operation.tick,
        replaced=replaced,
        before=compared,
    )


def _previous_names(store: Store) -> list[str] | None:
    """Return the names in a checkpoint, None if it can't be read: that must not prevent a good save."""
    try:
        with open_index(store) as index:
            return index.names()
    except HoldfastError:
        return None


def _writers(store: Store | None, name: str) -> list[int]:
    """Return which ranks wrote a name in a checkpoint; for an error."""
    if store is None:
        return []
    with open_index(store) as index:
        row = index.find_one(name)
        columns = index.select(np.asarray([row])) if row >= 0 else Columns()
        return sorted(set(columns.file_rank[columns.file].tolist()))
