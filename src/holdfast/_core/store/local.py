"""Files on a local or network file system, with plain positioned reads and writes.

Durability, in this order: the file's data (fsync), then its name (fsync of the folder, and of every folder
made on the way). fsync may report an error once and then report success, so a file whose fsync failed is
abandoned. `holdfast._core.store.publishing` publishes files.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from holdfast._core.base.values import Buffer
from holdfast._core.store.base import (
    Capabilities,
    Entry,
    Folder,
    Kind,
    NotFound,
    Store,
    checked,
    storage_errors,
)
from holdfast._core.store.filesystem import (
    STALE,
    begin_writeback,
    close_quietly,
    create_file,
    folder_beneath,
    make_durably,
    read_at,
    refuse_dangling,
    retry,
    sync_folder,
)
from holdfast._core.store.publishing import publish
from holdfast.errors import BadInput, StorageError

# Buffers per call: IOV_MAX of Linux.
_IOV = 1024
WRITEBACK = 8 << 20
"""Written bytes after which the kernel is told to start writeback; otherwise storage would stay idle until
`fsync`, or until the kernel has more dirty pages."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]+:/|(?:s3|gs|az):)")
"""What becomes of a URL as a pathlib.Path, which makes one slash of two; and one of ours without any."""


class LocalReader:
    """A file open for reading."""

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        with storage_errors("Opening", path):
            self.fd = retry(partial(_open_within, path, root), STALE)
            try:
                about = os.fstat(self.fd)
                if not stat.S_ISREG(about.st_mode):
                    raise StorageError(f"{path} is not a file; it was not read.")
            except BaseException:
                self.close()
                raise
            self.size = about.st_size

    def read(self, start: int, length: int) -> bytes:
        with storage_errors("Reading", self.path):
            return read_at(self.fd, start, length)

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        with storage_errors("Reading", self.path):
            return _move(os.preadv, self.fd, start, buffers)

    def close(self) -> None:
        if self.fd >= 0:
            close_quietly(self.fd)  # all requested bytes have been read
            self.fd = -1


