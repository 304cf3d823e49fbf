"""Files on a local or network file system, with plain positioned reads and writes.

Durability, in this order: the file's data (fsync), then its name (fsync of the folder, and of
every folder made on the way). fsync may report an error once and then lie, so a file whose
fsync failed is abandoned. `publish` writes a hidden neighbour, syncs it, and puts it in place
by `link` (which fails if the name exists) or by `rename` (which replaces it at once). Before it
renames it locks the version that it replaces, so that of several that replace it one wins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress

from holdfast.buffers import Buffer
from holdfast.errors import Conflict, StorageError
from holdfast.store.base import TAIL, NotFound, checked, storage_errors

_IOV = 1024
_HIDDEN = ".publishing-"


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_folders(path: str) -> None:
    """mkdir -p whose every new name is durable."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(folder)
        sync_folder(os.path.dirname(folder))


class LocalReader:
    """An open file descriptor."""

    def __init__(self, path: str, root: str) -> None:
        self._path = path
        with storage_errors("Opening", path):
            real, inside = os.path.realpath(path), os.path.realpath(root)
            if os.path.commonpath((real, inside)) != inside:
                raise StorageError(f"{path} is a link that leaves its folder; it was not opened.")
            self._fd = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block us
            about = os.fstat(self._fd)
            if not stat.S_ISREG(about.st_mode):
                self.close()
                raise StorageError(f"{path} is not a file; it was not read.")
            self.size = about.st_size

    def read(self, start: int, length: int) -> bytes:
        with storage_errors("Reading", self._path):
            parts, at = [], start
            while length > 0:
                part = os.pread(self._fd, min(length, 1 << 30), at)
                if not part:
                    break
                parts.append(part)
                at, length = at + len(part), length - len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        with storage_errors("Reading", self._path):
            total = 0
            for first in range(0, len(buffers), _IOV):
                some = buffers[first : first + _IOV]
                wanted = sum(map(len, some))
                got = os.preadv(self._fd, some, start + total)
                while got < wanted:
                    rest = _after(some, got)
                    more = os.preadv(self._fd, rest, start + total + got)
                    if not more:
                        return total + got
                    got += more
                total += wanted
            return total

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _after(buffers: Sequence[Buffer], done: int) -> list[Buffer]:
    """What is left of buffers after `done` bytes of them."""
    for at, buffer in enumerate(buffers):
        if done < len(buffer):
            return [memoryview(buffer)[done:], *buffers[at + 1 :]]
        done -= len(buffer)
    return []


def _link(source: str, target: str) -> None:
    """A second name for a file; fails if the name is taken, which no other call promises as widely."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise StorageError(
                f"{target} can't be put in place: this file system makes no hard links ({os.strerror(error.errno)}).",
                hint="Save to a file system that does (ext4, XFS, Lustre, GPFS, NFS).",
                details={"errno": error.errno},
            ) from None
        raise


class LocalWriter:
    """A file descriptor opened with O_EXCL."""

    def __init__(self, path: str) -> None:
        self._path = path
        with storage_errors("Creating", path):
            _make_folders(os.path.dirname(path))
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None:
        with storage_errors("Writing", self._path):
            for first in range(0, len(buffers), _IOV):
                some = list(buffers[first : first + _IOV])
                wanted = sum(map(len, some))
                done = 0
                while done < wanted:
                    wrote = os.pwritev(self._fd, _after(some, done) if done else some, start + done)
                    if wrote == 0:
                        raise OSError(errno.ENOSPC, "no byte was taken")
                    done += wrote
                start += wanted

    def finish(self) -> None:
        fd, self._fd = self._fd, -1
        with storage_errors("Syncing", self._path):
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            sync_folder(os.path.dirname(self._path))

    def discard(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        with suppress(OSError):
            os.unlink(self._path)


class LocalStore:
    """A folder of the file system."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root

    def _full(self, path: str) -> str:
        return os.path.join(self.root, checked(path))

    def open(self, path: str) -> LocalReader:
        return LocalReader(self._full(path), self.root)

    def create(self, path: str) -> LocalWriter:
        return LocalWriter(self._full(path))

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        target = self._full(path)
        folder = os.path.dirname(target)
        hidden = os.path.join(folder, _HIDDEN + secrets.token_hex(8))
        with storage_errors("Publishing", target):
            _make_folders(folder)
            fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                try:
                    view = memoryview(data)
                    while len(view):
                        view = view[os.write(fd, view[: 1 << 30]) :]
                    os.fsync(fd)
                finally:
                    os.close(fd)
                if replacing is None:
                    _link(hidden, target)
                    os.unlink(hidden)
                else:
                    self._replace(hidden, target, replacing)
            except FileExistsError:
                raise Conflict(
                    f"{target} was put in place by another save since this one began; that one stands, this one is void.",
                    hint="Give every job its own folder.",
                ) from None
            finally:
                with suppress(OSError):
                    os.unlink(hidden)
            sync_folder(folder)
            sync_folder(os.path.dirname(folder))

    @staticmethod
    def _replace(hidden: str, target: str, replacing: bytes) -> None:
        """Rename if what is there is still the version to replace, which is locked meanwhile."""
        other = FileExistsError(errno.EEXIST, "it is another version now")
        try:
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise other from None
        try:
            here = os.fstat(fd)
            if os.pread(fd, TAIL, max(here.st_size - TAIL, 0)) != replacing:
                raise other
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # freed by close, and by death
            except BlockingIOError:
                raise other from None
            except OSError:
                pass  # a file system without locks: the check above is all there is
            now = os.stat(target)
            if (now.st_dev, now.st_ino) != (here.st_dev, here.st_ino):
                raise other
            os.rename(hidden, target)
        except FileNotFoundError:
            raise other from None
        finally:
            os.close(fd)

    def delete(self, path: str) -> None:
        target = self._full(path)
        with storage_errors("Deleting", target), suppress(FileNotFoundError, NotADirectoryError):
            if os.path.isdir(target) and not os.path.islink(target):
                os.rmdir(target)
            else:
                os.unlink(target)

    def list(self, folder: str = "") -> list[str]:
        target = self._full(folder) if folder else self.root
        try:
            with storage_errors("Listing", target), os.scandir(target) as entries:
                return sorted(entry.name + ("/" if entry.is_dir() else "") for entry in entries)
        except NotFound:
            return []

    def child(self, folder: str) -> LocalStore:
        return LocalStore(self._full(folder))


def open_store(place: str | os.PathLike[str]) -> LocalStore:
    """The store at a path. (Object stores will be told by their URL.)"""
    text = os.fspath(place)
    if "://" in text:
        scheme, _, rest = text.partition("://")
        if scheme != "file":
            raise StorageError(f"{text!r}: this Holdfast stores to paths, not to {scheme}:// places.")
        text = rest
    return LocalStore(text)
