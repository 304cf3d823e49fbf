"""Pins: no process removes a checkpoint as an old step (`keep=`, `prune --keep`) while another one reads it.

On stores with locks, a pin is a shared lock on the index. A process that removes a step first takes an
exclusive lock on its index, and skips the step if that fails. A lock ends with the process that holds it, so no pin outlives a crash; on
NFS it ends with the lease of the host. Locks are visible on other hosts only if the file system supports
that. Object stores have no locks: there a pin is a file (`pin_files`). Without either nothing is pinned, and
an old step may be removed while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Protocol, cast

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.format.names import INDEX, PINS
from holdfast._core.store.base import Reader, Store, capabilities
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
from holdfast._core.store.pin_files import PATIENCE as FOR_A_FILE
from holdfast._core.store.pin_files import PinFile
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import HoldfastError

_PIN = 1
"""The byte of the index to lock; byte 0 is locked by publishing."""


NOT_PINNED = "Nothing kept the step for this reader: its storage has no locks, or it may not write there."


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
        self._file: PinFile | None = None
        self._pid = os.getpid()
        # Folders with other names are no steps of a run, so nothing removes them as old ones.
        if capabilities(store).pins and is_spelled_as_ours(store.url.rstrip("/").rpartition("/")[2]):
            seconds = FOR_A_FILE if deadline is None else min(FOR_A_FILE, deadline.left())
            # A reader may have no right to write: it reads all the same, and gets an error if the step goes.
            with suppress(HoldfastError):
                self._file = PinFile(store, seconds)
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
            self._file.close()

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
            return bool(store.list(PINS))
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
