"""Pins on stores without locks (`Capabilities.pins`): a small file in the step's folder for each reader.

A reader writes its file before it opens the index, and deletes it at its end. A process that removes a step
deletes the index first, and then lists these files. As lists are never late, either the reader finds no
index, or the remover finds the reader's file, and leaves the data.

A reader that was killed leaves its file behind. So a file counts only while it is young, by the clock of the
storage: a file that the remover has just written tells what time it is there. Longer reads renew theirs. A
process that stands still for longer than that gets an error, once its data is gone, and never wrong bytes.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from weakref import WeakSet

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.base.threads import start_thread
from holdfast._core.format.names import PINS
from holdfast._core.store.base import Store, bounded, look_at_files
from holdfast.errors import HoldfastError, StorageError

RENEWED = 120.0
"""Seconds after which a reader writes its file anew."""
EXPIRES = 900.0
"""Seconds, by the storage's clock, for which a file counts: several renewals may fail."""
PATIENCE = 20.0
"""Seconds for a request of a reader: it can do without a pin."""
_DELETED_WITHIN = 1.0
"""Seconds for which the end of a read waits for the deletion."""
_AT_EXIT = 5.0
"""Seconds for which the end of a process waits for all deletions."""
_NOW = "now-"
"""Begins the name of a file that is written to ask for the time."""


class PinFile:
    """A pin. Raises StorageError if it can't be written."""

    def __init__(self, store: Store, seconds: float = PATIENCE) -> None:
        self._store, self._pid = store, os.getpid()
        self._calls: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread. A SimpleQueue, because its `put` may be called by a finalizer at any point."""
        self._ended = threading.Event()
        self._name = _write(bounded(store, Deadline(seconds)), "")
        try:
            start_thread(self._keep, "holdfast-pin")
        except HoldfastError:
            self._delete()
            raise
        _register()
        _live.add(self)

    def _keep(self) -> None:
        # All but the first request on one thread, so that no renewal comes after the deletion.
        while True:
            try:
                self._calls.get(timeout=RENEWED)
            except Empty:
                with suppress(StorageError):  # the next renewal may succeed
                    before, self._name = self._name, _write(self._bounded(), "")
                    self._bounded().delete(before)
                continue
            self._delete()
            self._ended.set()
            return

    def _delete(self) -> None:
        with suppress(HoldfastError):  # then it counts until it expires
            self._bounded().delete(self._name)

    def _bounded(self) -> Store:
        return bounded(self._store, Deadline(PATIENCE))

    def let_go(self) -> None:
        """Have it deleted, without waiting for that."""
        if self._pid == os.getpid():  # a fork has no thread, and its parent still reads
            self._calls.put(None)

    def close(self, seconds: float = _DELETED_WITHIN) -> None:
        """Delete it. Does not wait for longer than this."""
        if self._pid == os.getpid():
            self.let_go()
            self._ended.wait(seconds)


_live: WeakSet[PinFile] = WeakSet()
"""The pins of this process that are or were held."""


@cache
def _register() -> None:
    atexit.register(_give_back)


def _give_back() -> None:
    """At exit: delete all, if storage responds."""
    pins, ends = list(_live), REAL_CLOCK.now() + _AT_EXIT
    for pin in pins:
        pin.let_go()
    for pin in pins:
        pin.close(max(ends - REAL_CLOCK.now(), 0.0))


def _write(store: Store, prefix: str) -> str:
    """Write a file with a new name that begins so; return its path."""
    path = f"{PINS}/{prefix}{os.urandom(8).hex()}"
    writer = store.create(path)
    try:
        writer.write_at(0, [b"{}"])
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    return path


def has_live_pin(store: Store) -> bool:
    """Return whether a process reads the step in a folder. If none does, deletes what others have left.
    Raises StorageError if storage does not tell."""
    paths = [f"{PINS}/{name}" for name in store.list(PINS)]
    if not paths:
        return False
    asked = _write(store, _NOW)
    try:
        look = look_at_files(store, [asked, *paths])
        found, now = {path: look(path) for path in paths}, look(asked)
    finally:
        with suppress(StorageError):
            store.delete(asked)
    if now is None:
        raise StorageError(f"{store.url}/{asked} was written, and is not there.")
    counts = {
        path
        for path, entry in found.items()
        if entry is not None
        and now.modified - entry.modified < EXPIRES
        and not path.startswith(f"{PINS}/{_NOW}")
    }
    for path, entry in found.items():
        # Another remover that asks for the time at this moment tries again later.
        if entry is not None and path not in counts and not counts:
            store.delete(path)
    return bool(counts)
