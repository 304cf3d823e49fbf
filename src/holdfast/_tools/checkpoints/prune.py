"""Removes files that no index refers to, and old steps on request; never files that may still be needed.

These rules keep it safe:
- A folder is listed before its index is read, so the index names a file that is committed in between.
- Files that no index names are removed only if the youngest of their folder is old enough. Ranks of a running
  save finish at different times, and all its files must stay.
- A step whose index can't be read is not touched, because its files may be all that is left of it. Nor does
  it count as one of the newest steps.
- Links are not followed, and are kept. Only files with Holdfast's own names, or listed in an index, are
  removed, and only folders with Holdfast's names of steps, once they are empty.
- The folder of another format's checkpoint is kept.
- In object stores no age tells what a running save has written. There a file that no index names is removed
  only if the owner file of the run lists its attempt as one that is never committed (`_core.run.leftovers`).
"""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec

from holdfast._core.format.names import (
    CONFIG,
    DATA,
    INDEX,
    METADATA,
    PINS,
    attempt_of,
    reference,
    split_reference,
)
from holdfast._core.io.index_file import open_index
from holdfast._core.io.old_steps import entries, old_files, own_names, remove_step
from holdfast._core.io.references import Known, nothing_known
from holdfast._core.io.removal import finish_kept, finish_removal, named_by_index, notes_of
from holdfast._core.run.leftovers import Leftovers
from holdfast._core.store.absence import nothing_there
from holdfast._core.store.base import FOLDERS, Entry, Folder, Kind, Store, capabilities
from holdfast._core.store.branches import is_left, left_behind
from holdfast._core.store.local import open_store
from holdfast._core.store.pins import has_live_pin, is_pinned
from holdfast._core.store.publishing import HIDDEN
from holdfast._core.store.retention import facts_of
from holdfast._core.store.run_folder import all_step_folders, is_linked, is_spelled_as_ours, linked_steps
from holdfast.errors import BadInput, HoldfastError, NotCommitted

HOUR = 3600.0
_OTHERS = "it holds files that no save of Holdfast has made"


class Removed(msgspec.Struct, frozen=True):
    """A file or step that was removed, or would be in a dry run."""

    path: str
    """Path relative to the run folder."""
    why: str
    bytes: int
    """Freed bytes, without files that another step hard-links (`Options.link_unchanged`)."""


class Skipped(msgspec.Struct, frozen=True):
    """A file or step that was not removed although it is unreferenced or old."""

    path: str
    why: str


class Pruned(msgspec.Struct, frozen=True):
    """The result of `prune`, or of a dry run."""

    path: str
    dry_run: bool
    removed: tuple[Removed, ...]
    skipped: tuple[Skipped, ...]
    bytes_freed: int
    kept: tuple[int, ...]
    """Committed steps that remain."""
    note: str = ""
    """A description of a folder without any steps."""


