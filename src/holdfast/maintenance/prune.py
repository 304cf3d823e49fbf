"""Sweep what no index names, and old steps if asked; never what may still be needed.

What keeps this safe:
- a folder is listed before its index is read, so a file that is committed in between is named;
- what no index names goes only if the youngest such file of its folder is old enough: ranks
  of one running save finish at different times, and all of its files must stay;
- a step whose index can't be read is left as it is: its files may be all that is left of it, and
  it does not count as one of the newest either;
- links are not followed, only names that Holdfast gives are touched, and only folders that are named as it
  names a step's go;
- what a folder of another format's checkpoint holds stays.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec

from holdfast.errors import BadInput, HoldfastError, NotCommitted
from holdfast.format.names import DATA, INDEX, METADATA, is_named_by_save
from holdfast.io.index_file import open_index
from holdfast.maintenance.target import Place
from holdfast.store.base import FOLDERS, Store
from holdfast.store.local import open_store
from holdfast.store.publishing import HIDDEN
from holdfast.store.run_folder import all_step_folders, is_linked, is_spelled_as_ours, remove_step, surplus

HOUR = 3600.0


class Removed(msgspec.Struct, frozen=True):
    """A file or step that went, or would go."""

    path: str
    """Relative to the run folder."""
    why: str
    bytes: int


class Skipped(msgspec.Struct, frozen=True):
    """What was left alone although no index names it, or although it is old."""

    path: str
    why: str


class Pruned(msgspec.Struct, frozen=True):
    """What a sweep did, or would do."""

    path: str
    dry_run: bool
    removed: tuple[Removed, ...]
    skipped: tuple[Skipped, ...]
    bytes_freed: int
    kept: tuple[int, ...]
    """Committed steps that stay."""


class _Left(NamedTuple):
    """A file that no index names."""

    path: str
    size: int
    modified: float


class _Sweep:
    def __init__(self, store: Store, older_than: float, dry_run: bool) -> None:
        self.store, self.dry_run = store, dry_run
        # The one place where times of files meet a clock of this host (docs/failure-model.md, Clocks).
        self.before = time.time() - older_than
        self.removed: list[Removed] = []
        self.skipped: list[Skipped] = []
        self.good: dict[str, int] = {}
        """Folders of the committed steps that can be read."""
        self.busy: set[str] = set()

    def top(self) -> None:
        """What was never put in place in the run folder itself."""
        for name in self.store.list():
            found = self._stat(name) if name.startswith(HIDDEN) and not name.endswith("/") else None
            if found is not None and found.modified <= self.before:
                self._remove(found, "it was never put in place")

    def step(self, step: int, folder: str) -> None:
        """Left-overs of one step folder."""
        try:
            self._step(step, folder)
        except HoldfastError as error:
            self.skipped.append(Skipped(folder, error.message))

    def _step(self, step: int, folder: str) -> None:
        if is_linked(self.store, folder):
            self.skipped.append(Skipped(folder, "it is a link; what it leads to is not this run's to delete"))
            return
        # Listed before the index is read: a file that a commit names in between is then named when it is
        # looked for. The other way round it would look like a left-over.
        names = self._ours(folder)
        try:
            with open_index(self.store.child(folder)) as index:
                named = {f"{folder}/{name}" for name in index.file_names()}
                index.select()  # a step counts as committed only if all of its index can be read
            self.good[folder] = step
            why = "no index names it"
        # Also of a checkpoint of torch DCP, in which only files that are named as ours are looked at.
        except NotCommitted:
            named, why = set(), "the step was never committed"
        # Its files may be all that is left of it, and `reindex` may bring it back.
        except HoldfastError as error:
            self.skipped.append(Skipped(folder, f"its index can't be read: {error.message}"))
            return
        left = [found for name in names if name not in named and (found := self._stat(name)) is not None]
        # All or none: ranks of a running save finish at different times, so its first files
        # may be old by now.
        if any(found.modified > self.before for found in left):
            self.busy.add(folder)
            self.skipped.append(Skipped(folder, "a file in it is young, so a save may be running"))
            return
        for found in left:
            self._remove(found, why)
        if folder not in self.good:
            self._remove_folder(folder, not left)

    def _ours(self, folder: str) -> list[str]:
        """Files of a step folder that Holdfast made, but for the index."""
        names = [
            f"{folder}/{DATA}/{name}"
            for name in self.store.list(f"{folder}/{DATA}")
            if is_named_by_save(name)
        ]
        top = [name for name in self.store.list(folder) if name.startswith(HIDDEN)]
        return names + [f"{folder}/{name}" for name in top if not name.endswith("/")]

    def _stat(self, path: str) -> _Left | None:
        found = self.store.stat(path)
        return None if found is None else _Left(path, found.size, found.modified)

    def _remove(self, found: _Left, why: str) -> None:
        if not self.dry_run:
            self.store.delete(found.path)
        self.removed.append(Removed(found.path, why, found.size))

    def _remove_folder(self, folder: str, was_empty: bool) -> None:
        """A step folder without an index, once nothing is left in it; a new save makes it again."""
        # A save that has just begun has an empty folder. Its time tells only if nothing was removed from it
        # here, which made it new.
        found = self._stat(folder)
        if was_empty and found is not None and found.modified > self.before:
            self.skipped.append(Skipped(folder, "the folder is young, so a save may be running"))
            return
        # In a dry run what would have gone is still there, so it is taken off by name.
        foreign = set(self.store.list(folder)) - {f"{DATA}/"}
        foreign |= set(self.store.list(f"{folder}/{DATA}"))
        gone = {os.path.basename(item.path) for item in self.removed if item.path.startswith(folder + "/")}
        if METADATA in foreign:
            self.skipped.append(Skipped(folder, "it is a checkpoint of another format"))
            return
        if foreign - gone:
            self.skipped.append(Skipped(folder, "it holds files that are not Holdfast's"))
            return
        if not is_spelled_as_ours(folder):
            return
        self.removed.append(Removed(folder, "the step was never committed", 0))
        if not self.dry_run:
            with suppress(HoldfastError):  # a save that begins right now keeps its folder
                self.store.delete(f"{folder}/{DATA}")
                self.store.delete(folder)

    def old(self, keep: int) -> None:
        """Committed steps beyond the newest `keep` that can be read."""
        # `good` ascends by step, as the folders were visited. What can't be read is not in it, so a damaged
        # newest step never pushes out the last good one.
        for folder in surplus(filter(is_spelled_as_ours, self.good), keep):
            if folder in self.busy:
                continue  # said already
            size = sum(found.size for name in self._all(folder) if (found := self._stat(name)) is not None)
            if not self.dry_run:
                remove_step(self.store, folder)
            # Also where nothing was removed, in a dry run: `kept` is what would be left.
            del self.good[folder]
            self.removed.append(Removed(folder, f"older than the newest {keep} committed", size))

    def _all(self, folder: str) -> list[str]:
        # Left-overs of the same folder went before, and were counted then.
        gone = {item.path for item in self.removed}
        names = [f"{folder}/{DATA}/{name}" for name in self.store.list(f"{folder}/{DATA}")]
        return [name for name in [*names, f"{folder}/{INDEX}"] if name not in gone]


def prune(run: Place, keep: int | None = None, older_than: float = HOUR, dry_run: bool = False) -> Pruned:
    """Sweep a run folder. `keep` also removes older committed steps; the newest one always stays."""
    if keep is not None and keep < 1:
        raise BadInput(f"keep must be at least 1, not {keep}: the newest committed step always stays.")
    if older_than < 0:
        raise BadInput(f"older_than must be seconds from 0 on, not {older_than}.")
    store = open_store(run)
    found = store.stat()
    if found is None or found.kind not in FOLDERS:
        raise BadInput(f"{store.url} " + ("does not exist." if found is None else "is a file, not a folder."))
    if INDEX in store.list():
        raise BadInput(
            f"{store.url} is a checkpoint, not a run folder.", hint="Give the folder that its steps lie in."
        )
    sweep = _Sweep(store, older_than, dry_run)
    sweep.top()
    for step, folder in all_step_folders(store):
        sweep.step(step, folder)
    if keep is not None:
        sweep.old(keep)
    freed = sum(item.bytes for item in sweep.removed)
    kept = tuple(dict.fromkeys(sweep.good.values()))
    return Pruned(store.url, dry_run, tuple(sweep.removed), tuple(sweep.skipped), freed, kept)
