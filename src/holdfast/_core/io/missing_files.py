"""A file of a committed checkpoint that is not there: damage, or the checkpoint was removed or replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast._core.io.open_checkpoint import open_source
from holdfast._core.store.base import NotFound, Store
from holdfast._core.store.pins import NOT_PINNED, Pin
from holdfast.errors import CorruptCheckpoint, HoldfastError, Replaced


@contextmanager
def reading(store: Store, identity: str, pin: Pin | None = None) -> Iterator[None]:
    """While a version is read on this process alone: tell a missing file, which is damage, from a checkpoint
    that was removed or replaced, and raise the matching error."""
    try:
        yield
    except NotFound as error:
        if is_still_there(store, identity):
            raise file_missing(store, error) from None
        unpinned = "" if pin is None or pin.holds else f"{NOT_PINNED} "
        raise Replaced(
            f"{store.url} was removed or replaced while it was read.",
            hint=unpinned + "Open it again, or a newer step.",
        ) from None


def is_still_there(store: Store, identity: str) -> bool:
    """Return whether a folder has the version with this identity."""
    try:
        with open_source(store) as source:
            return source.identity == identity
    except HoldfastError:
        # Gone or unreadable: in both cases it is not that version.
        return False


def file_missing(store: Store, error: NotFound) -> CorruptCheckpoint:
    """Return the error for a version that is still there, and lacks a file."""
    return CorruptCheckpoint(
        f"A data file of {store.url} is missing: {error.message}",
        hint=error.hint or "Load an older step, or another copy of this one.",
    )
