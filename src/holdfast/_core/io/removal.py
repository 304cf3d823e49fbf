"""Remove a step from a store without locks, in an order that no reader, and no crash, can harm.

1. A note in the run folder names the step's data files.
2. The index is deleted: from then on nobody begins to read the step.
3. Only then its pins are listed (`store.pins`). While one is live, data and note stay.
4. The data is deleted, then the note.

Whoever removes old steps of the run later goes on where a note shows that somebody has stopped. The names of
data files are those of one attempt, so a note never names data of a later save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.index import Index
from holdfast._core.format.names import INDEX, REMOVED, is_data_file
from holdfast._core.io.small_files import read_file
from holdfast._core.ready import ready
from holdfast._core.store.base import NotFound, Store
from holdfast._core.store.pins import has_live_pin
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")
_MOST = 1 << 26
"""Maximum bytes of a note."""


class Note(msgspec.Struct, frozen=True):
    """A step that is being removed."""

    folder: str
    files: list[str]
    """Its data files."""


def remove_with_note(store: Store, folder: str, marks: Iterable[str], files: Iterable[str]) -> bool:
    """Remove a step. Return whether its data is gone, too; otherwise it is being read.

    marks: files to delete first, in this order, the index among them. files: its data files.
    """
    note, path = Note(folder, sorted(files)), f"{REMOVED}/{folder}.{os.urandom(8).hex()}"
    writer = store.create(path)
    try:
        writer.write_at(0, [msgspec.json.encode(note)])
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    step = store.child(folder)
    for name in marks:
        step.delete(name)
    return _delete_data(store, path, note)


def _delete_data(store: Store, path: str, note: Note) -> bool:
    step = store.child(note.folder)
    if has_live_pin(step):
        log.info("%s is being read: its index is removed, and its data stays for now.", step.url)
        return False
    for name in note.files:
        step.delete(name)
    store.delete(path)
    return True


def finish_removals(store: Store) -> list[Note]:
    """Go on with the removals that are noted in a run folder. Return those that have ended now."""
    ended = []
    for path, note in notes_of(store):
        with suppress(HoldfastError):  # tried again later
            if finish_removal(store, path, note):
                ended.append(note)
    return ended


def finish_removal(store: Store, path: str, note: Note) -> bool:
    """Go on with a removal. Return whether the data is gone; not if it is being read, or if the index still
    names it."""
    if set(named_by_index(store.child(note.folder))).isdisjoint(note.files):
        return _delete_data(store, path, note)
    store.delete(path)  # the remover was stopped before it had deleted the index
    return False


def notes_of(store: Store) -> list[tuple[str, Note]]:
    """Return the removals that are noted in a run folder, by the path of the note. Damaged ones are left
    out."""
    found = []
    for name in store.list(REMOVED):
        path = f"{REMOVED}/{name}"
        with suppress(HoldfastError, *NO_JSON):
            note = msgspec.json.decode(read_file(store, path, _MOST) or b"", type=ready(Note))
            if is_spelled_as_ours(note.folder) and all(map(is_data_file, note.files)):
                found.append((path, note))
    return found


def named_by_index(step: Store) -> list[str]:
    """Return the files that the committed index of a folder names; none if there is no index."""
    try:
        reader = step.open(INDEX)
    except NotFound:
        return []
    with closing(reader):
        return Index(reader.read, reader.size, f"{step.url}/{INDEX}").file_names()
