"""System calls of the local store: with retries and complete transfers, locks, durable folders, paths without
links."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from holdfast._core.base.deadline import REAL_CLOCK
from holdfast.errors import StorageError

log = logging.getLogger("holdfast")
T = TypeVar("T")
PATIENCE = 30.0
"""Seconds for which a call is retried after a transient error."""
FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0
VANISHING = 5.0
"""Seconds for which folders are recreated if a failed save removes its empty folders at the same time."""
STALE = frozenset({errno.ESTALE})
"""A network file system lost the handle of a file. Reopening the name finds the current file."""
# EMFILE, ENFILE: other threads and processes will close some of their descriptors.
PASSING = STALE | {errno.EINTR, errno.EAGAIN, errno.EMFILE, errno.ENFILE}
"""Transient errors of `open`."""
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags to traverse a folder, which needs fewer permissions than listing it."""
_sync_file_range = ctypes.CDLL(None).sync_file_range
"""A Linux function that Python's `os` lacks."""
_warned: set[int] = set()
"""Devices that can't sync folders, about which a warning was logged."""


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
    """Close a descriptor that was only read from, or is synced already."""
    try:
        os.close(fd)
    except OSError as error:
        log.debug("Closing a descriptor failed: %s", error)


def begin_writeback(fd: int) -> None:
    """Have the kernel begin to write the pages of a file to storage, so that less is left for `fsync`.

    It does not wait, reports no errors, and makes nothing durable; `fsync` does all of these.
    """
    _sync_file_range(fd, ctypes.c_int64(0), ctypes.c_int64(0), 2)  # all of it, SYNC_FILE_RANGE_WRITE


def read_at(fd: int, start: int, length: int) -> bytes:
    """Return bytes of a file; fewer only at its end. (A single system call may return fewer, after a signal
    or on a network file system.)"""
    parts = []
    while length > 0:
        # Linux reads at most 2 GiB less a page per call.
        part = os.pread(fd, min(length, 1 << 30), start)
        if not part:
            break
        parts.append(part)
        start, length = start + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def inode(path: str, follow: bool = False) -> tuple[int, int] | None:
    """Return the device and inode of the file that has a name now; None if there is none.

    follow: for a link, return those of its target.

    The file is opened, because that makes a network file system ask its server. If it can't be opened, `stat`
    is used.
    """
    with suppress(FileNotFoundError):
        try:
            # O_NONBLOCK: opening a pipe would wait for its other end. O_NOFOLLOW refuses a link.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
        except FileNotFoundError:
            raise
        except OSError:
            status = os.stat(path, follow_symlinks=follow)
            return status.st_dev, status.st_ino
        try:
            return file_of(fd)
        finally:
            close_quietly(fd)
    return None


def file_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


# -- locks --------------------------------------------------------------------------------------


def open_to_lock(path: str) -> int:
    """Open a file for `lock`: for writing if permitted, because an exclusive lock requires it."""
    flags = os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR):
            raise
        return os.open(path, os.O_RDONLY | flags)


