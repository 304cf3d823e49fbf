"""Why a place holds no checkpoint, in one sentence, and what to do. No torch, no NumPy."""

from __future__ import annotations

import os

from holdfast.errors import HoldfastError
from holdfast.format.names import DATA, INDEX, METADATA, SLICE, is_fetched
from holdfast.store.base import FOLDERS, Store
from holdfast.store.local import LocalStore
from holdfast.store.run_folder import all_step_folders, is_only_marked, newest_steps, step_of

_SHOWN = 5


def explain_absence(store: Store) -> tuple[str, str]:
    """Return the sentence and a hint for a place that has no index."""
    why, hint = _why(store)
    return f"{store.url} holds no committed checkpoint: {why}.", hint


def _why(store: Store) -> tuple[str, str]:
    entry = store.stat()
    if entry is None:
        return _missing(store)
    if entry.kind not in FOLDERS:
        return "it is a file, not a folder", "Give the folder that the index lies in."
    names = store.list()
    if SLICE in names:
        return (
            "it is what `holdfast fetch` took of one, or of a published model, for some ranks",
            "holdfast.load and holdfast.megatron.load read it on these ranks; else give the whole folder.",
        )
    if METADATA in names:
        if is_only_marked(store):
            return (
                f"it holds only the marker that holdfast.dcp.save leaves beside one, a {METADATA} without an "
                f"{INDEX}",
                "The index was removed or not copied; `holdfast reindex` makes one from the data files, if "
                "they are there.",
            )
        return (
            "it is one of torch DCP or megatron-core, not of Holdfast",
            f"holdfast.load reads it as it is; `holdfast import torch_dist {store.url} OUT` makes one of "
            f"Holdfast.",
        )
    if all_step_folders(store):
        return _run(store)
    if f"{DATA}/" in names:
        if any(is_fetched(name) for name in store.list(DATA)):
            return (
                "a fetch was begun here, and has not ended",
                "Run the same `holdfast fetch` again: it goes on with what is there.",
            )
        return (
            f"there are data files, but no {INDEX}, so a save failed, or is still under way",
            "`holdfast latest RUN` names the newest committed step of a run; `holdfast reindex` may recover "
            "this one.",
        )
    return f"there is no {INDEX}", "`holdfast latest RUN` names the newest committed step of a run."


def _missing(store: Store) -> tuple[str, str]:
    """Explain a folder that is not there: it may be a step of a run that has others."""
    parent, name = os.path.split(store.url)
    # The url of another kind of store is not a path whose parent could be opened.
    if isinstance(store, LocalStore) and step_of(name) is not None:
        steps = _newest(LocalStore(parent), _SHOWN)
        if steps:
            return (
                f"it does not exist; the newest committed steps in {parent} are {', '.join(map(str, steps))}",
                "It was never committed, or it was removed as an old step (keep=, `holdfast prune`).",
            )
    return "it does not exist", "Is the path right, and mounted on this host?"


def _run(store: Store) -> tuple[str, str]:
    for folder in _newest(store, 1).values():
        return (
            f"it is a run folder, whose newest committed step is {store.url}/{folder}",
            "Give a step's folder; holdfast.Checkpoints loads the newest step of a run.",
        )
    return "it is a run folder, and none of its steps is committed", "`holdfast inspect` shows what there is."


def _newest(store: Store, most: int) -> dict[int, str]:
    """Return the newest committed steps, as far as this process can see them."""
    try:
        # Steps that can't be read are left out: this explains an error, and must not replace it.
        return newest_steps(store, most)
    except HoldfastError:
        return {}
