"""Re-read a checkpoint and report all damage, not only the first.

These are checked:

- the index: every page against its digest, then that its rows are valid and tile every tensor;
- each data file: that it exists, its size, and that its header lists exactly the chunks of the index;
- each file's embedded index: its own digests, then that it agrees with the main index;
- unless `quick`, every block of every chunk against its digest.

These checks cover every byte of a checkpoint, so any flipped bit is reported. Damage of one file never hides
that of another: an unreadable part is a finding, and the check continues. But where storage does not answer,
for a lack of rights or in an outage, the check of that step ends: what is not known is not called damaged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import numpy as np

from holdfast._core.base.values import ReportProgress
from holdfast._core.existing.target import checkpoint_or_run, is_unanswered, number
from holdfast._core.format.columns import Columns, unpad
from holdfast._core.format.container import read_header
from holdfast._core.format.digest import digest
from holdfast._core.format.index_pages import PAGE
from holdfast._core.format.local_copy import read_copy
from holdfast._core.format.names import INDEX
from holdfast._core.io.index_file import open_index
from holdfast._core.layout.coverage import first_problem
from holdfast._core.store.base import Folder, Reader, Store
from holdfast._core.store.pins import Pin
from holdfast._core.store.run_folder import own_steps
from holdfast._tools.checkpoints.files_check import Damage, FilesCheck
from holdfast.errors import HoldfastError, NotCommitted


class Verified(msgspec.Struct, frozen=True):
    """The findings in one checkpoint; without any, it is intact."""

    path: str
    step: int | None
    quick: bool
    tensors: int
    chunks: int
    files: int
    bytes_checked: int
    """Bytes of data, without indexes and headers."""
    seconds: float
    whole: bool
    damage: tuple[Damage, ...]


class NotChecked(msgspec.Struct, frozen=True):
    """A step that storage did not let this process read, so that whether it is damaged is not known."""

    path: str
    problem: str


class VerifiedRun(msgspec.Struct, frozen=True):
    """The findings of the committed steps of a run."""

    path: str
    whole: bool
    """Whether all steps were checked, and are whole."""
    steps: tuple[Verified, ...]
    not_checked: tuple[NotChecked, ...] = ()


def verify(
    path: Folder, quick: bool = False, threads: int = 1, progress: ReportProgress = lambda done, total: None
) -> Verified | VerifiedRun:
    """Check a checkpoint, or every committed step of a run folder.

    Raises NotCommitted if there is none, StorageError if storage lets none of them be read.
    """
    store, is_run = checkpoint_or_run(path)
    steps: list[Verified] = []
    refused: dict[str, HoldfastError] = {}
    # Without steps of other formats, because these have no digests.
    for step in [store.child(folder) for folder in own_steps(store).values()] if is_run else [store]:
        try:
            with closing(Pin(step)):
                # Of a run, a step may have been removed as an old one since it was listed.
                if not is_run or step.stat(INDEX) is not None:
                    steps.append(_verify(step, quick, threads, progress))
        except HoldfastError as error:
            if not is_unanswered(error):
                raise
            refused[step.url] = error
    if not steps and refused:
        raise next(iter(refused.values()))
    if not is_run:
        return steps[0]
    if not steps:  # nothing was checked, so don't report it as intact
        raise NotCommitted(
            f"{store.url} has no committed step of Holdfast's to check.",
            hint="`holdfast inspect` shows what there is.",
        )
    not_checked = tuple(NotChecked(url, error.message) for url, error in refused.items())
    is_whole = not not_checked and all(step.whole for step in steps)
    return VerifiedRun(store.url, is_whole, tuple(steps), not_checked)


def _verify(store: Store, quick: bool, threads: int, progress: ReportProgress) -> Verified:
    began, damage = time.monotonic(), list[Damage]()
    opened = _open_index(store, damage)
    if opened is None:
        return Verified(store.url, None, quick, 0, 0, 0, 0, time.monotonic() - began, False, tuple(damage))
    columns, about = opened
    step = number(about.get("step"))
    copy = read_copy(about)
    if copy is None or not copy.is_part:  # of a host's part, other hosts have the rest
        _coverage(columns, damage)
    # Files before data, because `read` needs to know which files are missing or truncated.
    check = FilesCheck(store, columns, about, damage)
    for file in range(len(columns.file_names)):
        check.file(file)
    checked = 0 if quick else check.read(threads, progress)
    return Verified(
        store.url,
        step,
        quick,
        len(columns.names),
        len(columns.file),
        len(columns.file_names),
        checked,
        time.monotonic() - began,
        not damage,
        tuple(damage),
    )


# -- the index ----------------------------------------------------------------------------


def _open_index(store: Store, damage: list[Damage]) -> tuple[Columns, dict[str, object]] | None:
    """Read all rows of the index, and its metadata. If it is damaged, add findings and return None."""
    try:
        with open_index(store) as index, closing(store.open(INDEX)) as reader:
            # Lists all bad pages; `select` would raise at the first.
            pages = list(_bad_pages(reader))
            damage += pages
            return None if pages else (index.select(), index.about)
    except HoldfastError as error:
        if is_unanswered(error):
            raise
        damage.append(Damage(INDEX, error.message))
        return None


def _bad_pages(reader: Reader) -> Iterator[Damage]:
    """Find the pages of an index that do not match their digest. The seal of the index was verified."""
    header = read_header(reader.read, reader.size, INDEX)
    start, stop = header.entries["pages"].data_offsets
    digests = np.frombuffer(reader.read(header.data_start + start, stop - start), "<u8").tolist()
    for page, wanted in enumerate(digests):
        low, high = header.data_start + page * PAGE, header.data_start + min((page + 1) * PAGE, start)
        if digest(reader.read(low, high - low)) != wanted:
            yield Damage(INDEX, f"page {page} of the index does not match its digest", None, low, high)


def _coverage(columns: Columns, damage: list[Damage]) -> None:
    """Find the first tensor that is not tiled exactly once.

    Only the first, because the digests of the index are valid here: the defect is in the writer.
    """
    problem = first_problem(columns.shape, columns.tensor_of_chunk(), columns.offset, columns.size)
    if problem is not None:
        row = problem.tensor
        place = list(unpad(np.asarray(problem.place), int(columns.ndim[row])))
        text = f"the chunks do not tile the tensor: {problem.kind} from {place} on"
        damage.append(Damage(INDEX, text, columns.names[row]))