def lock(fd: int, byte: int, alone: bool = False) -> bool:
    """Lock one byte of an open file until it is closed, shared or exclusive (`alone`), without waiting.
    Return False if another open file holds a conflicting lock; True also if locks are not supported."""
    # A lock of the open file, not of the process (`lockf`): threads must not release each other's locks. Not
    # `flock`, which locks the whole file: the locks of readers and of replacing writers are independent.
    try:
        _set_lock(fd, byte, fcntl.F_WRLCK if alone else fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_locked(fd: int, byte: int) -> bool:
    """Return whether another open file description holds a lock on one byte of the file; False if unknown."""
    asked = _lock_of(fcntl.F_WRLCK, byte)
    try:
        found = fcntl.fcntl(fd, getattr(fcntl, "F_OFD_GETLK", 36), asked)
    except OSError:
        return False
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def unlock(fd: int, byte: int) -> None:
    """Release a lock, for all processes that have inherited the descriptor."""
    with suppress(OSError):
        _set_lock(fd, byte, fcntl.F_UNLCK)


def _set_lock(fd: int, byte: int, kind: int) -> None:
    # Python has the constant only if it was built with a glibc of 2014 or later.
    fcntl.fcntl(fd, getattr(fcntl, "F_OFD_SETLK", 37), _lock_of(kind, byte))


def _lock_of(kind: int, byte: int) -> bytes:
    return struct.pack("hh4xqqi4x", kind, os.SEEK_SET, byte, 1, 0)


# -- folders ------------------------------------------------------------------------------------


def open_folder(path: str) -> int:
    return retry(partial(os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), PASSING)


def sync_open_folder(fd: int, path: str) -> None:
    """Make the names in a folder durable. If the file system does not support it, log a warning once.

    A failed sync is not retried: the system may have dropped what it could not write.
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
    """Open a folder by its path and call `sync_open_folder`."""
    fd = open_folder(path)
    try:
        sync_open_folder(fd, path)
    finally:
        close_quietly(fd)


def make_folders(path: str) -> list[str]:
    """Create a missing folder and its missing parents. Return the folders in which a name was created:
    syncing them makes the names durable."""
    # Not os.makedirs, because the names of the missing folders must be made durable.
    parent = os.path.dirname(path)
    try:
        _make_folder(path)
    # NotADirectoryError: a part of the path is a file; the recursive call for that part raises the error.
    except (FileNotFoundError, NotADirectoryError):
        if parent == path:
            raise
        grown = make_folders(parent)
        _make_folder(path)
        return [*grown, parent]
    return [parent]


def _make_folder(path: str) -> None:
    try:
        os.mkdir(path)
    except FileExistsError:
        # Usually another rank was faster. The name is synced here as well, because that rank may die before
        # it syncs it.
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            refuse_dangling(path)
            raise  # removed again meanwhile
        if not stat.S_ISDIR(mode):
            raise StorageError(f"{path} is a file, not a folder.", details={"errno": errno.ENOTDIR}) from None


def refuse_dangling(path: str) -> None:
    """Raise StorageError if a path does not exist because a link in it leads nowhere: storage that is not
    mounted looks like that, and nobody can tell what it holds."""
    while True:
        try:
            mode = os.lstat(path).st_mode
            break
        except (FileNotFoundError, NotADirectoryError):
            if (parent := os.path.dirname(path)) == path:
                return
            path = parent
    if stat.S_ISLNK(mode) and not os.path.exists(path):
        raise StorageError(
            f"{path} is a link to {os.readlink(path)!r}, which does not exist.",
            hint="Is that mounted on this host? Else make it, or remove the link.",
            details={"errno": errno.ENOENT},
        )


def make_durably(path: str) -> None:
    """Make a folder and its missing parents, and sync their names."""
    if not os.path.isdir(path):
        for folder in make_folders(path):
            sync_folder(folder)


def create_file(path: str, access: int) -> int:
    """Create a file and return its descriptor. Missing folders are made, durably.

    A failed save may remove its empty folders at the same time; then they are created again. They are synced
    after the file is in them, because non-empty folders are not removed.
    """
    ends: float | None = None
    grown: list[str] = []
    while True:
        try:
            # Try this first: usually the folder exists, and a check would be an extra call.
            fd = os.open(path, access | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            break
        except (FileNotFoundError, NotADirectoryError):
            # Never at the first failure: storage may have taken long to say that there is no folder.
            if ends is None:
                ends = REAL_CLOCK.now() + min(VANISHING, PATIENCE)
            elif REAL_CLOCK.now() >= ends:
                raise
        with suppress(FileNotFoundError):  # removed again meanwhile
            grown += make_folders(os.path.dirname(path))
            continue
        REAL_CLOCK.sleep(0.001)
    try:
        for folder in dict.fromkeys(grown):
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
    """Open the folder that `parts` name below `root`. None of the parts may be a link; `root` itself may be
    one."""
    fd = os.open(root, _SEARCH)
    try:
        path = root
        for part in parts:
            path = os.path.join(path, part)
            # Each folder is opened relative to the one before, so no name on the way can be replaced by a
            # link.
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
        # The errno does not tell: with O_DIRECTORY both a link and a file give ENOTDIR.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise StorageError(f"{path} is a link; nothing behind it is deleted.") from None
        raise
