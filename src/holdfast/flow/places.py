"""What a path given to a command is: a checkpoint, a run folder, or nothing we know."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.errors import NotCommitted
from holdfast.flow.retention import INDEX, all_steps
from holdfast.format.index import Index
from holdfast.store.base import NotFound, Store
from holdfast.store.local import LocalStore, open_store

Place = str | os.PathLike[str]


def checkpoint_or_run(path: Place) -> tuple[LocalStore, bool]:
    """The store, and whether it is a run folder (steps inside, no index of its own)."""
    store = open_store(path)
    inside = store.list()
    if INDEX in inside:
        return store, False
    if all_steps(store):
        return store, True
    raise nothing_there(store)


def nothing_there(store: Store) -> NotCommitted:
    return NotCommitted(
        f"{store.url} holds no committed checkpoint: there is no {INDEX}.",
        hint="`holdfast latest RUN` names the newest committed step of a run; `holdfast reindex` may recover one.",
    )


@contextmanager
def opened(store: Store) -> Iterator[Index]:
    """The committed index of a checkpoint, closed afterwards; NotCommitted if there is none."""
    try:
        reader = store.open(INDEX)
    except NotFound:
        raise nothing_there(store) from None
    try:
        yield Index(reader.read, reader.size, f"{store.url}/{INDEX}")
    finally:
        reader.close()


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
