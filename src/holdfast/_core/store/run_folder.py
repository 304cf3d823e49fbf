"""A run folder: which steps are committed, which is the newest, which may be removed. No torch, no NumPy.

A step is a folder named `step-10` or `iter_10`, with any number of zeros before the 10. It is committed if it
holds our index, or the metadata of a checkpoint of torch DCP or megatron-core, which load as well. If several
folders have the same number, those with our index come first, then the one that was committed last.

Only folders with Holdfast's own spelling and index may be removed, if they are no links and no link in the
run folder leads to them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from itertools import islice, takewhile
from typing import NamedTuple

from holdfast._core.format.names import (
    COMMON_FILE,
    CONFIG,
    DATA,
    INDEX,
    LEFT,
    MARKER_HEAD,
    METADATA,
    REMOVED,
    TRACKER,
    TRAINER_STATE,
    is_marker,
)
from holdfast._core.store.base import FOLDERS, Entry, Folder, Kind, Store, capabilities, look_at_files
from holdfast._core.store.branches import is_left, left_behind
from holdfast._core.store.local import open_store
from holdfast.errors import BadInput, StorageError

_OTHERS = (TRAINER_STATE, CONFIG, COMMON_FILE)
"""A folder with one of these files is a checkpoint in a format that Holdfast does not load."""
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
)
"""A folder with one of these files, and a number at the end of its name, is a checkpoint: Hugging Face's
libraries write them. Without a number it may be the model that the training begins with."""
_LOADED = (INDEX, METADATA, *_WEIGHTS[:2])
"""The files of checkpoints that `holdfast.load` reads."""
LOOKED_AT = 200
"""Maximum number of folders with other names to check in a run folder without steps."""
AT_ONCE = 16
"""Steps that are looked at at once, if the newest one is not committed, as it usually is."""
_LOOKS = 2 * AT_ONCE
"""Maximum number of files that are looked at at once: a store may have a thread for each."""
STEPS = 10**18
"""Steps are below this number, which tells them from times and hashes in a folder's name."""
_STEP = re.compile(r"(?:step-|iter_)([0-9]{1,18})\Z")
_NUMBER = re.compile(r"([-_]?)([0-9]{1,18})\Z")


def step_folder(step: int, megatron: bool = False) -> str:
    """Return the name of a step's folder; megatron: as Megatron-LM names it."""
    return f"iter_{step:07d}" if megatron else f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """Return the step number in a folder's name, in either spelling and any width; None for other names."""
    match = _STEP.match(folder)
    return None if match is None else int(match[1])


def is_spelled_as_ours(folder: str) -> bool:
    """Return whether a folder name is in Holdfast's own spelling."""
    step = step_of(folder)
    return step is not None and folder in (step_folder(step), step_folder(step, megatron=True))


# -- steps that are there ---------------------------------------------------------------------


def all_step_folders(store: Store, names: list[str] | None = None) -> list[tuple[int, str]]:
    """Return step and folder of each step, committed or not, ascending; a step may have several folders.
    names: what the run folder holds, if it was just listed."""
    # One listing for the whole run; single steps are read later, and only those that matter.
    folders = (name[:-1] for name in (store.list() if names is None else names) if name.endswith("/"))
    return sorted((step, folder) for folder in folders if (step := step_of(folder)) is not None)


def step_folders(store: Store) -> dict[int, str]:
    """Return the folder of each step of a run, committed or not, ascending."""
    return {
        step: (best_of(store, folders) or Marked(folders[-1], "")).folder for step, folders in by_step(store)
    }


def committed_steps(store: Store) -> dict[int, str]:
    """Return the folder of each committed step, ascending, in any format."""
    return {step: marked.folder for step, marked in _committed(store)}


def own_steps(store: Store) -> dict[int, str]:
    """Return the folder of each step that has an index of ours, ascending."""
    return {step: marked.folder for step, marked in _committed(store) if marked.mark == INDEX}


def newest_steps(store: Store, most: int, but: Collection[int] = ()) -> dict[int, str]:
    """Return up to `most` newest committed steps, without reading older ones; steps that the run abandoned by
    resuming from an earlier one come last. but: steps to leave out."""
    steps = (found for found in _newest_first(store) if found[0] not in but)
    return {step: marked.folder for step, marked in islice(steps, most)}