def _open_within(path: str, root: str) -> int:
    """Open a file for reading. Raises StorageError if it lies outside of the folder after all links were
    followed."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not block us
    # Usually no part of the path below the folder is a link, so the file lies in it. This check costs fewer
    # system calls than resolving both paths, which examines each of their parts.
    if not any(map(os.path.islink, _folders_between(root, path))):
        try:
            return os.open(path, flags | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP:  # it is a link itself
                raise
    real, inside = os.path.realpath(path), os.path.realpath(root)
    # By parts of the path: `/run-2/x` begins with `/run`, but does not lie in it.
    if os.path.commonpath((real, inside)) != inside and not _is_blob(real, inside):
        raise StorageError(f"{path} is a link that leaves its folder; it was not opened.")
    return os.open(real, flags)


def _folders_between(root: str, path: str) -> Iterator[str]:
    """Yield the folders on the way from `root` to a file below it, without `root`."""
    folder = root
    for part in _parts_below(root, path)[:-1]:
        folder = os.path.join(folder, part)
        yield folder


def _parts_below(root: str, path: str) -> list[str]:
    """Return the parts of `path` below `root`. Both are absolute and have no `..`."""
    return path[len(root) :].lstrip("/").split("/")


def _is_blob(real: str, folder: str) -> bool:
    """Return whether the file is a blob of the repository whose snapshot in the Hugging Face cache is
    `folder`. A snapshot consists of links to `blobs`, which lies beside `snapshots`."""
    snapshots, _ = os.path.split(folder)
    repository, name = os.path.split(snapshots)
    return name == "snapshots" and os.path.dirname(real) == os.path.join(repository, "blobs")


def _move(
    call: Callable[[int, list[Buffer], int], int], fd: int, start: int, buffers: Sequence[Buffer]
) -> int:
    """Read or write buffers from `start` on; return the bytes moved: fewer than requested if a call moves
    none, as at the end of the file."""
    total = 0
    for first in range(0, len(buffers), _IOV):
        some = list(buffers[first : first + _IOV])
        stop = total + sum(map(len, some))
        while total < stop:
            # A call may move less than requested: a signal, a network file system.
            moved = call(fd, some, start + total)
            if not moved:
                return total
            total += moved
            if total < stop:
                some = _after(some, moved)
    return total


def _after(buffers: Sequence[Buffer], done: int) -> list[Buffer]:
    """Return the remainder of the buffers after their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [memoryview(buffer)[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


class LocalWriter:
    """A file that was created with O_EXCL, open for writing."""

    def __init__(self, path: str) -> None:
        self._path, self._held_back = path, 0
        with storage_errors("Creating", path):
            self._fd = create_file(path, os.O_RDWR)

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None:
        size = sum(map(len, buffers))
        with storage_errors("Writing", self._path):
            if _move(os.pwritev, self._fd, start, buffers) < size:
                raise OSError(errno.ENOSPC, "no byte was taken")
            # Several threads may write; a lost update of this counter is harmless.
            self._held_back += size
            if self._held_back >= WRITEBACK:
                self._held_back = 0
                begin_writeback(self._fd)

    def finish(self) -> None:
        # The descriptor is forgotten first: after a failed sync the system may have dropped the pages and
        # report success the next time, so it must not be synced again.
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
            close_quietly(fd)
        with suppress(OSError):
            os.unlink(self._path)


class LocalStore:
    """A folder of the file system.

    The path given by the caller may contain links; below it, nothing is written or deleted through a link.
    """

    capabilities = Capabilities(links=True, locks=True, reopens=True)

    def __init_subclass__(cls) -> None:
        # The writer process would open a store of this class, without what the subclass does otherwise.
        cls.capabilities = cls.capabilities._replace(reopens=False)

    def __init__(self, root: str | os.PathLike[str], top: str | None = None) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root
        self._top = top or self.root
        """The folder of the outermost store, as given by the caller."""

    def _full(self, path: str) -> str:
        return os.path.join(self.root, checked(path))

    def open(self, path: str) -> LocalReader:
        return LocalReader(self._full(path), self.root)

    def _for_writing(self, path: str) -> str:
        """Return the full path. Raises StorageError if a folder on the way is a link."""
        # A link that is created between this check and the use of the path is followed. `delete`, which can't
        # be undone, uses descriptors and so has no such race.
        full = self._full(path)
        for folder in _folders_between(self._top, full):
            if os.path.islink(folder):
                raise StorageError(f"{folder} is a link; nothing is written behind it.")
        return full

    def create(self, path: str) -> LocalWriter:
        return LocalWriter(self._for_writing(path))

    def link(self, path: str, source: str) -> None:
        """Create a hard link to the file at the path `source`. It is durable after another file in the same
        folder is finished. Raises StorageError on failure."""
        full = self._for_writing(path)
        with storage_errors("Linking", full):
            make_durably(os.path.dirname(full))
            os.link(source, full, follow_symlinks=False)

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        publish(self._for_writing(path), data, replacing)

    def delete(self, path: str) -> None:
        full = self._full(path)
        *folders, name = _parts_below(self._top, full)
        with (
            storage_errors("Deleting", full),
            # A failed save, `prune` and `keep=` may delete the same file at the same time.
            suppress(FileNotFoundError, NotADirectoryError),
            folder_beneath(self._top, folders) as folder,
        ):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.rmdir(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)

    def remove(self) -> bool:
        try:
            # Fails if the folder contains any file, so no check is needed before.
            if self.root == self._top:
                os.rmdir(self.root)
                return True
            *folders, name = _parts_below(self._top, self.root)
            with folder_beneath(self._top, folders) as folder:
                os.rmdir(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except NotADirectoryError:  # it is a link, or lies under a file
            return not os.path.lexists(self.root)
        except OSError:  # also a StorageError: it lies behind a link
            return False
        return True

    def stat(self, path: str = "") -> Entry | None:
        target = self._full(path) if path else self.root
        with storage_errors("Looking at", target):
            try:
                status = os.stat(target, follow_symlinks=target == self._top)
            except (FileNotFoundError, NotADirectoryError):
                return None
        kind = _kind(status.st_mode)
        return Entry(kind, status.st_size, status.st_mtime, status.st_nlink, status.st_ctime)

    def list(self, folder: str = "") -> list[str]:
        target = self._full(folder) if folder else self.root
        try:
            with storage_errors("Listing", target), os.scandir(target) as entries:
                return sorted(entry.name + ("/" if _leads_to_folder(entry) else "") for entry in entries)
        except NotFound:
            # Only of the place that the caller gave: a link below it that leads nowhere is no step.
            if target == self._top:
                refuse_dangling(target)
            return []

    def child(self, folder: str) -> LocalStore:
        return LocalStore(self._full(folder), self._top)


def _kind(mode: int) -> Kind:
    for is_kind, kind in ((stat.S_ISREG, Kind.FILE), (stat.S_ISDIR, Kind.FOLDER), (stat.S_ISLNK, Kind.LINK)):
        if is_kind(mode):
            return kind
    return Kind.OTHER


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular link, or a target without permission
        return False


def open_store(place: Folder) -> Store:
    """Return the store at a path, where `~` is a home folder, or at a URL (`store.schemes`); or the given
    store, which may be of any class (`holdfast.testing.StoreContract`).

    Raises BadInput if the value can't be a path, StorageError for a URL that no store takes.
    """
    if not isinstance(place, str | bytes | os.PathLike):
        # Duck typing, as for rosters: a user's own class can be a store.
        if not hasattr(place, "publish"):
            raise BadInput(
                f"The path is of type {type(place).__name__}; give a str, a pathlib.Path, or a store.",
                hint="The order is save(state, path) and load(path, state).",
            )
        return place
    text, scheme = _text_of(place)
    if scheme == "file":
        return _local(text)
    from holdfast._core.store.schemes import store_at  # `holdfast latest` of a path starts without it

    return store_at(scheme, text)


def open_local(place: str | os.PathLike[str], doing: str) -> LocalStore:
    """Return the store at a path. Raises BadInput for other places: `doing` needs files of this host."""
    text, scheme = _text_of(place)
    if scheme != "file":
        raise BadInput(
            f"{doing} needs a local path, not {scheme}://.",
            hint="Give a folder of this host, and copy it there or from there by your cloud's own tool.",
        )
    return _local(text)


def _text_of(place: str | os.PathLike[str]) -> tuple[str, str]:
    """Return a path or URL as text, and its scheme: "file" for a path, whose text has no scheme."""
    if not isinstance(place, str | bytes | os.PathLike):
        raise BadInput(f"The path is of type {type(place).__name__}; give a str or a pathlib.Path.")
    text = os.fspath(place)
    if not isinstance(text, str):
        raise BadInput(f"{text!r} is bytes; give the path as a str.")
    if "\0" in text:
        raise BadInput(f"{text!r} is not a path: it has a null character in it.")
    url = _URL.match(text)
    if url is None:
        if _ALMOST_URL.match(text):
            raise BadInput(
                f"{text!r} would be a local folder named {text.lstrip().split('/')[0]!r}.",
                hint="Give a URL as a str, with two slashes: a pathlib.Path makes one of them. Give a folder "
                "of that name by its absolute path.",
            )
        return text, "file"
    if url[1] != "file":
        return text, url[1]
    if url[2] and not url[2].startswith(("/", "~", ".")):
        raise BadInput(
            f"{text!r} names {url[2].split('/')[0]!r} as a host, and no file of another host can be read.",
            hint=f"An absolute path has three slashes: file:///{url[2]}. A relative one is given without file://.",
        )
    return url[2], "file"


def _local(text: str) -> LocalStore:
    if not text:
        raise BadInput("The path is empty.", hint="The current folder is '.'.")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise BadInput(
            f"{text!r}: {text.split('/')[0]} is no user's home folder here.",
            hint=f"A folder of that name is './{text}'.",
        )
    try:
        store = LocalStore(expanded)
    except FileNotFoundError:
        raise BadInput(f"{text!r} is relative, and the current folder of this process is gone.") from None
    try:
        # Python represents bytes that are not UTF-8 as lone surrogates, which no message can carry.
        store.root.encode()
    except UnicodeEncodeError:
        raise BadInput(
            f"{store.root!r} is not valid UTF-8, in which ranks tell each other their paths.",
            hint="Rename the folder.",
        ) from None
    return store
