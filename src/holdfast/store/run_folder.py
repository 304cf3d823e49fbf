"""A run folder: which steps are committed, which is the newest, which may go. No torch, no NumPy.

A step is a folder named `step-10` or `iter_10`, with any number of zeros before the 10. It is committed if it
holds our index, or the metadata of a checkpoint of torch DCP or megatron-core, which load as well. Of several
folders of one number, one with our index goes before another format's, then the one that was committed last.

What may be removed is less: folders that are named as Holdfast names them, hold our index, and are no links.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice
from typing import NamedTuple, TypeVar

from holdfast.errors import BadInput, HoldfastError, StorageError
from holdfast.format.marker import MARKER_HEAD, is_marker
from holdfast.format.names import COMMON_FILE, CONFIG, DATA, INDEX, METADATA, TRACKER, TRAINER_STATE
from holdfast.store.base import FOLDERS, Kind, Store
from holdfast.store.local import open_store

log = logging.getLogger("holdfast")
T = TypeVar("T")
_OTHERS = (TRAINER_STATE, CONFIG, COMMON_FILE)
"""Files by which folders are checkpoints of formats that Holdfast does not load."""
LOOKED_AT = 200
"""Folders without a step's name that are looked into, in a run folder without a step."""
STEPS = 10**18
"""Steps are below this number, so that a folder's name tells them from times and hashes."""
_STEP = re.compile(r"(?:step-|iter_)([0-9]{1,18})\Z")
_NUMBER = re.compile(r"([0-9]{1,18})\Z")
_warned: set[str] = set()
"""Linked steps of which was said that they stay."""


def step_folder(step: int, megatron: bool = False) -> str:
    """The name of a step's folder; megatron: as Megatron-LM names it."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < STEPS:
        raise BadInput(f"step must be a whole number from 0 on, below {STEPS:.0e}, not {step!r}.")
    return f"iter_{step:07d}" if megatron else f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """The step that a folder's name stands for, in either spelling and any width."""
    match = _STEP.match(folder)
    return None if match is None else int(match[1])


def is_spelled_as_ours(folder: str) -> bool:
    """Is a folder named as Holdfast names a step's?"""
    step = step_of(folder)
    return step is not None and folder in (step_folder(step), step_folder(step, megatron=True))


# -- which are there --------------------------------------------------------------------------


def all_step_folders(store: Store) -> list[tuple[int, str]]:
    """Step and folder, committed or not, ascending; a step may have several folders."""
    # One listing for the whole run. What is asked of a single step is asked later, of those that matter.
    names = [name[:-1] for name in store.list() if name.endswith("/")]
    return sorted((step, name) for name in names if (step := step_of(name)) is not None)


def step_folders(store: Store) -> dict[int, str]:
    """The folder of each step of a run, committed or not, ascending."""
    return {
        step: (_best(store, folders) or _Marked(folders[-1], "")).folder for step, folders in _by_step(store)
    }


def committed_steps(store: Store) -> dict[int, str]:
    """The folder of each committed step, ascending, of whichever format."""
    return {step: marked.folder for step, marked in _committed(store)}


def own_steps(store: Store) -> dict[int, str]:
    """The folder of each step that has an index of ours, ascending."""
    return {step: marked.folder for step, marked in _committed(store) if marked.mark == INDEX}


def newest_steps(store: Store, most: int) -> dict[int, str]:
    """The newest committed steps, at most so many, descending; older ones are not looked at."""
    return {step: marked.folder for step, marked in islice(_committed(store, newest_first=True), most)}


def committed_folder(store: Store, step: int) -> str | None:
    """The folder of one committed step; the others are not looked at."""
    marked = _best(store, [folder for other, folder in all_step_folders(store) if other == step])
    return None if marked is None else marked.folder


def latest(run: str | os.PathLike[str]) -> str | None:
    """The folder of the newest committed step of a run, or None. Reads no data and needs no torch.

    Raises BadInput if there are checkpoints, but none that is a step's.
    """
    store = open_store(run)
    for folder in newest_steps(store, 1).values():
        return store.child(folder).url
    refuse_other_checkpoints(store)
    return None


class _Marked(NamedTuple):
    folder: str
    mark: str
    """The file by which it is a checkpoint."""


def _by_step(store: Store) -> list[tuple[int, list[str]]]:
    folders: dict[int, list[str]] = {}
    for step, folder in all_step_folders(store):
        folders.setdefault(step, []).append(folder)
    return list(folders.items())


def _committed(store: Store, newest_first: bool = False) -> Iterator[tuple[int, _Marked]]:
    steps = _by_step(store)
    for step, folders in reversed(steps) if newest_first else steps:
        marked = _best(store, folders)
        if marked is not None:
            yield step, marked


def _mark(store: Store, folder: str, names: Iterable[str] = (INDEX, METADATA)) -> str | None:
    """The first of these files that is in a folder: that by which it is a checkpoint."""
    for name in names:
        # By `stat`, not by opening it: a damaged index makes a step a checkpoint all the same. A folder of
        # that name does not.
        entry = store.stat(f"{folder}/{name}")
        if entry is None or entry.kind not in (Kind.FILE, Kind.LINK):
            continue
        if name != METADATA or not is_only_marked(store.child(folder)):
            return name
    return None


def is_only_marked(store: Store) -> bool:
    """Is the `.metadata` in a folder without an index no checkpoint's, but what `holdfast.dcp.save` leaves
    beside one?"""
    try:
        reader = store.open(METADATA)
    except StorageError:
        return False
    with closing(reader):
        return is_marker(reader.read(0, MARKER_HEAD))