class _Sweep:
    def __init__(self, store: Store, older_than: float, dry_run: bool) -> None:
        self.store, self.dry_run = store, dry_run
        self.has_folders = capabilities(store).folders
        # Only here are file times compared with a clock of this host (docs/failure-model.md, Clocks).
        self.before = time.time() - older_than
        self.removed: list[Removed] = []
        self.skipped: list[Skipped] = []
        self.good: dict[str, int] = {}
        """Folders of the committed steps whose index can be read, with their step."""
        self.partial: set[str] = set()
        """Folders of those that were saved with `include=` or `exclude=`."""
        self.referred: dict[str, set[str]] = {}
        """By folder, what the index of a committed step names of other steps."""
        self.busy: set[str] = set()
        """Folders that a running save may be writing to."""
        self.known: Known = nothing_known

    def _split(self, folder: str, left: dict[str, Entry]) -> dict[str, Entry]:
        """Return which left-overs of a folder may be removed; note why others stay."""
        # All or none: ranks of a running save finish at different times, so its first files may be old.
        if any(_newest_time(entry) > self.before for entry in left.values()):
            self.busy.add(folder)
            self.skipped.append(Skipped(folder, "a file in it is young, so a save may be running"))
            return {}
        return left

    def top(self) -> None:
        """Remove files in the run folder itself that were never renamed to their final name."""
        for name in self.store.list():
            if not name.startswith(HIDDEN) or name.endswith("/"):
                continue
            entry = self.store.stat(name)
            if entry is not None and entry.kind is Kind.FILE and entry.modified <= self.before:
                self._remove(name, _freed(entry), "it was never put in place")

    def step(self, step: int, folder: str) -> None:
        """Remove the left-overs of one step folder."""
        if is_linked(self.store, folder):
            self.skipped.append(Skipped(folder, "it is a link; what it leads to is not this run's to delete"))
            return
        step_store = self.store.child(folder)
        # Listed before the index is read: otherwise a file that is committed in between would look like a
        # left-over.
        names = own_names(step_store)
        try:
            with open_index(step_store) as index:
                named = {*index.file_names(), INDEX, METADATA, CONFIG}
                index.select()  # a step counts as committed only if all of its index can be read
            self.referred[folder] = set(filter(split_reference, named))
            self.good[folder] = step
            if facts_of(step, index.about).partial:
                self.partial.add(folder)
            why = "no index names it"
        # Also raised for a checkpoint of torch DCP, of which only files with our names are considered.
        except NotCommitted:
            named, why = set(), "the step was never committed"
        # The files may be all that is left of the step, and `reindex` may restore it.
        except HoldfastError as error:
            self.skipped.append(Skipped(folder, f"its index can't be read: {error.message}"))
            return
        left = entries(step_store, (name for name in names if name not in named))
        for name, entry in self._split(folder, left).items():
            self._remove(f"{folder}/{name}", _freed(entry), why)
        if folder not in self.good and folder not in self.busy and self.has_folders:
            self._remove_folder(folder, left)

    def _remove(self, path: str, size: int, why: str) -> None:
        if not self.dry_run:
            self.store.delete(path)
        self.removed.append(Removed(path, why, size))

    def _remove_folder(self, folder: str, left: Collection[str]) -> None:
        """Remove a step folder that has no index and no other files than `left`; a save makes it again."""
        # An empty, young folder may be of a save that has just begun. A removal in it would have renewed its
        # time, so the time counts only if nothing was removed here.
        entry = self.store.stat(folder)
        if not left and entry is not None and entry.modified > self.before:
            self.skipped.append(Skipped(folder, "the folder is young, so a save may be running"))
            return
        others = self._others(folder, left)
        if METADATA in others:
            self.skipped.append(Skipped(folder, "it is a checkpoint of another format"))
        elif others:
            self.skipped.append(Skipped(folder, _OTHERS))
        elif is_spelled_as_ours(folder):
            self.removed.append(Removed(folder, "the step was never committed", 0))
            if not self.dry_run:
                # Fails if a save begins right now, which keeps its folder.
                self.store.child(f"{folder}/{DATA}").remove()
                self.store.child(folder).remove()

    def _others(self, folder: str, ours: Collection[str]) -> set[str]:
        """List other entries of a step folder than `ours`, which still exist in a dry run."""
        inside = {f"{DATA}/{name}" for name in self.store.list(f"{folder}/{DATA}")}
        # What marks that others read the step, or refer to it, goes by itself.
        return {*self.store.list(folder), *inside} - {f"{DATA}/", f"{PINS}/", *ours}

    def old(self, keep: int) -> None:
        """Remove readable committed steps, except the newest `keep` and the newest `keep` whole ones."""
        # `good` ascends by step, in the order of the visits; those left behind count as older. It has only
        # steps that can be read, so a damaged newest step never displaces the last good one.
        listed = left_behind(self.store)
        left = {one for one in self.good if is_left(self.store, listed, one, INDEX)}
        ours = sorted(filter(is_spelled_as_ours, self.good), key=lambda one: one not in left)
        gone = {item.path for item in self.removed}  # left-overs: in a dry run they are still there
        whole = [one for one in ours if one not in self.partial]
        stay = {*ours[max(len(ours) - keep, 0) :], *whole[max(len(whole) - keep, 0) :]}
        going = [one for one in ours if one not in stay]
        linked = linked_steps(self.store)
        self.skipped += [
            Skipped(one, f"the link {linked[one]} leads to it") for one in going if one in linked
        ]
        going = [one for one in going if one not in linked]
        stays = set[str]().union(*(names for one, names in self.referred.items() if one not in going))
        for folder in going:
            if folder in self.busy:
                continue  # reported already
            files = old_files(self.store.child(folder))
            others = self._others(folder, files)
            referred = {name for name in files if reference(folder, name) in stays}
            size = sum(
                _freed(entry)
                for name, entry in files.items()
                if name not in referred and f"{folder}/{name}" not in gone
            )
            if not self.dry_run:
                data_gone = remove_step(self.store, folder, self.known) or self.has_folders
                if self.store.stat(f"{folder}/{INDEX}") is not None:
                    self.skipped.append(Skipped(folder, _READ))
                    continue
                if not data_gone:
                    why = "its index is removed; data of it is being read, or later steps refer to it"
                    self.skipped.append(Skipped(folder, why))
                    still = old_files(self.store.child(folder))
                    size = sum(_freed(entry) for name, entry in files.items() if name not in still)
            elif referred:
                why = "its index would be removed; later steps refer to data of it"
                self.skipped.append(Skipped(folder, why))
            # Also in a dry run: `kept` lists the steps that would remain.
            del self.good[folder]
            why = (
                "the run has left it behind" if folder in left else f"older than the newest {keep} committed"
            )
            self.removed.append(Removed(folder, why, size))
            if others:
                self.skipped.append(Skipped(folder, _OTHERS))


