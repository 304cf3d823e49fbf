"""Pins: no process removes a checkpoint as an old step (`keep=`, `prune --keep`) while another one reads it.

A pin is a shared lock on the index. A process that removes a step first takes an exclusive lock on its index,
and skips the step if that fails. A lock ends with the process that holds it, so no pin outlives a crash; on
NFS it ends with the lease of the host. Locks are visible on other hosts only if the file system supports
that. Without support for locks nothing is pinned, and an old step may be removed while it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Protocol, cast

from holdfast._core.base.deadline import REAL_CLOCK
from holdfast._core.format.names import INDEX
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
from holdfast.errors import HoldfastError

_PIN = 1
"""The byte of the index to lock; byte 0 is locked by publishing."""


class _Lockable(Reader, Protocol):
    """A reader of a store with `Capabilities.locks`."""

    path: str
    fd: int


def _open(store: Store) -> _Lockable:
    return cast("_Lockable", store.open(INDEX))


class Pin:
    """Keeps the checkpoint in a folder until `close`. Has no effect if the folder has no Holdfast index."""

    def __init__(self, store: Store) -> None:
        self._reader: _Lockable | None = None
        self._pid = os.getpid()
        if not capabilities(store).locks:
            return
        ends = REAL_CLOCK.now() + PATIENCE
        with suppress(OSError):  # there is no index, or it can't be read: the reader raises the error
            while self._reader is None and REAL_CLOCK.now() < ends:
                self._try(_open(store))

    @property
    def holds(self) -> bool:
        return self._reader is not None

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
        reader, self._reader = self._reader, None
        if reader is not None:
            # Closing does not unlock the file if a fork has inherited the descriptor. The fork itself must
            # not unlock it when its copy of this object is closed.
            if self._pid == os.getpid():
                unlock(reader.fd, _PIN)
            reader.close()


def is_pinned(store: Store) -> bool:
    """Return whether the checkpoint in a folder is pinned, without locking it."""
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