def _best(store: Store, folders: list[str]) -> _Marked | None:
    """Which of several folders of one step is its checkpoint."""
    marked = [_Marked(folder, mark) for folder in folders if (mark := _mark(store, folder)) is not None]
    if len(marked) < 2:
        return marked[0] if marked else None

    def rank(candidate: _Marked) -> tuple[bool, float, bool]:
        # Times of the storage, compared with each other only; no clock of a host comes into it.
        entry = store.stat(f"{candidate.folder}/{candidate.mark}")
        modified = entry.modified if entry is not None else 0.0
        return candidate.mark == INDEX, modified, is_spelled_as_ours(candidate.folder)

    return max(marked, key=rank)


# -- what is no step -----------------------------------------------------------------------------


def refuse_other_checkpoints(store: Store) -> None:
    """Of a folder without a committed step: raise BadInput if there are checkpoints in it all the same.

    Else a run would begin anew, without a word, beside what it should go on from.
    """
    entry = store.stat()
    if entry is None:
        return
    if entry.kind not in FOLDERS:
        raise BadInput(f"{store.url} is a file, not a folder.", hint="Give the folder that steps lie in.")
    names = store.list()
    if INDEX in names or (METADATA in names and not is_only_marked(store)):
        raise BadInput(
            f"{store.url} is a checkpoint, not a run folder.",
            hint=f"Give the folder that its steps lie in, or load it by holdfast.load(state, {store.url!r}).",
        )
    folder = next(_others(store, names), None)
    if folder is not None:
        where = f"{store.url}/{folder}"
        loads = _mark(store, folder) is not None
        raise BadInput(
            f"{store.url} has no step-<number> or iter_<number> folder with a checkpoint, but {folder!r} in "
            f"it is one" + ("." if loads else ", of a format that Holdfast does not load."),
            hint=f"Load it by holdfast.load(state, {where!r}), or give an empty folder to begin anew."
            if loads
            else "Give an empty folder to begin anew.",
        )
    if TRACKER in names:
        raise BadInput(
            f"{store.url} has no committed step, but a {TRACKER}, so a run of Megatron-LM or of a framework "
            "built on it has checkpoints there, in a format or place that Holdfast does not know.",
            hint="Load one by holdfast.load(state, folder), or give an empty folder to begin anew.",
        )


def _others(store: Store, names: list[str]) -> Iterator[str]:
    """Folders that are checkpoints; those whose names end with the highest numbers first."""

    def number(name: str) -> int:
        match = _NUMBER.search(name)
        return int(match[1]) if match else -1

    folders = sorted((name[:-1] for name in names if name.endswith("/")), key=number, reverse=True)
    for folder in folders[:LOOKED_AT]:
        with suppress(StorageError):  # a folder that this user may not look into is no step's
            mark = _mark(store, folder, (INDEX, METADATA, *_OTHERS))
            # A step that loads was committed since the run's steps were looked at.
            if mark is not None and not (mark in (INDEX, METADATA) and step_of(folder) is not None):
                yield folder


# -- which may go ------------------------------------------------------------------------------


def is_linked(store: Store, folder: str) -> bool:
    """Is a step's folder, or its data folder, a link? What that leads to is not this run's to delete."""
    entries = store.stat(folder), store.stat(f"{folder}/{DATA}")
    return any(entry is not None and entry.kind is Kind.LINK for entry in entries)


def removable_steps(store: Store) -> dict[int, str]:
    """The folder of each committed step that this run made, ascending."""
    removable: dict[int, str] = {}
    for step, folder in own_steps(store).items():
        if not is_spelled_as_ours(folder):
            continue
        if not is_linked(store, folder):
            removable[step] = folder
        elif (where := f"{store.url}/{folder}") not in _warned:
            _warned.add(where)
            log.warning(
                "%s is a link, or its data folder is one; it is not counted, and never removed.", where
            )
    return removable


def retire(store: Store, keep: int | None, saved: int, damaged: Collection[int] = ()) -> None:
    """Remove what `keep` leaves no room for; never the step that was just saved.

    damaged: steps that a load has passed over. They take no good step's place, and stay for whoever looks
        into it.
    """
    if keep is None:
        return
    removable = {step: folder for step, folder in removable_steps(store).items() if step not in damaged}
    for step in surplus(removable, keep):
        # An older step that was saved once more may be beyond the newest `keep`: it stays
        # until the next save.
        if step != saved:
            with suppress(HoldfastError):  # the next save tries again
                remove_step(store, removable[step])


def remove_step(store: Store, folder: str) -> bool:
    """Delete a step: its index first, so that it stops being a checkpoint before it loses data. Is it gone?

    A step that is a link, or whose data folder is one, stays as it is.
    """
    if is_linked(store, folder):
        return False
    names = store.list(folder)
    for name in (
        METADATA,
        INDEX,
    ):  # beside an index the metadata is a mark for other tools, and means nothing without it
        if name in names:
            store.delete(f"{folder}/{name}")
    for name in store.list(f"{folder}/{DATA}"):
        store.delete(f"{folder}/{DATA}/{name}")
    store.delete(f"{folder}/{DATA}")
    # A folder that somebody has put there stays, and with it the step's.
    for name in store.list(folder):
        if not name.endswith("/"):
            store.delete(f"{folder}/{name}")
    return store.child(folder).remove()


def surplus(steps: Iterable[T], keep: int | None) -> list[T]:
    """Committed steps, or their folders, beyond the newest `keep`, of ascending ones."""
    ascending = list(steps)
    return [] if keep is None else ascending[: max(len(ascending) - keep, 0)]
