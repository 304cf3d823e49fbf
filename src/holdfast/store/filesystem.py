"""What the local store asks of the system: calls that are tried again, folders that are durable, paths that
pass no link."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from holdfast.deadline import REAL_CLOCK
from holdfast.errors import StorageError

log = logging.getLogger("holdfast")
T = TypeVar("T")
PATIENCE = 30.0
"""Seconds that a call which may pass by itself is tried again."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0
VANISHING = 5.0
"""Seconds that folders are made anew because a failed save takes its empty ones away at the same moment."""
STALE = frozenset({errno.ESTALE})
"""A network file system lost a file's handle: what has the name now is found by opening it again."""
# Descriptors that are used up (EMFILE, ENFILE) are given back by other threads and processes.
PASSING = STALE | {errno.EINTR, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
"""Failures to open something that say nothing of it."""
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
"""To go through a folder, which needs less than to list it."""
_warned: set[int] = set()
"""Devices of which was said that they can't sync folders."""


def retry(action: Callable[[], T], passing: frozenset[int] | None = None) -> T:
    """Call `action`; try again, with growing pauses, while its errno is one of `passing` (None: any but
    ENOENT).

    Raises the last error after PATIENCE seconds.
    """
    ends = REAL_CLOCK.now() + PATIENCE
    pause = FIRST_PAUSE
    while True:
        try:
            return action()
        except OSError as error:
            passes = error.errno != errno.ENOENT if passing is None else error.errno in passing
            if not passes or REAL_CLOCK.now() + pause > ends:
                raise
        # Pauses grow, because thousands of ranks may be asking one server.
        REAL_CLOCK.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def close_quietly(fd: int) -> None:
    """Close a descriptor to which nothing is owed any more: read from, or synced already."""
    try:
        os.close(fd)
    except OSError as error:
        log.debug("Closing a descriptor failed: %s", error)


def inode(path: str, follow: bool = False) -> tuple[int, int] | None:
    """Device and number of the file that has a name now (of a link, or with `follow` of what it leads to);
    None if none has.

    The file is opened, because that makes a network file system ask its server; where that can't be done, the
    name is looked up.
    """
    try:
        # O_NONBLOCK: opening a pipe would wait for its other end. O_NOFOLLOW refuses a link, which
        # is looked up below.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except FileNotFoundError:
        return None
    except OSError:
        try:
            status = os.stat(path, follow_symlinks=follow)
        except FileNotFoundError:
            return None
    else:
        try:
            status = os.fstat(fd)
        finally:
            close_quietly(fd)
    return status.st_dev, status.st_ino


# -- folders ------------------------------------------------------------------------------------


def open_folder(path: str) -> int:
    """A descriptor of a folder."""
    return retry(partial(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), PASSING)


def sync_open_folder(fd: int, path: str) -> None:
    """Make the names in a folder durable; where a file system can't, say so once and go on.

    A sync that failed is not tried again: the system may have dropped what it could not write.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
        device = os.fstat(fd).st_dev
        if device not in _warned:
            _warned.add(device)
            log.warning(
                "%s: this file system can't sync a folder (%s), so nothing can promise that files which were "
                "committed there keep their names over a power cut.",
                path,
                os.strerror(error.errno or 0),
            )


def sync_folder(path: str) -> None:
    """`sync_open_folder` of a path."""
    fd = open_folder(path)
    try:
        sync_open_folder(fd, path)
    finally:
        close_quietly(fd)


def make_folders(path: str) -> list[str]:
    """mkdir -p. The folders that hold a new name are returned; syncing them makes the names durable."""
    missing = []
    # Not os.makedirs, because what was missing must be known: those are the names to be made durable.
    while not os.path.isdir(path) and path != os.path.dirname(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Mostly another rank was faster. Its folder is returned as well: it may die before it
            # has synced the name.
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise StorageError(
                    f"{folder} is a file, not a folder.", details={"errno": errno.ENOTDIR}
                ) from None
    return [os.path.dirname(folder) for folder in reversed(missing)]


def create_file(path: str, access: int) -> int:
    """A descriptor of a new file, in folders that are made, durably, if they are not there.

    A failed save takes its empty folders away, maybe at the same moment: then they are made again. They are
    synced once the file is in them, and they can't go any more.
    """
    ends = REAL_CLOCK.now() + min(VANISHING, PATIENCE)
    while True:
        try:
            grown = make_folders(os.path.dirname(path))
            fd = os.open(path, access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            break
        except FileNotFoundError:
            if REAL_CLOCK.now() >= ends:
                raise
        REAL_CLOCK.sleep(0.001)
    try:
        for folder in grown:
            sync_folder(folder)
    # The caller has no writer yet that could discard the file.
    except BaseException:
        close_quietly(fd)
        with suppress(OSError):
            os.unlink(path)
        raise
    return fd


@contextmanager
def folder_beneath(root: str, parts: Sequence[str]) -> Iterator[int]:
    """A descriptor of the folder that `parts` name below `root`, none of which may be a link; `root` itself
    may be one."""
    fd = os.open(root, _SEARCH)
    try:
        path = root
        for part in parts:
            path = os.path.join(path, part)
            # Each folder is opened inside of the one before, so no name on the way can be
            # exchanged for a link.
            inside = _open_inside(fd, part, path)
            close_quietly(fd)
            fd = inside
        yield fd
    finally:
        close_quietly(fd)


def _open_inside(folder: int, name: str, path: str) -> int:
    try:
        return os.open(name, _SEARCH | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        # The errno does not tell: with O_DIRECTORY a link is ENOTDIR, and so is a file.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise StorageError(f"{path} is a link; nothing behind it is deleted.") from None
        raise
