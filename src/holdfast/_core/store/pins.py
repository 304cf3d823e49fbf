"""Pins: no process removes a checkpoint as an old step (`keep=`, `prune --keep`) while another one reads it.

On stores with locks, a pin is a shared lock on the index. A process that removes a step first takes an
exclusive lock on its index, and skips the step if that fails. A lock ends with the process that holds it, so
no pin outlives a crash; on NFS it ends with the lease of the host. Locks are visible on other hosts only if
the file system supports that.

On object stores (`Capabilities.pins`) a pin is a small file in the step's folder. A reader writes it before
it opens the index, and deletes it at its end. A process that removes a step deletes the index first, and then
lists these files. As lists are never late, either the reader finds no index, or the remover finds the
reader's file, and leaves the data. A reader that was killed leaves its file behind. So a file counts only
while it is young, by the clock of the storage: a file that the remover has just written tells what time it is
there. Longer reads renew theirs. A process that stands still for longer than that gets an error, once its
data is gone, and never wrong bytes.

With neither nothing is pinned, and an old step may be removed while it is read.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from typing import Protocol, cast
from weakref import WeakSet

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.base.threads import members, start_thread
from holdfast._core.format.names import INDEX, PINS
from holdfast._core.store.base import Reader, Store, bounded, capabilities, look_at_files
from holdfast._core.store.filesystem import (
    FIRST_PAUSE,
    PATIENCE,
    close_quietly,
    file_of,
    inode,
    is_locked,
    lock,
    open_to_lock,
    unlock,
)
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import HoldfastError, StorageError

log = logging.getLogger("holdfast")
_PIN = 1
"""The byte of the index to lock; byte 0 is locked by publishing."""
RENEWED = 120.0
"""Seconds after which a reader writes its file anew."""
EXPIRES = 900.0
"""Seconds, by the storage's clock, for which a file counts: several renewals may fail."""
REQUEST = 20.0
"""Seconds for a request for a pin: a reader can do without one."""
TRIED_AGAIN = 10.0
"""Seconds until a pin that could not be written is tried again, while the read goes on."""
_DELETED_WITHIN = 1.0
"""Seconds for which the end of a read waits for the deletion."""
_AT_EXIT = 5.0
"""Seconds for which the end of a process waits for all deletions."""
CLAIM = "ref-"
"""Begins the name of a file by which a later step refers to data of this one
(`holdfast._core.io.references`): no pin, as it does not keep the index."""
_NOW = "now-"
"""Begins the name of a file that is written to ask for the time."""
NOT_PINNED = (
    "Its storage has no locks that keep a step for a reader, or, as an object store, may not be written to."
)


class _Lockable(Reader, Protocol):
    """A reader of a store with `Capabilities.locks`."""

    path: str
    fd: int


def _open(store: Store) -> _Lockable:
    return cast("_Lockable", store.open(INDEX))


class Pin:
    """Keeps the checkpoint in a folder until `close`. Has no effect if the folder has no Holdfast index, or
    if it can't be pinned.

    Open the index after that. deadline: of the call that reads.
    """

    def __init__(self, store: Store, deadline: Deadline | None = None) -> None:
        self._reader: _Lockable | None = None
        self._file: _PinFile | None = None
        self._pid = os.getpid()
        # Folders with other names are no steps of a run, so nothing removes them as old ones.
        if capabilities(store).pins and is_spelled_as_ours(store.url.rstrip("/").rpartition("/")[2]):
            seconds = REQUEST if deadline is None else min(REQUEST, deadline.left())
            # A reader may have no right to write: it reads all the same, and gets an error if the step goes.
            with suppress(HoldfastError):
                self._file = _PinFile(store, seconds)
        if not capabilities(store).locks:
            return
        ends = REAL_CLOCK.now() + PATIENCE
        with suppress(OSError):  # there is no index, or it can't be read: the reader raises the error
            while self._reader is None and REAL_CLOCK.now() < ends:
                self._try(_open(store))

    @property
    def holds(self) -> bool:
        return self._reader is not None or self._file is not None

    def _try(self, reader: _Lockable) -> None:
        try:
            # Checked after locking: the index may just have been deleted by a process that removes the step
            # (which does it while it holds the lock), or replaced by a save.
            if lock(reader.fd, _PIN) and inode(reader.path, follow=True) == file_of(reader.fd):
                self._reader = reader
        finally:
            if self._reader is None:
                reader.close()
                REAL_CLOCK.sleep(FIRST_PAUSE)

    def close(self) -> None:
        self.let_go()
        if self._file is not None:
            self._file.close(_DELETED_WITHIN)

    def let_go(self) -> None:
        """Close it without waiting for storage, as in a finalizer."""
        if self._file is not None:
            self._file.let_go()
        reader, self._reader = self._reader, None
        if reader is not None:
            # Closing does not unlock the file if a fork has inherited the descriptor. The fork itself must
            # not unlock it when its copy of this object is closed.
            if self._pid == os.getpid():
                unlock(reader.fd, _PIN)
            reader.close()


