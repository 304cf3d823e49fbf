"""Remove old steps. Only Holdfast's own files are deleted; a step's folder with other files in it stays."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.names import (
    CONFIG,
    DATA,
    HOLDFAST_CONFIG,
    INDEX,
    METADATA,
    PINS,
    is_data_file,
    is_named_by_save,
)
from holdfast._core.io.index_file import open_index
from holdfast._core.io.references import Known, can_refer, name_of_folder, nothing_known
from holdfast._core.io.removal import Named, named_by_index, remove_with_note
from holdfast._core.io.small_files import read_file
from holdfast._core.store.base import Entry, Kind, Store, capabilities, look_at_files, parent
from holdfast._core.store.pins import has_live_pin, unpinned
from holdfast._core.store.publishing import HIDDEN
from holdfast._core.store.run_folder import (
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


def remove_step(store: Store, folder: str, known: Known = nothing_known) -> bool:
    """Delete Holdfast's files of a step: its index first, so that it stops being a checkpoint before it loses
    data. Return whether its folder was removed; a folder with other files in it stays.

    A step that is being read (pinned) is not changed, nor is one that is a link, or whose data folder or
    index is a link. Without locks a reader may begin meanwhile: then its data stays, and `finish_removals`
    goes on later; what is returned is whether the data is gone, as there are no folders. Data that later
    steps refer to stays, too.

    known: reads which attempts of saves have ended; used only where steps refer to others (`references`).
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
