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

The name of a note follows from its content: whoever tries the same again makes no second one. That takes
nothing from another remover who relies on it: such a note goes only once all of its files are gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.digest import digest, hex_digest
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
from holdfast._core.io.refusals import Refusals
from holdfast._core.io.small_files import read_file
from holdfast._core.ready import ready
from holdfast._core.store.base import NotFound, Store, capabilities
from holdfast._core.store.pins import has_live_pin
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import CorruptCheckpoint, HoldfastError, StorageError

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
    """Write a note; return its path. kind: begins its name, after the folder."""
    data = msgspec.json.encode(note)
    path = f"{REMOVED}/{folder}.{kind}{hex_digest(digest(data))}"
    if capabilities(store).exclusive_create and store.stat(path) is not None:
        return path
    writer = store.create(path)
    try:
        writer.write_at(0, [data])
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


def finish_removals(
    store: Store, known: Known = nothing_known, refusals: Refusals | None = None
) -> list[Note]:
    """Go on with the removals that are noted in a run folder. Return those that have ended now.

    refusals: where errors are noted. Then this goes on with some of the removals, until one is refused.
    """
    ended = []
    deleting, kept = notes_at(store)
    if refusals is None:
        some = [*((False, name) for name in deleting), *((True, name) for name in kept)]
    else:
        some = refusals.next_notes(deleting, kept)
    for is_kept, name in some:
        path = f"{REMOVED}/{name}"
        try:
            if is_kept:
                if (files := _kept_files(store, name)) is not None:
                    finish_kept(store, path, files, known)
            elif (note := _note(store, name)) is not None and finish_removal(store, path, note, known):
                ended.append(note)
        except HoldfastError as error:  # tried again later
            if refusals is not None and isinstance(error, StorageError):
                refusals.add(name.partition(".")[0], error)
                refusals.stopped_at = is_kept, name
                break
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
    own = os.urandom(8).hex()  # nobody else may rely on this note: it may be taken back
    deleting_path = _write(store, note.folder, own, deleting)
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
        with suppress(HoldfastError):
            if (note := _note(store, name)) is not None:
                notes.append((f"{REMOVED}/{name}", note))
    for name in kept:
        with suppress(HoldfastError):
            if (one := _kept_files(store, name)) is not None:
                files.append((f"{REMOVED}/{name}", one))
    return notes, files


def _note(store: Store, name: str) -> Note | None:
    with suppress(CorruptCheckpoint, *NO_JSON):
        data = read_file(store, f"{REMOVED}/{name}", _MOST) or b""
        note = msgspec.json.decode(data, type=ready(Note))
        return note if is_spelled_as_ours(note.folder) and all(map(is_data_file, note.files)) else None
    return None


def _kept_files(store: Store, name: str) -> KeptFiles | None:
    with suppress(CorruptCheckpoint, *NO_JSON):
        data = read_file(store, f"{REMOVED}/{name}", _MOST) or b""
        note = msgspec.json.decode(data, type=ready(KeptFiles))
        return note if is_spelled_as_ours(note.folder) and all(map(is_data_file, note.kept)) else None
    return None


def named_by_index(step: Store) -> Named:
    """Return what the committed index of a folder names; nothing if there is no index."""
    try:
        reader = step.open(INDEX)
    except NotFound:
        return Named()
    with closing(reader):
        index = Index(reader.read, reader.size, f"{step.url}/{INDEX}")
        return Named(str(index.about.get("attempt") or ""), frozenset(index.file_names()))
