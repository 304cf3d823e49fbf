"""Resolve a path that was given to a command: a checkpoint or a run folder; read values of its index; and
tell which errors of storage say nothing of what lies there."""

from __future__ import annotations

import errno

from holdfast._core.format.names import INDEX
from holdfast._core.store.absence import nothing_there
from holdfast._core.store.base import Folder, NotFound, Store
from holdfast._core.store.local import open_store
from holdfast._core.store.run_folder import committed_steps, step_folders
from holdfast.errors import HoldfastError, NotCommitted

_UNANSWERED = {
    errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT,
}  # fmt: skip
"""What says nothing of the bytes. EIO is not here: a disk says so of bytes that it has lost."""
_ABSENT = 404, 416
"""What an object store says of objects and of bytes that are not there."""


def checkpoint_or_run(path: Folder) -> tuple[Store, bool]:
    """Open the folder. Return its store, and whether it is a run folder (with steps, without an index).

    Raises NotCommitted if it is neither a checkpoint nor a run folder.
    """
    store = open_store(path)
    inside = store.list()
    # An index decides first, because a checkpoint may have folders of any name.
    if INDEX in inside:
        return store, False
    if step_folders(store):
        return store, True
    raise nothing_there(store)


def checkpoint_at(path: Folder) -> Store:
    """Open the checkpoint in a folder, or the newest committed step of a run folder."""
    store, is_run = checkpoint_or_run(path)
    if not is_run:
        return store
    steps = committed_steps(store)
    if not steps:
        begun = ", ".join(map(str, step_folders(store)))
        raise NotCommitted(f"{store.url} is a run folder with no committed step; begun were: {begun}.")
    return store.child(steps[max(steps)])


def number(value: object) -> int | None:
    """Return an integer from untrusted JSON, or None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def moment(value: object) -> float | None:
    """Return seconds since the epoch from untrusted JSON, or None if it is no such number."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e11 else None


def is_unanswered(error: HoldfastError) -> bool:
    """Return whether storage gave this error in place of an answer, such as for a lack of rights: it is no
    damage, and whether there is some can't be told."""
    if isinstance(error, NotFound):
        return False
    of_objects = "status" in error.details and error.details["status"] not in _ABSENT
    return of_objects or error.details.get("errno") in _UNANSWERED
