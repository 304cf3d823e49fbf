"""What a path given to a command is: a checkpoint, a run folder, or nothing we know."""

from __future__ import annotations

import os

from holdfast.errors import NotCommitted
from holdfast.format.index import Index
from holdfast.format.names import INDEX
from holdfast.io.index_file import nothing_there
from holdfast.store.local import LocalStore, open_store
from holdfast.store.run_folder import committed_steps, step_folders

Place = str | os.PathLike[str]


def checkpoint_or_run(path: Place) -> tuple[LocalStore, bool]:
    """The store, and whether it is a run folder (steps inside, no index of its own)."""
    store = open_store(path)
    inside = store.list()
    # An index decides, whatever lies beside it: a checkpoint may hold folders of any name.
    if INDEX in inside:
        return store, False
    if step_folders(store):
        return store, True
    raise nothing_there(store)


def checkpoint_at(path: Place) -> LocalStore:
    """The checkpoint that a path means: the one in that folder, or the newest committed step of a run
    folder."""
    store, is_run = checkpoint_or_run(path)
    if not is_run:
        return store
    steps = committed_steps(store)
    if not steps:
        begun = ", ".join(map(str, step_folders(store)))
        raise NotCommitted(f"{store.url} is a run folder with no committed step; begun were: {begun}.")
    return store.child(steps[max(steps)])


def about(index: Index) -> dict[str, object]:
    """The index's own words. They are any JSON, so what is not a dict counts as nothing."""
    said: object = index.about
    return said if isinstance(said, dict) else {}


def number(value: object) -> int | None:
    """A whole number out of untrusted JSON, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def moment(value: object) -> float | None:
    """Seconds since the epoch out of untrusted JSON, or None."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e11 else None
