"""Remove old steps. Only Holdfast's own files are deleted; a step's folder with other files in it stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.names import (
    CONFIG,
    DATA,
    HOLDFAST_CONFIG,
    INDEX,
    LEFT,
    METADATA,
    PINS,
    REMOVED,
    is_data_file,
    is_named_by_save,
)
from holdfast._core.io.index_file import open_index
from holdfast._core.io.references import Known, can_refer, name_of_folder, nothing_known
from holdfast._core.io.refusals import MOST_REFUSED, Refusals
from holdfast._core.io.removal import Named, finish_removals, named_by_index, remove_with_note
from holdfast._core.io.small_files import read_file
from holdfast._core.store.base import Entry, Kind, Store, capabilities, look_at_files, parent
from holdfast._core.store.branches import is_left, left_behind
from holdfast._core.store.pins import has_live_pin, unpinned
from holdfast._core.store.publishing import HIDDEN
from holdfast._core.store.retention import Retention, StepFacts
from holdfast._core.store.run_folder import (
    MarkEntries,
    best_of,
    by_step,
    is_linked,
    is_only_marked,
    is_spelled_as_ours,
)
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")
_warned: set[str] = set()
"""Linked steps about which a warning was logged."""


def is_removable(store: Store, folder: str) -> bool:
    """Return whether a committed step was made by this run, so that retention may remove it."""
    if not is_spelled_as_ours(folder):
        return False
    if not is_linked(store, folder):
        return True
    if (where := f"{store.url}/{folder}") not in _warned:
        _warned.add(where)
        log.warning("%s, its data or its index is a link; it is not counted, and never removed.", where)
    return False


def retire(
    store: Store,
    rules: Retention,
    saved: int,
    read: Callable[[int, str], StepFacts],
    damaged: Collection[int] = (),
    passed: set[str] | None = None,
    known: Known = nothing_known,
    refusals: Refusals | None = None,
) -> list[str]:
    """Remove the steps that no rule keeps; never the step that was just saved. Return their folders.

    read: returns the facts in a step's index, given its number and folder; called only if a rule needs them.
    damaged: steps that a load has skipped. They do not count as kept steps, and are not removed, so that they
        can be examined.
    passed: a cache of folders that are known not to be removable steps; they are skipped, and newly found
        ones are added.
    known: reads which attempts of saves have ended; used only where steps refer to others (`references`).
    refusals: what could not be removed before.
    """
    if rules.keep is None:
        return []
    refusals = Refusals(store) if refusals is None else refusals
    passed = set() if passed is None else passed
    names = store.list()
    if f"{REMOVED}/" in names:
        finish_removals(store, known, refusals)
    left = left_behind(store) if LEFT in names else {}
    steps = [
        (step, folders)
        for step, folders in by_step(store, names)
        if step not in damaged and not passed.issuperset(folders)
    ]
    gone = {step for step, folders in steps if any(is_left(store, left, one, INDEX) for one in folders)}
    steps.sort(key=lambda found: (found[0] not in gone, found[0]))
    newest_first = steps[::-1]
    # Those that have `keep` newer ones and don't stay by their number. If there are none, which is common, no
    # folder is examined.
    if not any(not rules.stays_by_number(step) for step, _ in newest_first[rules.keep :]):
        return []
    # The best step is sought among all that are there, also among those that stay by their number: one that
    # somebody has deleted must not count as the best. The intervals of a timedelta begin at the oldest.
    looked_at = [
        folder
        for place, (step, folders) in enumerate(newest_first)
        if rules.best is not None or place < rules.keep or not rules.stays_by_number(step)
        for folder in folders
    ]
    look = MarkEntries(store, looked_at)
    removable: dict[int, str] = {}
    for step, folders in newest_first:
        if rules.best is None and len(removable) >= rules.keep and rules.stays_by_number(step):
            continue  # no other rule compares it with other steps
        marked = best_of(store, folders, look)
        if marked is not None and marked.mark == INDEX and is_removable(store, marked.folder):
            removable[step] = marked.folder
        else:
            passed.update(folders)
    if len(removable) <= rules.keep:
        return []
    kept = rules.kept(
        [
            (read(step, folder) if rules.asks_the_index else StepFacts(step))._replace(left=step in gone)
            for step, folder in removable.items()
        ]
    )
    # An older step that was saved again may not be among the newest; it stays until the next save.
    going = [folder for step, folder in sorted(removable.items()) if step not in kept and step != saved]
    removed, refused = [], 0
    for folder in refusals.in_turn(going):
        try:
            remove_step(store, folder, known)
        except HoldfastError as error:  # the next save tries again
            refusals.add(folder, error)
            refused += 1
            if refused == MOST_REFUSED:
                break
        else:
            refusals.forget(folder)
            removed.append(folder)
    return removed


def remove_step(store: Store, folder: str, known: Known = nothing_known) -> bool:
    """Delete Holdfast's files of a step: its index first, so that it stops being a checkpoint before it loses
    data. Return whether its folder was removed; a folder with other files in it stays.

    A step that is being read (pinned) is not changed, nor is one that is a link, or whose data folder or
    index is a link. Without locks a reader may begin meanwhile: then its data stays, and `retire` goes on
    later; what is returned is whether the data is gone, as there are no folders. Data that later steps refer
    to stays, too.

    known: as for `retire`.
    """
    if is_linked(store, folder):
        return False
    step = store.child(folder)
    if capabilities(store).pins:
        return _remove_without_locks(store, step, folder, known)
    with unpinned(step) as free:
        if not free:
            log.info("%s is being read, and stays for now.", step.url)
            return False
        ours = old_files(step)
        for name in (METADATA, INDEX):  # in this order: METADATA means nothing without the index
            if ours.pop(name, None) is not None:
                step.delete(name)
    for name in ours:
        step.delete(name)
    if capabilities(store).folders:
        step.child(DATA).remove()
    return step.remove()


def _remove_without_locks(store: Store, step: Store, folder: str, known: Known) -> bool:
    present = step.list()
    pins = step.list(PINS) if f"{PINS}/" in present else []
    if has_live_pin(step, pins):
        log.info("%s is being read, and stays for now.", step.url)
        return False
    named = Named()
    with suppress(HoldfastError):
        named = named_by_index(step)
    ours = own_names(step, named.files, present)
    marks = sorted(set(ours) & {METADATA, INDEX, CONFIG})  # `.metadata` means nothing without the index
    return remove_with_note(store, folder, marks, [*filter(is_data_file, ours)], named, pins, known)


def remove_replaced(step: Store, named: Named, but: Collection[str]) -> None:
    """Delete the data that only the replaced index of a step has named. Never raises.

    named: by that index. but: what the new one names.
    """
    with suppress(HoldfastError):  # `holdfast prune` removes what is left
        own = [*entries(step, (name for name in named.files - {*but} if is_data_file(name)))]
        if not can_refer(step):
            for name in own:
                step.delete(name)
        elif own:
            # A later step may refer to it, or a save that is under way.
            store, folder = parent(step), name_of_folder(step)
            remove_with_note(store, folder, (), own, named, step.list(PINS), nothing_known)


def old_files(step: Store) -> dict[str, Entry]:
    """Return the files that `remove_step` deletes. If the index can't be read, only files whose names are
    specific to Holdfast."""
    named: set[str] = set()
    with suppress(HoldfastError), open_index(step) as index:
        named.update(index.file_names())
    return entries(step, own_names(step, named))


def own_names(step: Store, named: Collection[str] = (), present: list[str] | None = None) -> list[str]:
    """List Holdfast's files by name, in a step's folder and its data folder: files in `named`, files whose
    names are specific to Holdfast, the index, and marker files for other tools with Holdfast's content.

    present: what the folder holds, if it was just listed.
    """
    data = [path for name in step.list(DATA) if (path := f"{DATA}/{name}") in named or is_named_by_save(name)]
    return data + [name for name in (step.list() if present is None else present) if _is_ours(step, name)]


def remove_marks(step: Store, but: Collection[str] = ()) -> None:
    """Delete Holdfast's marker files for other tools, except `but`. After an overwrite they would describe
    the checkpoint that is gone. Never raises."""
    with suppress(HoldfastError):
        for name in entries(step, {METADATA, CONFIG} - set(but)):
            if _is_ours(step, name):
                step.delete(name)


def _is_ours(step: Store, name: str) -> bool:
    if name == METADATA:
        return is_only_marked(step)
    if name == CONFIG:
        with suppress(HoldfastError, *NO_JSON):
            return bool(msgspec.json.decode(read_file(step, CONFIG) or b"") == HOLDFAST_CONFIG)
        return False
    return name == INDEX or name.startswith(HIDDEN)


def entries(step: Store, names: Iterable[str]) -> dict[str, Entry]:
    """Return those names that are regular files, not links, with their entries."""
    names = list(names)
    look = look_at_files(step, names)
    found = ((name, look(name)) for name in names)
    return {name: entry for name, entry in found if entry is not None and entry.kind is Kind.FILE}