def newest_own_step(store: Store, but: int) -> str | None:
    """Return the folder of the newest step that has an index of ours, without reading older ones; None if
    there is none. but: a step to leave out."""
    steps = _newest_first(store)
    return next((marked.folder for step, marked in steps if step != but and marked.mark == INDEX), None)


def steps_above(store: Store, step: int) -> dict[int, Marked]:
    """Return the committed steps above one, without reading others."""
    return dict(takewhile(lambda found: found[0] > step, _committed(store, newest_first=True)))


def latest(run: Folder) -> str | None:
    """Return the path of the newest committed step folder of a run, or None. Reads no data and needs no
    torch.

    Raises BadInput if the folder contains checkpoints, but none in a step folder.
    """
    store = open_store(run)
    for folder in newest_steps(store, 1).values():
        return store.child(folder).url
    refuse_other_checkpoints(store)
    return None


def committed_folder(store: Store, step: int) -> str | None:
    """Return the folder of one committed step, without reading the others; None if it is not committed."""
    marked = best_of(store, [folder for other, folder in all_step_folders(store) if other == step])
    return None if marked is None else marked.folder


class Marked(NamedTuple):
    """A folder with a checkpoint."""

    folder: str
    mark: str
    """The name of the file that marks it as a checkpoint."""


def by_step(store: Store, names: list[str] | None = None) -> list[tuple[int, list[str]]]:
    folders: dict[int, list[str]] = {}
    for step, folder in all_step_folders(store, names):
        folders.setdefault(step, []).append(folder)
    return list(folders.items())


def _newest_first(store: Store) -> Iterator[tuple[int, Marked]]:
    """Yield the committed steps, newest first; steps that the run abandoned come after all others."""
    names, passed = store.list(), list[tuple[int, Marked]]()
    left = left_behind(store) if LEFT in names else {}
    for step, marked in _committed(store, newest_first=True, names=names):
        if is_left(store, left, *marked):
            passed.append((step, marked))
        else:
            yield step, marked
    yield from passed


def _committed(
    store: Store, newest_first: bool = False, names: list[str] | None = None
) -> Iterator[tuple[int, Marked]]:
    """names: what the run folder holds, if it was just listed."""
    looked: list[tuple[int, list[str]]] = []
    # Again if none is committed: between the list and the look `keep=` may have removed the only one that is,
    # for a newer one.
    while (steps := by_step(store, names)) != looked:
        found = False
        for some in _batches(steps[::-1] if newest_first else steps):
            look = MarkEntries(store, [folder for _, folders in some for folder in folders])
            for step, folders in some:
                marked = best_of(store, folders, look)
                if marked is not None:
                    found = True
                    yield step, marked
        if found:
            return
        looked, names = steps, None


def _batches(steps: list[tuple[int, list[str]]]) -> Iterator[list[tuple[int, list[str]]]]:
    yield steps[:1]
    for start in range(1, len(steps), AT_ONCE):
        yield steps[start : start + AT_ONCE]


class MarkEntries:
    """The entries of the marks of some folders, looked at several at once where the store can do that."""

    def __init__(self, store: Store, folders: list[str]) -> None:
        """folders: in the order in which they are asked for; others may be, too."""
        self._store, self._folders = store, folders
        self._by_name: dict[str, tuple[list[str], Callable[[str], Entry | None]]] = {}
        """The last look at files of a name: in which folders, and its entries."""

    def __call__(self, folder: str, name: str) -> Entry | None:
        folders, look = self._by_name.get(name, ([], self._store.stat))
        if folder not in folders:
            # Only from this folder on: those before it have another mark, or are of no interest any more.
            at = self._folders.index(folder) if folder in self._folders else None
            folders = [folder] if at is None else self._folders[at : at + _LOOKS]
            look = look_at_files(self._store, [f"{one}/{name}" for one in folders])
            if at is not None:
                self._by_name[name] = folders, look
        return look(f"{folder}/{name}")


def _mark(
    store: Store,
    folder: str,
    names: Iterable[str] = (INDEX, METADATA),
    look: Callable[[str, str], Entry | None] | None = None,
) -> str | None:
    """Return the first of these files that is in a folder and makes it a checkpoint; None if there is
    none."""
    for name in names:
        # `stat`, not `open`: a step with a damaged index is still a checkpoint. A folder of that name makes
        # none.
        entry = store.stat(f"{folder}/{name}") if look is None else look(folder, name)
        if entry is None or entry.kind not in (Kind.FILE, Kind.LINK):
            continue
        if name != METADATA or not is_only_marked(store.child(folder)):
            return name
    return None


