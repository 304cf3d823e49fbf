"""Publishes a small file atomically, and determines after an error whether it is in place.

A hidden file beside the target is written and synced, and put in place by `link`, which fails if the name
exists, or by `rename`, which replaces atomically. Before `rename` the version to replace is locked, so that
one of several replacements succeeds. Then the folder is synced.

The results of these calls can be wrong. On a network file system a reply can be lost and the request be sent
again: then `link` reports EEXIST and `rename` ENOENT although the first request succeeded. After a timeout
the server may still execute them later. So after every failure, the inode at the target name is compared with
that of the hidden file, whose descriptor is still open so that its number can't be reused. If they differ,
the hidden name, which a late `link` or `rename` would need, is removed, and the inode is compared once more.
Only then is it known that the new version is not in place. If this can't be determined, `Unsettled` is
raised.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress

from holdfast._core.store.base import VERSION_BYTES, Unsettled, storage_errors
from holdfast._core.store.filesystem import (
    STALE,
    close_quietly,
    create_file,
    file_of,
    inode,
    lock,
    open_folder,
    open_to_lock,
    read_at,
    retry,
    sync_open_folder,
)
from holdfast.errors import Conflict, StorageError

HIDDEN = ".publishing-"
_PUBLISH = 0
"""The byte of a published file that is locked while it is replaced; readers lock the next one (`pins`)."""
# Errors of `link` on file systems without hard links. `rename` is no substitute: it would replace a file that
# another save has published meanwhile.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class _Hidden:
    """The new version, under a hidden name."""

    def __init__(self, folder: str) -> None:
        # A random name, so that it can't collide with a file left behind by a crash.
        self.path = os.path.join(folder, HIDDEN + os.urandom(8).hex())
        self._fd = create_file(self.path, os.O_WRONLY)
        self._named = True
        self._links = 1

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):  # one write takes 2 GiB at most, and may take less
            view = view[os.write(self._fd, view[: 1 << 30]) :]
        os.fsync(self._fd)  # before it gets its name, so that the named file is complete even after a crash
        self._links = os.fstat(self._fd).st_nlink

    def link(self, target: str) -> None:
        """Create a second name for the file, which must not exist yet."""
        os.link(self.path, target)

    def rename(self, target: str) -> None:
        """Rename the file, replacing an existing file of that name."""
        os.rename(self.path, target)
        self._named = False

    def is_at(self, target: str) -> bool | None:
        """Return whether this file has the name `target`, after `link` or `rename` failed; None if that can't
        be determined.

        False is final.
        """
        try:
            # Any error but ENOENT is retried here: an unknown result is the worst one, so it is worth
            # PATIENCE seconds.
            here = retry(lambda: os.fstat(self._fd))
            mine = here.st_dev, here.st_ino
            if here.st_nlink > self._links or retry(lambda: inode(target)) == mine:
                return True
            self._close()  # a network file system keeps a file that is open
            retry(self._remove)
            return None if retry(lambda: inode(target)) == mine else False
        except OSError:  # also ENOENT: only our own `rename` removes the hidden name
            return None

    def _remove(self) -> None:
        os.unlink(self.path)
        self._named = False

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def discard(self) -> None:
        """Close the file and remove the hidden name; one that stays is removed by `prune`."""
        self._close()
        if self._named:
            with suppress(OSError):
                self._remove()


def publish(target: str, data: bytes, replacing: bytes | None) -> None:
    """Implement `holdfast._core.store.base.Store.publish` for a path."""
    folder = os.path.dirname(target)
    with ExitStack() as opened, storage_errors("Publishing", target):
        hidden = _Hidden(folder)
        # Registered before the first write, so that a full disk does not leave the hidden file behind.
        opened.callback(hidden.discard)
        hidden.write(data)
        folders: dict[str, int] = {}
        # The parent as well: the rank that made the step's folder need not have synced its name.
        parent = os.path.dirname(folder)
        for path in (folder, parent):
            # Opened in advance, so that running out of descriptors can't fail a version that is in place.
            try:
                folders[path] = open_folder(path)
            except PermissionError:
                if path != parent:
                    raise
                continue  # a folder of another user that can't be read: its names were there before
            opened.callback(close_quietly, folders[path])
        if replacing is None:
            _settle(hidden, target, hidden.link)
        else:
            opened.callback(close_quietly, _lock(target, replacing))
            _settle(hidden, target, hidden.rename)
        hidden.discard()  # before the sync, which makes this durable as well
        try:
            for path, fd in folders.items():
                sync_open_folder(fd, path)
        except OSError as error:
            raise _unsettled(f"{target} is in place, but syncing its folder failed", True, error) from None


def _settle(hidden: _Hidden, target: str, act: Callable[[str], None]) -> None:
    """Put the file in place by calling `act`. Raises `Unsettled` if the result can't be determined."""
    try:
        act(target)
    except OSError as error:
        # Also after FileExistsError: if the first reply was lost, the existing link may be our own.
        there = hidden.is_at(target)
        if there:
            return
        if there is None:
            raise _unsettled(f"Whether {target} is in place can't be told", False, error) from None
        if isinstance(error, FileExistsError):
            raise _conflict(target) from None
        if act == hidden.link and error.errno in _NO_LINKS:
            raise StorageError(
                f"{target} can't be put in place: this file system makes no hard links "
                f"({os.strerror(error.errno or 0)}).",
                hint="Save to a file system that does (ext4, XFS, Lustre, GPFS, NFS).",
                details={"errno": error.errno},
            ) from None
        raise


def _lock(target: str, replacing: bytes) -> int:
    """Open and lock the version in place; return the descriptor. Raises `Conflict` if it is not the version
    to replace."""
    try:
        fd = retry(lambda: open_to_lock(target), STALE)
    except FileNotFoundError:
        raise _conflict(target) from None
    try:
        # Check the content first: a lock on another version would be meaningless.
        here = os.fstat(fd)
        if (
            not stat.S_ISREG(here.st_mode)
            or read_at(fd, max(here.st_size - VERSION_BYTES, 0), VERSION_BYTES) != replacing
        ):
            raise _conflict(target)
        if not lock(fd, _PUBLISH, alone=True):  # released by close, and at the process's end
            raise _conflict(target)
        # Another save may have replaced it between open and lock; then the lock is on an unlinked file.
        if inode(target, follow=True) != file_of(fd):
            raise _conflict(target)
    except BaseException:
        close_quietly(fd)
        raise
    return fd


def _conflict(target: str) -> Conflict:
    return Conflict(
        f"{target} was put in place by another save since this one began; that one stands, this one is void.",
        hint="Give every job its own folder.",
    )


def _unsettled(sentence: str, in_place: bool, error: OSError) -> Unsettled:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return Unsettled(f"{sentence}: {reason}.", details={"errno": error.errno, "in_place": in_place})
