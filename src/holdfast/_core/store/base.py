"""The storage interface: everything that Holdfast requires of a store.

A store is a folder. Names are relative, with `/`, and never leave it. Every failure is a `StorageError` that
names the file and the reason; a missing file is `NotFound`. The protocol relies on these promises, which
`holdfast.testing.StoreContract` checks for any implementation:

- after `Writer.finish` has returned, the file is durable, including its name;
- `publish` is atomic: a reader, or the next boot, sees all of the old bytes or all of the new ones;
- of several `publish` calls that replace the same version, one succeeds and the others raise `Conflict`;
- the error of `publish` tells whether the new version is in place: only if it is not, the data that it refers
  to is deleted;
- `create`, `publish` and `delete` follow no links: the target of a link belongs to somebody else.

What only some stores can do, a store states in `Capabilities`. Callers ask for these, never for its class.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import closing
from enum import Enum
from functools import cache
from typing import NamedTuple, Protocol, cast

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.values import Buffer
from holdfast._core.format.names import split_reference
from holdfast.errors import BadInput, StorageError

VISIBLE_WITHIN = 75.0
"""Seconds that a network file system may take to show another host's file: NFS caches folders for 60."""
# An index ends with its seal, and the owner file of a run with random text, new for each version. So the ends
# of two versions differ, and one small read tells them apart.
VERSION_BYTES = 16
"""Number of bytes at the end of a published file that tell one version of it from another."""


class NotFound(StorageError):
    """No such file."""


class Unsettled(StorageError):
    """`publish` failed, but the new version is, or may be, in place: its data must not be deleted."""

    @property
    def in_place(self) -> bool:
        """True: it is in place, but perhaps not durable. False: that can't be told."""
        return bool(self.details.get("in_place"))


class OtherSize(StorageError):
    """A file has another size than `open_known` was told."""

    @classmethod
    def of(cls, size: int) -> OtherSize:
        return cls(f"It has {size} bytes.", details={"size": size})

    @property
    def size(self) -> int:
        return int(self.details["size"])


class Kind(Enum):
    """File type."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


FOLDERS = (Kind.FOLDER, Kind.LINK)
"""File types that the root folder of a store may have."""


class Entry(NamedTuple):
    """The metadata of a name in a store."""

    kind: Kind
    size: int
    modified: float
    """Seconds since the epoch, by the storage's clock; 0 if it has none."""
    links: int = 1
    """Number of hard links to the file."""
    named: float = 0.0
    """Time of the last change of its links or content (ctime), by the same clock; 0 if unknown."""


