"""References: on object stores, which have no hard links, a step names data files of earlier steps of its
run.

A reference names the file in the folder of the step that wrote it, so references never form a chain. Nothing
that a committed index names is deleted, in whatever order these requests are made:

- **Who refers** (a save) writes a *claim* into the step's folder, and only then looks at the notes of
  removals (`removal`). It refers to no file that a note lists to be deleted, and to none that is not there.
- **Who deletes** (`keep=`, `prune`, a save that replaces a step) writes such a note, and only then lists the
  claims. It deletes no file that a claim stands for.

So one of the two sees the other. A note stays until all of its files are gone. A claim has the name of its
attempt and rank, and stays until it is known that no index of that attempt names the file, nor ever will:

- its index is in place, and names the file: it counts (if not, it does not);
- its index is not in place: it counts, unless it is known that the attempt is never committed (by the owner
  file of the run, which is read before that look), and no note says that its step is being removed, which
  somebody may still read. Who removes the step deletes its claims, after its readers have ended.

No clock decides anything. A claim of which nobody knows more stays, and with it the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import closing, suppress

import msgspec

from holdfast._core.base.values import NO_JSON
from holdfast._core.format.index import Index
from holdfast._core.format.names import INDEX, PINS, REMOVED, reference, split_reference
from holdfast._core.io.small_files import read_file
from holdfast._core.ready import ready
from holdfast._core.store.base import Kind, NotFound, Store, capabilities, look_at_files, parent
from holdfast._core.store.pins import CLAIM
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import CorruptCheckpoint, HoldfastError


class _Listed(msgspec.Struct, frozen=True):
    """Of a note, what it lists to be deleted."""

    files: list[str]


WhyKept = Callable[[str], str]
"""Returns why what an attempt has left must stay; "" if it is known never to be committed."""
Known = Callable[[Store], WhyKept]
"""Reads what is known of the attempts of a run folder."""
_MOST = 1 << 26
"""Maximum bytes of a claim."""
KEPT = "kept-"
"""In the name of a note: its files stay while they are referred to (`removal`)."""


class FileClaim(msgspec.Struct, frozen=True):
    """The files of a step that a rank of a later save may refer to."""

    folder: str
    """Of the later step."""
    attempt: str
    files: list[str]
    by_hand: bool = False
    """Whether `reindex` makes the index, also of an attempt that is known not to be committed by its save."""


def nothing_known(run: Store) -> WhyKept:
    """Take no attempt for ended."""
    return lambda attempt: "nothing is known of it"


def can_refer(store: Store) -> bool:
    """Return whether the step in a folder may refer to others."""
    return capabilities(store).references and is_spelled_as_ours(name_of_folder(store))


def name_of_folder(store: Store) -> str:
    return store.url.rstrip("/").rpartition("/")[2]


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the files that references among these names name, by the folder of their step."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (referred := split_reference(name)) is not None:
            found.setdefault(referred[0], []).append(referred[1])
    return found


# -- who refers ----------------------------------------------------------------------------------


def claim_files(store: Store, folder: str, sizes: dict[str, int], attempt: str, rank: int | None) -> set[str]:
    """Claim data files of the step in `folder` for the step in `store`; return those that may be referred to.

    sizes: of each file, in bytes. rank: which claims them, in one claim of a step; None: nobody's save.
    """
    run = parent(store)
    step = run.child(folder)
    made = FileClaim(name_of_folder(store), attempt, sorted(sizes), rank is None)
    out = step.create(_path(attempt, rank))
    try:
        out.write_at(0, [msgspec.json.encode(made)])
        out.finish()
    except BaseException:
        out.discard()
        raise
    left = sizes.keys() - being_deleted(run, folder, sizes)  # not before the claim is written
    look = look_at_files(step, sorted(left))
    found = {name: look(name) for name in left}
    return {
        name for name, entry in found.items() if entry is not None and entry[:2] == (Kind.FILE, sizes[name])
    }


def release(store: Store, folders: Iterable[str], attempt: str, rank: int) -> None:
    """Delete the claims of a rank's failed save. Never raises: others find out that they mean nothing."""
    for folder in folders:
        with suppress(HoldfastError):
            parent(store).child(folder).delete(_path(attempt, rank))


def release_all(run: Store, folders: Iterable[str], attempt: str) -> None:
    """Delete all claims of an attempt, whose step nobody reads any more."""
    for folder in folders:
        step = run.child(folder)
        for name in step.list(PINS):
            if name.startswith(f"{CLAIM}{attempt}."):
                step.delete(f"{PINS}/{name}")


def _path(attempt: str, rank: int | None) -> str:
    writer = f"r{rank:05d}" if rank is not None else os.urandom(8).hex()
    return f"{PINS}/{CLAIM}{attempt}.{writer}"


def notes_at(run: Store, folder: str = "") -> tuple[list[str], list[str]]:
    """List the notes of files that are being deleted, and of those that are kept; of one step, or of all."""
    names = [name for name in run.list(REMOVED) if not folder or name.startswith(f"{folder}.")]
    kept = [name for name in names if name.partition(".")[2].startswith(KEPT)]
    return [name for name in names if name not in kept], kept


def being_deleted(run: Store, folder: str, files: Collection[str]) -> set[str]:
    """Return those files of a step that a note lists to be deleted."""
    found = set[str]()
    for name in notes_at(run, folder)[0]:
        try:
            data = read_file(run, f"{REMOVED}/{name}", _MOST)
            found.update([] if data is None else msgspec.json.decode(data, type=ready(_Listed)).files)
        except (CorruptCheckpoint, *NO_JSON):
            return set(files)
    return found


# -- who deletes ---------------------------------------------------------------------------------


def referred_to(step: Store, files: Collection[str], pins: Iterable[str], known: Known) -> set[str]:
    """Return those data files of a step that must stay for others. StorageError if storage does not tell.

    pins: what its folder of pins holds, listed after the note was written.
    """
    claims, found = [name for name in pins if name.startswith(CLAIM)], set[str]()
    if not claims:
        return found
    run, folder = parent(step), name_of_folder(step)
    why_kept = known(run)  # before any index is looked at
    for name in claims:
        try:
            data = read_file(step, f"{PINS}/{name}", _MOST)
            if data is None:
                continue  # its save has failed, or its step was removed
            made = msgspec.json.decode(data, type=ready(FileClaim))
        except (CorruptCheckpoint, *NO_JSON):
            return set(files)
        mine = set(files) & set(made.files)
        if not mine or not is_spelled_as_ours(made.folder):
            continue
        try:
            named = _named(run.child(made.folder), made.attempt)
        except CorruptCheckpoint:
            named = {reference(folder, path) for path in mine}
        if named is None and (made.by_hand or why_kept(made.attempt) or notes_at(run, made.folder)[0]):
            found |= mine
        elif named is None or named.isdisjoint(reference(folder, path) for path in made.files):
            step.delete(f"{PINS}/{name}")
        else:
            found |= {path for path in mine if reference(folder, path) in named}
    return found


def _named(step: Store, attempt: str) -> set[str] | None:
    """Return what the index of an attempt names; None if it is not in place."""
    try:
        reader = step.open(INDEX)
    except NotFound:
        return None
    with closing(reader):
        index = Index(reader.read, reader.size, f"{step.url}/{INDEX}")
        return set(index.file_names()) if str(index.about.get("attempt") or "") == attempt else None