def is_pinned(store: Store) -> bool:
    """Return whether the checkpoint in a folder is pinned, without locking it. On stores without locks the
    pin of a process that was killed counts until the step is removed: nothing is written to find that out."""
    if capabilities(store).pins:
        with suppress(HoldfastError):
            return not all(name.startswith(CLAIM) for name in store.list(PINS))
    if not capabilities(store).locks:
        return False
    with suppress(HoldfastError), closing(_open(store)) as reader:
        return is_locked(reader.fd, _PIN)
    return False


@contextmanager
def unpinned(store: Store) -> Iterator[bool]:
    """Yield whether the checkpoint in a folder is not pinned; if so, it can't be pinned until the block
    ends."""
    if not capabilities(store).locks:
        yield True
        return
    try:
        fd = open_to_lock(f"{store.url}/{INDEX}")
    except OSError:
        yield True
        return
    try:
        yield lock(fd, _PIN, alone=True)
    finally:
        close_quietly(fd)


# -- on stores without locks ---------------------------------------------------------------------


class _PinFile:
    """A pin. Raises StorageError if this process may not write it. If storage can't write it now, its thread
    tries again, and the read goes on meanwhile."""

    def __init__(self, store: Store, seconds: float = REQUEST) -> None:
        self._store, self._pid = store, os.getpid()
        self._path, self._is_there = _new_path(), False
        self._reads = threading.Lock()
        """Held while the step is read. A finalizer may release it at any point of any code."""
        self._reads.acquire()
        self._ended = threading.Event()
        try:
            _write(bounded(store, Deadline(seconds)), self._path)
            self._is_there = True
        except StorageError as error:
            if error.details.get("errno") == errno.EACCES:
                raise
            log.warning(
                "%s is read without a pin until one can be written, and `keep=` or `prune` may remove it: %s",
                store.url,
                error.message,
            )
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
            if self._reads.acquire(timeout=RENEWED if self._is_there else TRIED_AGAIN):
                self._delete()
                self._ended.set()
                return
            with suppress(StorageError):  # the next time it may succeed
                if self._is_there:
                    self._renew()
                else:
                    _write(self._bounded(), self._path)
                    self._is_there = True

    def _renew(self) -> None:
        path = _new_path()
        _write(self._bounded(), path)
        before, self._path = self._path, path
        self._bounded().delete(before)

    def _delete(self) -> None:
        with suppress(HoldfastError):  # then it counts until it expires
            self._bounded().delete(self._path)

    def _bounded(self) -> Store:
        return bounded(self._store, Deadline(REQUEST))

    def let_go(self) -> None:
        """Have it deleted, without waiting for that."""
        if self._pid == os.getpid():  # a fork has no thread, and its parent still reads
            with suppress(RuntimeError):  # a second time
                self._reads.release()

    def close(self, seconds: float) -> None:
        """Delete it. Does not wait for longer than this."""
        if self._pid == os.getpid():
            self.let_go()
            self._ended.wait(seconds)


_live: WeakSet[_PinFile] = WeakSet()
"""The pins of this process that are or were held."""


@cache
def _register() -> None:
    atexit.register(_give_back)


def _give_back() -> None:
    """At exit: delete all, if storage responds."""
    pins, ends = members(_live), REAL_CLOCK.now() + _AT_EXIT
    for pin in pins:
        pin.let_go()
    for pin in pins:
        pin.close(max(ends - REAL_CLOCK.now(), 0.0))


def _new_path(prefix: str = "") -> str:
    return f"{PINS}/{prefix}{os.urandom(8).hex()}"


def _write(store: Store, path: str) -> None:
    writer = store.create(path)
    try:
        writer.write_at(0, [b"{}"])
        writer.finish()
    except BaseException:
        writer.discard()
        raise


def has_live_pin(store: Store, names: list[str] | None = None) -> bool:
    """Return whether a process reads the step in a folder. If none does, deletes what others have left.
    Raises StorageError if storage does not tell. names: what its folder of pins holds, if it was just
    listed."""
    names = store.list(PINS) if names is None else names
    paths = [f"{PINS}/{name}" for name in names if not name.startswith(CLAIM)]
    if not paths:
        return False
    asked = _new_path(_NOW)
    _write(store, asked)
    try:
        look = look_at_files(store, [asked, *paths])
        found, now = {path: look(path) for path in paths}, look(asked)
    finally:
        with suppress(StorageError):
            store.delete(asked)
    if now is None:
        raise StorageError(f"{store.url}/{asked} was written, and is not there.")
    if None in found.values() and {f"{PINS}/{name}" for name in store.list(PINS)} - {asked, *paths}:
        return True  # a pin that has gone may have been renewed meanwhile, under another name
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
