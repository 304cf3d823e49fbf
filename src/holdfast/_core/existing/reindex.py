"""Rebuild a lost or damaged index from the indexes that are embedded in the data files.

A folder may have files of several attempts, such as a save that failed or that was overwritten, and these
must not be mixed. So files are grouped by the attempt that wrote them, which also stored how many ranks and
files it had. An index is made only if exactly one attempt is complete and covers every tensor exactly once.
Otherwise an error asks the user to name the files (`only`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import msgspec

from holdfast._core.existing.target import number
from holdfast._core.format.columns import Columns
from holdfast._core.format.container import read_header
from holdfast._core.format.index_layout import encode
from holdfast._core.format.names import (
    DATA,
    EMBEDDED,
    INDEX,
    is_data_file,
    is_fetched,
    is_link_to,
    reference,
    split_reference,
)
from holdfast._core.io.index_file import embedded_index, open_index
from holdfast._core.io.references import being_deleted, by_folder, can_refer, claim_files, name_of_folder
from holdfast._core.plan.merge import Merger
from holdfast._core.saving.commit import versions
from holdfast._core.store.base import Folder, Store, parent, version_of
from holdfast._core.store.local import open_store
from holdfast.errors import BadInput, CorruptCheckpoint, CoverageError, HoldfastError, StorageError

_ANY_SIZE = 1 << 62
NAME_THEM = (
    "Move the files that don't belong to it out of its data folder, or name those that do with --only."
)


class LeftOut(msgspec.Struct, frozen=True):
    """A data file that the new index does not include, and why."""

    name: str
    why: str


class Reindexed(msgspec.Struct, frozen=True):
    path: str
    action: str
    """`none` (the present index is good), `would write` (a dry run) or `written`."""
    step: int | None
    tensors: int
    files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    bytes: int
    """Bytes of the files in the index."""


class WholeFile(NamedTuple):
    """A data file with a valid embedded index."""

    name: str
    rank: int
    about: dict[str, object]
    """The description in its embedded index: step, attempt, number of ranks and of files."""
    columns: Columns


def reindex(path: Folder, dry_run: bool = False, force: bool = False, only: Sequence[str] = ()) -> Reindexed:
    """Rebuild the index of a checkpoint. A good index stays as it is unless `force`.

    only: names of the data files to use, whichever attempt they are of.
    """
    store = open_store(path)
    if not force and (present := _good_index(store)) is not None:
        return present
    names = _data_files(store, only)
    if any(is_fetched(name.removeprefix(f"{DATA}/")) for name in names):
        raise BadInput(
            f"{store.url} holds what `holdfast fetch` took of a checkpoint or a model, not all of it.",
            hint="Run the same `holdfast fetch` again.",
        )
    whole: list[WholeFile] = []
    broken: list[LeftOut] = []
    for name in names:
        try:
            file = look(store, name)
        except StorageError as error:  # another attempt may be complete without it
            file = LeftOut(name, error.message)
        whole.append(file) if isinstance(file, WholeFile) else broken.append(file)
    if not whole:
        why = f" ({broken[0].name}: {broken[0].why})" if broken else ""
        raise CorruptCheckpoint(f"{store.url} has no data file with a good index of itself{why}.")
    chosen = _choose(store, whole, broken, bool(only))
    columns = _merge(store, chosen)
    about = _about(chosen)
    data = encode(columns, about, narrow=True)
    # If a save commits meanwhile, it wins, and this raises Conflict.
    if not dry_run:
        _claim(store, columns, str(about.get("attempt") or ""))
        before = version_of(store, INDEX)
        if before is None:
            _check_not_going(store, columns)
        store.publish(INDEX, data, before)
        if before is None:
            try:
                # Again: a remover writes its note, and then looks at the index.
                _check_not_going(store, columns)
            except HoldfastError:
                store.delete(INDEX)
                raise
    others = [LeftOut(file.name, "it belongs to another attempt") for file in whole]
    left = [file for file in (*broken, *others) if file.name not in columns.file_names]
    return Reindexed(
        store.url,
        "would write" if dry_run else "written",
        number(chosen[0].about.get("step")),
        len(columns.names),
        tuple(columns.file_names),
        tuple(left),
        int(columns.file_size.sum()),
    )


def _claim(store: Store, columns: Columns, attempt: str) -> None:
    """Claim the data files of other steps that the new index names: its old claims may be gone."""
    size = dict(zip(columns.file_names, columns.file_size.tolist(), strict=True))
    for folder, files in by_folder(size).items():
        wanted = {path: size[reference(folder, path)] for path in files}
        if lost := wanted.keys() - claim_files(store, folder, wanted, attempt, None):
            raise CorruptCheckpoint(
                f"{store.url} needs {min(lost)} of {folder}, which is not there as it was, or is being "
                "deleted."
            )


def _check_not_going(store: Store, columns: Columns) -> None:
    """Raise if a note lists data of the step that is to be deleted."""
    own = [name for name in columns.file_names if not split_reference(name)]
    if can_refer(store) and (going := being_deleted(parent(store), name_of_folder(store), own) & {*own}):
        raise BadInput(
            f"{store.url} is being removed (keep=, delete, `holdfast prune`): {min(going)} is to be deleted.",
            hint="`holdfast latest RUN` names the newest committed step of a run.",
        )


def _good_index(store: Store) -> Reindexed | None:
    """Return the current index if all of its rows can be read and verified."""
    try:
        with open_index(store) as index:
            columns = index.select()
            step = number(index.about.get("step"))
    except HoldfastError:
        return None
    files = tuple(columns.file_names)
    return Reindexed(store.url, "none", step, len(columns.names), files, (), int(columns.file_size.sum()))


def _data_files(store: Store, only: Sequence[str]) -> list[str]:
    """List the data files, or those that `only` names."""
    there = [name for entry in store.list(DATA) if is_data_file(name := f"{DATA}/{entry}")]
    if not only:
        return there
    wanted = [name if name.startswith(f"{DATA}/") else f"{DATA}/{name}" for name in only]
    gone = sorted(set(wanted) - set(there))
    if gone:
        raise BadInput(f"{store.url} has no data file {gone[0]!r}.")
    return sorted(set(wanted))


def look(store: Store, name: str, or_link: bool = False) -> WholeFile | LeftOut:
    """Read the embedded index of a data file, or find why it can't be used. StorageError if storage fails.

    or_link: the file may be a link to one of an earlier step.
    """
    try:
        with closing(store.open(name)) as reader:
            # The header comes first in a file, so a truncated file mostly still has it.
            header = read_header(reader.read, _ANY_SIZE, f"{store.url}/{name}")
            start, stop = (header.data_start + offset for offset in header.entries[EMBEDDED].data_offsets)
            # The embedded index ends the file. So a shorter file lacks it, and a longer one is another file.
            if reader.size != stop:
                return LeftOut(name, f"it has {reader.size} bytes where its header announces {stop}")
            index = embedded_index(reader, start, stop, f"{store.url}/{name}")
            columns = index.embedded()
            # A copy under another name would cover the same chunks as the original. A link to a file of an
            # earlier step is such a copy; what is used of it is named by the files that linked it.
            is_link = or_link and any(is_link_to(name, own) for own in columns.file_names[:1])
            own = [name] if not is_link else columns.file_names[:1]
            if columns.file_names[:1] != own or columns.file_size[:1].tolist() != [stop]:
                return LeftOut(
                    name, f"it says that it is {columns.file_names[:1]}, so it was renamed or copied"
                )
            links = [] if is_link else zip(columns.file_names, columns.file_size.tolist(), strict=True)
            for link, size in links:
                if (entry := store.stat(link)) is None or entry.size != size:
                    return LeftOut(name, f"{link}, which holds a part of what its rank saved, is not there")
            if header.metadata.get("rank") != str(int(columns.file_rank[0])):
                return LeftOut(name, "its header and its embedded index name different ranks")
            return WholeFile(name, int(columns.file_rank[0]), index.about, columns)
    except KeyError:
        return LeftOut(name, "it carries no index of itself")
    except CorruptCheckpoint as error:
        return LeftOut(name, error.message)


def _choose(store: Store, whole: list[WholeFile], broken: list[LeftOut], named: bool) -> list[WholeFile]:
    """Return the files of the only complete attempt, or those that were named; else raise CoverageError."""
    attempts: dict[str, list[WholeFile]] = {}
    for file in whole:
        attempts.setdefault(str(file.about.get("attempt")), []).append(file)
    # Named files are used as they are; the merge checks whether they cover everything.
    finished = [whole] if named else [files for files in attempts.values() if _lacks(files) == 0]
    if len(finished) == 1:
        # By rank, in the order in which a commit merges them.
        return sorted(finished[0], key=lambda file: (file.rank, file.name))
    if finished:
        steps = sorted({str(files[0].about.get("step")) for files in finished})
        raise CoverageError(
            f"{store.url} holds the files of {len(finished)} finished attempts (step {' and '.join(steps)}); "
            "which of them was the checkpoint can't be told.",
            hint=NAME_THEM,
            details={"files": [[file.name for file in files] for files in finished[:2]]},
        )
    best = min(attempts.values(), key=_lacks)
    unusable = f"; {broken[0].name} can't be used: {broken[0].why}" if broken else ""
    raise CoverageError(
        f"No save in {store.url} was finished: of attempt {best[0].about.get('attempt')} (step "
        f"{best[0].about.get('step')}) {_lacks(best)} data files are missing, {len(best)} are "
        f"there{unusable}.",
        hint="Bring the missing files back, or load an older step.",
    )


def _lacks(files: list[WholeFile]) -> int:
    """Return the number of missing data files of an attempt."""
    # A rank without any file lacks at least one. The files of the other ranks say how many there were.
    ranks = {file.rank for file in files}
    parts = {file.rank: number(file.about.get("parts")) or 1 for file in files}
    return (
        max((number(files[0].about.get("ranks")) or len(ranks)) - len(ranks), 0)
        + sum(parts.values())
        - len(files)
    )


def _merge(store: Store, files: list[WholeFile]) -> Columns:
    """Merge the embedded indexes. This checks coverage, replicas and shapes again, as a commit does."""
    merger = Merger()
    for file in files:
        merger.add(file.rank, file.columns)
    try:
        return merger.finish()
    except HoldfastError as error:
        error.message = f"The data files in {store.url} don't make a checkpoint: {error.message}"
        error.hint = NAME_THEM
        raise


def _about(files: list[WholeFile]) -> dict[str, object]:
    """Return the description in the new index: that of the files, and that it was rebuilt."""
    known = {key: value for key, value in files[0].about.items() if key not in ("rank", "part", "parts")}
    if any(file.about.get("attempt") != known.get("attempt") for file in files):
        known["attempt"] = None  # they were named by somebody who knows that they belong together
    made = {"created": time.time(), "versions": versions(), "reindexed": True}
    return {"step": None, "grid": None, "notes": None} | known | made