class Reader(Protocol):
    """A file open for reading. Thread-safe."""

    size: int

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, or fewer at the end of the file."""
        ...

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Fill writable buffers one after the other from `start`; return the number of bytes read."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """A new file that is being written; readers do not take it for complete. Thread-safe."""

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None: ...

    def finish(self) -> None:
        """Make content and name durable, then close. After a failure the file is abandoned: never retry."""
        ...

    def discard(self) -> None:
        """Close and delete. Never raises."""
        ...


class Capabilities(NamedTuple):
    """What a store can do beyond `Store`, as its attribute `capabilities`; the defaults hold for a store
    without one."""

    links: bool = False
    """Its `link(path, source)` makes a hard link to the file at the path `source`."""
    locks: bool = False
    """Its `url` is a path, and its readers have the `path` and the descriptor (`fd`) of their file, of which
    bytes can be locked."""
    times: bool = True
    """`Entry.modified` is the time of the last write, so that the files of a running save are young."""
    any_order: bool = True
    """A file may be written in any order at no cost. Otherwise a write that comes too early waits for those
    before it."""
    exclusive_create: bool = True
    """`create` raises StorageError if the file exists. Otherwise only a name that nobody else uses is
    safe."""
    sized: bool = False
    """Its `create(path, size)` takes about how many bytes the file will have."""
    opens_at: bool = False
    """Its `open(path, first)` takes from where on the file will be read, which saves a request."""
    opens_known: bool = False
    """Its `open_known(path, size, first, length)` returns a reader of a file of `size` bytes, of which
    `length` bytes from `first` on are read first. If that is enough to be worth a request, none is made
    before; then a read raises `OtherSize`, before it fills a buffer, if the file has another size."""
    confirms: bool = False
    """Once `finish` has returned, every reader finds the whole file: the store itself has said that it is
    there. So who has written it need not read it."""
    folders: bool = True
    """A folder is there by itself, also empty, and has to be removed; and there may be links to folders."""
    at_once: bool = False
    """Its `begin_stats(paths)` begins to look at files, at all at once, and returns a function that waits for
    their entries, None for what is no file."""
    reads: int = 2 << 20
    """How many bytes one read takes at most: more where a request costs as much time as many bytes."""
    bounded: bool = False
    """Its `bounded(deadline)` returns the same folder as a store whose calls end by a deadline."""
    pins: bool = False
    """A file that was finished is in each later list, and the `modified` of small files is the time of their
    last write, by one clock. So a small file can say that a step is being read (`store.pins`)."""
    references: bool = False
    """Its `open`, `stat` and `begin_stats` follow references to data files of the steps beside it
    (`format.names.reference`), and its `parent()` returns the folder that it lies in."""
    reopens: bool = False
    """`open_store(url)` opens it in the writer process, too. A thread of the trainer writes to others."""


_DEFAULT = Capabilities()


class Store(Protocol):
    """A folder of files, possibly the child of another store. What else it can do, it states by an attribute
    `capabilities` (`Capabilities`).

    `create`, `publish` and `delete` raise a `StorageError` if a folder between the first parent and the file
    is a link.
    """

    url: str
    """Names the folder in messages, and identifies it among all stores of this process and of other ranks."""

    def open(self, path: str) -> Reader: ...

    def create(self, path: str) -> Writer:
        """Create a file. Raises StorageError if it exists already (`Capabilities.exclusive_create`)."""
        ...

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        """Put a small file in place atomically. `replacing` is the last VERSION_BYTES bytes of the version
        that it may replace, None if there must be none; otherwise raises `Conflict`.

        On return the new version is in place and durable. Raises `Unsettled` if it is, or may be, in place;
        `Conflict` or another `StorageError` if it is not, and never will be.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove a file, or an empty folder; a missing one is no error.

        A link is removed itself; its target stays.
        """
        ...

    def remove(self) -> bool:
        """Remove this folder itself if it is empty and not a link. Return whether it is gone."""
        ...

    def stat(self, path: str = "") -> Entry | None:
        """Return the metadata of a file, folder or link (not of its target); None if it does not exist.

        Without a path: of this folder. Then links are followed, unless it is a child of another store.
        """
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return the names directly in a folder, sorted. Folders, and links to folders, end with `/`. A
        missing folder is empty.

        A dangling or circular link is listed like a file.
        """
        ...

    def child(self, folder: str) -> Store:
        """Return the store of a folder in this one; the folder need not exist yet."""
        ...


Folder = str | os.PathLike[str] | Store
"""A folder argument: a path, or a store (`store.local.open_store`)."""


class LinkingStore(Store, Protocol):
    """A store with `Capabilities.links`."""

    def link(self, path: str, source: str) -> None: ...


class _ReferringStore(Store, Protocol):
    def parent(self) -> Store: ...


class _SizedStore(Store, Protocol):
    def create(self, path: str, size: int = 0) -> Writer: ...


class _OpeningStore(Store, Protocol):
    def open(self, path: str, first: int = 0) -> Reader: ...


class _KnowingStore(Store, Protocol):
    def open_known(self, path: str, size: int, first: int, length: int) -> Reader: ...


class _AtOnceStore(Store, Protocol):
    def begin_stats(self, paths: Sequence[str]) -> Callable[[], Sequence[Entry | None]]: ...


class _BoundedStore(Store, Protocol):
    def bounded(self, deadline: Deadline) -> Store: ...


def capabilities(store: Store) -> Capabilities:
    """Return what a store states. Raises BadInput if its attribute is of another type."""
    found = getattr(store, "capabilities", _DEFAULT)
    if not isinstance(found, Capabilities):
        raise BadInput(
            f"`capabilities` of the store {type(store).__name__} is of type {type(found).__name__}.",
            hint="Make it a holdfast.interfaces.Capabilities, or name the attribute otherwise.",
        )
    return found


def create_sized(store: Store, path: str, size: int) -> Writer:
    """Create a file of about `size` bytes, which a store may need to know (`Capabilities.sized`)."""
    if capabilities(store).sized:
        return cast("_SizedStore", store).create(path, size)
    return store.create(path)


def open_at(store: Store, path: str, first: int) -> Reader:
    """Open a file that is going to be read from `first` on (`Capabilities.opens_at`)."""
    return (
        cast("_OpeningStore", store).open(path, first) if capabilities(store).opens_at else store.open(path)
    )


def open_known(store: Store, path: str, size: int, first: int, length: int) -> Reader:
    """Open a file that should have `size` bytes, and of which `length` bytes from `first` on are read first.
    The caller compares `size` with the reader's, which a store that can (`Capabilities.opens_known`) does
    itself, by `OtherSize`."""
    if capabilities(store).opens_known:
        return cast("_KnowingStore", store).open_known(path, size, first, length)
    return store.open(path)