class _ObjectSweep(_Sweep):
    """In a store where times of files tell nothing."""

    def __init__(self, store: Store, older_than: float, dry_run: bool) -> None:
        super().__init__(store, older_than, dry_run)
        self._known = Leftovers(store)
        self.known = lambda run: self._known.why_kept
        self._noted: set[str] = set()
        """Data files of removed steps, with their folders."""

    def top(self) -> None:
        """Go on with removals of steps that were stopped, or waited for a reader or for later steps."""
        notes, kept = notes_of(self.store)
        for path, note in notes:
            self._noted.update(f"{note.folder}/{name}" for name in note.files)
            if not named_by_index(self.store.child(note.folder)).files.isdisjoint(note.files):
                continue  # it was not removed: `keep=` decides
            if self._is_read(note.folder):
                self.skipped.append(Skipped(note.folder, _READ))
            elif self.dry_run or finish_removal(self.store, path, note, self.known):
                self.removed.append(Removed(note.folder, "its removal was not finished", 0))
            else:
                self.skipped.append(Skipped(note.folder, _REFERRED))
        for path, files in kept:
            self._noted.update(f"{files.folder}/{name}" for name in files.kept)
            if not named_by_index(self.store.child(files.folder)).files.isdisjoint(files.kept):
                continue  # `reindex` has brought it back: `keep=` decides
            if self.dry_run or not finish_kept(self.store, path, files, self.known):
                self.skipped.append(Skipped(files.folder, _REFERRED))
            else:
                self.removed.append(Removed(files.folder, "no later step refers to its data any more", 0))

    def _is_read(self, folder: str) -> bool:
        # In a dry run nothing is written, so the pin of a process that was killed counts, too.
        step = self.store.child(folder)
        return is_pinned(step) if self.dry_run else has_live_pin(step)

    def _split(self, folder: str, left: dict[str, Entry]) -> dict[str, Entry]:
        attempts: dict[str, list[str]] = {}
        for name in left:
            if f"{folder}/{name}" not in self._noted:
                attempts.setdefault(attempt_of(name), []).append(name)
        going: dict[str, Entry] = {}
        for attempt, names in attempts.items():
            if why := self._known.why_kept(attempt):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                self.skipped.append(Skipped(f"{folder}/{names[0]}{more}", why))
            else:
                going.update((name, left[name]) for name in names)
        # After the index was read: a reader may still have one that named them.
        if going and self._is_read(folder):
            self.skipped.append(Skipped(folder, _READ))
            return {}
        return going


_READ = "it is being read"
_REFERRED = "later steps refer to its data, or a save that may be under way"


def _newest_time(entry: Entry) -> float:
    # A running save may have hard-linked an old file (`Options.link_unchanged`): then its name is young.
    return entry.modified if entry.links == 1 else max(entry.modified, entry.named)


def _freed(entry: Entry) -> int:
    return entry.size if entry.links == 1 else 0


def prune(run: Folder, keep: int | None = None, older_than: float = HOUR, dry_run: bool = False) -> Pruned:
    """Remove the left-overs of a run folder.

    keep: also remove all but the newest `keep` committed steps. older_than: seconds; younger left-overs stay.
    """
    store = open_store(run)
    kind: type[_Sweep] = _Sweep
    if not capabilities(store).times:
        if not capabilities(store).pins:
            raise BadInput(
                f"{store.url} can't be pruned: in its store the files of a running save look like "
                "left-overs: no time of theirs can be relied on.",
                hint="Checkpoints(keep=...) removes old steps there.",
            )
        kind = _ObjectSweep
    entry = store.stat()
    if entry is None or entry.kind not in FOLDERS:
        raise BadInput(f"{store.url} " + ("does not exist." if entry is None else "is a file, not a folder."))
    if INDEX in store.list():
        raise BadInput(
            f"{store.url} is a checkpoint, not a run folder.", hint="Give the folder that its steps lie in."
        )
    sweep = kind(store, older_than, dry_run)
    sweep.top()
    steps = all_step_folders(store)
    for step, folder in steps:
        try:
            sweep.step(step, folder)
        except HoldfastError as error:
            sweep.skipped.append(Skipped(folder, error.message))
    if keep is not None:
        sweep.old(keep)
    note = "" if steps else str(nothing_there(store))
    freed = sum(item.bytes for item in sweep.removed)
    kept = tuple(dict.fromkeys(sweep.good.values()))
    skipped = tuple(dict.fromkeys(sweep.skipped))
    return Pruned(store.url, dry_run, tuple(sweep.removed), skipped, freed, kept, note)
