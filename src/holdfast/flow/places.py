"""What a path given to a command is: a checkpoint, a run folder, or nothing we know."""

from __future__ import annotations

import os
from typing import Any

from holdfast.flow.retention import INDEX, step_folders
from holdfast.flow.sources import absent
from holdfast.format.index import Index
from holdfast.store.local import LocalStore, open_store

Place = str | os.PathLike[str]


def checkpoint_or_run(path: Place) -> tuple[LocalStore, bool]:
    """The store, and whether it is a run folder (steps inside, no index of its own)."""
    store = open_store(path)
    inside = store.list()
    if INDEX in inside:
        return store, False
    if step_folders(store):
        return store, True
    raise absent(store)


def about(index: Index) -> dict[str, Any]:
    """The index's own words. They are any JSON, so what is not a dict counts as nothing."""
    said: Any = index.about
    return said if isinstance(said, dict) else {}


def number(value: Any) -> int | None:
    """A whole number out of untrusted JSON, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def moment(value: Any) -> float | None:
    """Seconds since the epoch out of untrusted JSON, or None."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e11 else None
