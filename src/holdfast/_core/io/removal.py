"""Remove a step from a store without locks, in an order that no reader, no later step, and no crash can harm.

1. A note in the run folder names the data files to be deleted. Those that later steps refer to (`references`)
   are in a note of another kind, which keeps them.
2. The index is deleted: from then on nobody begins to read the step.
3. Only then its pins are listed (`store.pins`), and the claims of later steps. While a pin is live, data and
   note stay; while a claim counts, its files do, and the note.
4. The data is deleted, then the claims by which the step refers to earlier ones, then the note.

Whoever removes old steps of the run later goes on where a note shows that somebody has stopped. The names of
data files are those of one attempt, so a note never names data of a later save. A note of files to be deleted
stays until they are gone, also if the index is still there: its remover may be slow, and a later save must
not refer to what it is going to delete. Before files that were kept are deleted, they get such a note, and
the claims are listed again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.index import Index
from holdfast._core.format.names import INDEX, PINS, REMOVED, is_data_file
from holdfast._core.io.references import (
    KEPT,
    Known,
    by_folder,
    notes_at,
    nothing_known,
    referred_to,
    release_all,
)
from holdfast._core.io.small_files import read_file
from holdfast._core.ready import ready
from holdfast._core.store.base import NotFound, Store
from holdfast._core.store.pins import has_live_pin
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")
_MOST = 1 << 26
"""Maximum bytes of a note."""


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """Data of a step that is being removed, or replaced."""

    folder: str
    files: list[str]
    """The data files to be deleted."""
    attempt: str = ""
    referred: list[str] = []
    """The folders of the steps that it refers to."""


class KeptFiles(msgspec.Struct, frozen=True):
    """Data of a step that is gone, which later steps refer to."""

    folder: str
    kept: list[str]
    """The data files."""


class Named(msgspec.Struct, frozen=True):
    """What a committed index names."""

    attempt: str = ""
    files: frozenset[str] = frozenset()


def remove_with_note(
    store: Store,
    folder: str,
    marks: Iterable[str],
    files: Collection[str],
    named: Named,
    pins: Iterable[str],
    known: Known,
) -> bool:
    """Remove a step. Return whether its data is gone, too; otherwise it is being read, or referred to.

    marks: files to delete first, in this order, the index among them. files: its data files. named: by its
    index. pins: what its folder of pins holds. known: says which attempts of saves have ended.
    """
    step = store.child(folder)
    kept = referred_to(step, files, pins, known)
    if kept:
        _write(store, folder, KEPT, KeptFiles(folder, sorted(kept)))
    note = Note(folder, sorted({*files} - kept), named.attempt, sorted(by_folder(named.files)))
    path = _write(store, folder, "", note)
    for name in marks:
        step.delete(name)
    return _delete_data(store, path, note, known) and not kept


def _write(store: Store, folder: str, kind: str, note: Note | KeptFiles) -> str:
    path = f"{REMOVED}/{folder}.{kind}{os.urandom(8).hex()}"
    writer = store.create(path)
    try:
        writer.write_at(0, [msgspec.json.encode(note)])
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return path


def _delete_data(store: Store, path: str, note: Note, known: Known) -> bool:
    step = store.child(note.folder)
    pins = step.list(PINS)
    if has_live_pin(step, pins):
        log.info("%s is being read: its index is removed, and its data stays for now.", step.url)
        return False
    kept = referred_to(step, note.files, pins, known)
    for name in note.files:
        if name not in kept:
            step.delete(name)
    if kept:
        return False
    release_all(store, note.referred, note.attempt)
    store.delete(path)
    return True


def finish_removals(store: Store, known: Known = nothing_known) -> list[Note]:
    """Go on with the removals that are noted in a run folder. Return those that have ended now."""
    ended = []
    notes, kept = notes_of(store)
    for path, note in notes:
        with suppress(HoldfastError):  # tried again later
            if finish_removal(store, path, note, known):
                ended.append(note)
    for path, files in kept:
        with suppress(HoldfastError):
            finish_kept(store, path, files, known)
    return ended


def finish_removal(store: Store, path: str, note: Note, known: Known) -> bool:
    """Go on with a removal. Return whether the data is gone; not if it is being read or referred to, or if
    the index still names it."""
    step = store.child(note.folder)
    return named_by_index(step).files.isdisjoint(note.files) and _delete_data(store, path, note, known)


def finish_kept(store: Store, path: str, note: KeptFiles, known: Known) -> bool:
    """Delete kept files that nobody refers to any more. Return whether all are gone."""
    step = store.child(note.folder)
    kept = referred_to(step, note.kept, step.list(PINS), known)
    free = {*note.kept} - kept
    if not free or not named_by_index(step).files.isdisjoint(note.kept):
        return False
    deleting = Note(note.folder, sorted(free))
    deleting_path = _write(store, note.folder, "", deleting)
    if not named_by_index(step).files.isdisjoint(free):  # `reindex` writes an index, and then looks at notes
        store.delete(deleting_path)
        return False
    if kept:
        _write(store, note.folder, KEPT, KeptFiles(note.folder, sorted(kept)))
    store.delete(path)
    return _delete_data(store, deleting_path, deleting, known) and not kept


def notes_of(store: Store) -> tuple[list[tuple[str, Note]], list[tuple[str, KeptFiles]]]:
    """Return what is noted in a run folder, by the path of the note: removals, and files that are kept.
    Damaged notes are left out."""
    deleting, kept = notes_at(store)
    notes, files = list[tuple[str, Note]](), list[tuple[str, KeptFiles]]()
    for name in deleting:
        path = f"{REMOVED}/{name}"
        with suppress(HoldfastError, *NO_JSON):
            note = msgspec.json.decode(read_file(store, path, _MOST) or b"", type=ready(Note))
            if is_spelled_as_ours(note.folder) and all(map(is_data_file, note.files)):
                notes.append((path, note))
    for name in kept:
        path = f"{REMOVED}/{name}"
        with suppress(HoldfastError, *NO_JSON):
            one = msgspec.json.decode(read_file(store, path, _MOST) or b"", type=ready(KeptFiles))
            if is_spelled_as_ours(one.folder) and all(map(is_data_file, one.kept)):
                files.append((path, one))
    return notes, files


def named_by_index(step: Store) -> Named:
    """Return what the committed index of a folder names; nothing if there is no index."""
    try:
        reader = step.open(INDEX)
    except NotFound:
        return Named()
    with closing(reader):
        index = Index(reader.read, reader.size, f"{step.url}/{INDEX}")
        return Named(str(index.about.get("attempt") or ""), frozenset(index.file_names()))