def is_only_marked(store: Store) -> bool:
    """Return whether `.metadata`, in a folder without an index, is only the marker that `holdfast.dcp.save`
    leaves beside one."""
    try:
        reader = store.open(METADATA)
    except StorageError:
        return False
    with closing(reader):
        return is_marker(reader.read(0, MARKER_HEAD))


def best_of(
    store: Store, folders: list[str], look: Callable[[str, str], Entry | None] | None = None
) -> Marked | None:
    """Choose among the folders with the same step number: return the one that counts as the step; None if
    none holds a checkpoint. look: returns the entry of a file in a folder."""
    marks = ((folder, _mark(store, folder, look=look)) for folder in folders)
    marked = [Marked(folder, mark) for folder, mark in marks if mark is not None]
    if len(marked) < 2:
        return marked[0] if marked else None

    def rank(candidate: Marked) -> tuple[bool, float, bool]:
        # Times of the storage, compared only with each other, never with the clock of a host.
        entry = store.stat(f"{candidate.folder}/{candidate.mark}")
        modified = entry.modified if entry is not None else 0.0
        return candidate.mark == INDEX, modified, is_spelled_as_ours(candidate.folder)

    return max(marked, key=rank)


# -- checkpoints that are not steps --------------------------------------------------------------


def refuse_other_checkpoints(store: Store) -> None:
    """Raise BadInput if a folder without a committed step contains other checkpoints.

    Otherwise a run would silently begin from scratch beside the checkpoint that it should continue from.
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
    other = next(other_checkpoints(store, names), None)
    if other is not None:
        folder, loads = other.folder, other.mark in _LOADED
        where = f"{store.url}/{folder}"
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


def other_checkpoints(store: Store, names: list[str]) -> Iterator[Marked]:
    """Yield folders that are checkpoints; those whose names end with the highest numbers first."""

    def number(name: str) -> tuple[int, bool]:
        match = _NUMBER.search(name)
        return (int(match[2]), bool(match[1])) if match else (-1, False)

    folders = sorted((name[:-1] for name in names if name.endswith("/")), key=number, reverse=True)
    folders = folders[:LOOKED_AT]
    look = MarkEntries(store, folders)
    for folder in folders:
        is_numbered = number(folder)[1]
        marks = (INDEX, METADATA, *_OTHERS, *(_WEIGHTS if is_numbered else ()))
        with suppress(StorageError):  # a folder that this user may not read is not a step
            try:
                mark = _mark(store, folder, marks, look)
            except StorageError:
                if not capabilities(store).at_once:
                    raise
                # It may be another one of those that were looked at at once that can't be read.
                mark = _mark(store, folder, marks, MarkEntries(store, [folder]))
            # A step that can be loaded was committed after the steps of the run were listed.
            if mark is not None and not (mark in (INDEX, METADATA) and step_of(folder) is not None):
                yield Marked(folder, mark)


# -- steps that may be removed (`holdfast._core.io.old_steps`) --------------------------------------


def removed_steps(store: Store) -> set[str]:
    """Return the folders of a run's steps that a note of a removal is about (`io.removal`): of the step, or
    of data that a save has replaced."""
    return {name.partition(".")[0] for name in store.list(REMOVED)} if capabilities(store).pins else set()


def is_linked(store: Store, folder: str) -> bool:
    """Return whether a step's folder, its data folder or its index is a link, whose target does not belong to
    this run."""
    if not capabilities(store).folders:
        return False
    entries = store.stat(folder), store.stat(f"{folder}/{DATA}"), store.stat(f"{folder}/{INDEX}")
    return any(entry is not None and entry.kind is Kind.LINK for entry in entries)


def linked_steps(store: Store) -> dict[str, str]:
    """Return the folders of steps to which links in the run folder lead (a user's `best`), each with the name
    of a link. Retention removes none of these steps."""
    found: dict[str, str] = {}
    if not capabilities(store).locks:  # only there the URL is a path
        return found
    run = os.path.realpath(store.url)
    with suppress(OSError), os.scandir(run) as entries:
        for entry in entries:
            if entry.is_symlink():
                step, _, _ = os.path.relpath(os.path.realpath(entry.path), run).partition(os.sep)
                found.setdefault(step, entry.name)
    return found