def parent(store: Store) -> Store:
    """Return the folder that one of a store with `Capabilities.references` lies in."""
    return cast("_ReferringStore", store).parent()


def bounded(store: Store, deadline: Deadline) -> Store:
    """Return the same folder as a store whose requests end at a deadline, if it has requests to end."""
    return cast("_BoundedStore", store).bounded(deadline) if capabilities(store).bounded else store


def look_at_files(store: Store, paths: Sequence[str]) -> Callable[[str], Entry | None]:
    """Return a function that returns the entries of these paths. A store that can (`Capabilities.at_once`)
    begins to look now, at all at once, and only for files, and the function waits for that; others look when
    it is called."""
    if not capabilities(store).at_once:
        return store.stat
    found = cast("_AtOnceStore", store).begin_stats(paths)
    entries = cache(lambda: dict(zip(paths, found(), strict=True)))
    return lambda path: entries().get(path)


def replace_file(store: Store, path: str, data: bytes) -> None:
    """Put a small file in place atomically, whatever is there; a link is replaced, not followed."""
    store.publish(path, data, version_of(store, path))


def version_of(store: Store, path: str) -> bytes | None:
    """Return the last bytes of a file, which identify its published version; None if it is not there."""
    try:
        reader = store.open(path)
    except NotFound:
        return None
    with closing(reader):
        return reader.read(max(reader.size - VERSION_BYTES, 0), VERSION_BYTES)


def checked(path: str) -> str:
    """Return a relative path. Raises BadInput if it leaves the store."""
    # Some names come from indexes, which an attacker may have written.
    parts = path.split("/")
    if (referred := split_reference(path)) is not None:
        raise BadInput(
            f"{path!r} is a data file of another step: the checkpoint that names it is not complete by "
            "itself, and only in an object store Holdfast follows such names.",
            hint=f"Load it in the bucket that it was saved in, with {referred[0]} beside it.",
        )
    if not path or "\0" in path or path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise BadInput(f"{path!r} is not a path inside a store.")
    return path


class storage_errors:  # noqa: N801, because it is used like a function, as contextlib's own are
    """Turn OSErrors into StorageErrors that name the file."""

    # A class, as each read and write is inside one, and a generator's context costs four times as much.
    __slots__ = ("doing", "path")

    def __init__(self, doing: str, path: str) -> None:
        self.doing, self.path = doing, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A StorageError is an OSError itself, and says more than one made here would.
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _as_storage_error(self.doing, self.path, error) from None


_READS = frozenset({"Opening", "Reading", "Looking at", "Listing"})
_FORBIDDEN = "Give this user the right to read it, and to search the folders that it lies in."
_READING = {errno.EACCES: _FORBIDDEN, errno.EPERM: _FORBIDDEN}
"""Hints for failed reads, by errno."""
_WRITING = {
    errno.EACCES: "Choose a folder that this user can write to.",
    errno.EPERM: "Choose a folder that this user can write to, and that is not immutable.",
    errno.EROFS: "Choose a folder that can be written to.",
    errno.ENOSPC: "Free space there, or prune old steps, and save again.",
    errno.EDQUOT: "Free space in the quota, or prune old steps, and save again.",
    errno.ENOENT: "Is the path right, and mounted on this host? Does something remove folders there?",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f), or set Options(max_file_bytes=) below it.",
}
_HINTS = {
    errno.EMFILE: "Raise this process's limit of open files (ulimit -n).",
    errno.ENFILE: "Raise the system's limit of open files (fs.file-max).",
    errno.ENOMEM: "Free memory on this host, or raise the limit of this process or container.",
    errno.ENAMETOOLONG: "Give a shorter path.",
    errno.ELOOP: "Mend the link in the path that leads in a circle.",
    errno.ESTALE: "Try again; if that does not help, mount the network file system anew on this host.",
}
"""Hints for failed reads and writes, by errno."""


def _as_storage_error(doing: str, path: str, error: OSError) -> StorageError:
    # ENOTDIR: a part of the path is a file, so nothing of that name can be below it. Of a write, a missing
    # folder tells nothing about the file.
    is_read = doing in _READS
    kind = NotFound if is_read and error.errno in (errno.ENOENT, errno.ENOTDIR) else StorageError
    hints = _HINTS | (_READING if is_read else _WRITING)
    reason = os.strerror(error.errno) if error.errno else str(error)
    return kind(
        f"{doing} {path} failed: {reason}.",
        hint=hints.get(error.errno or 0, ""),
        details={"errno": error.errno},
    )
