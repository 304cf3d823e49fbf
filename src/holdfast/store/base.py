"""The byte seam: what Holdfast asks of a place that keeps files. This is all of it.

A store is a folder. Names are relative, with `/`, and never leave it. Every failure is a
`StorageError` that says which file and why; a missing file is `NotFound`. The promises that the
protocol rests on, checked for any implementation by `holdfast.testing.StoreContract`:

- what `Writer.finish` returned from is durable, the name of the file included;
- `publish` is atomic: a reader, or the next boot, sees the old bytes, or the new ones, whole;
- of several `publish` calls that replace the same thing, one wins and the others get `Conflict`;
- what `publish` raises says whether the new version is in place: data that it names is deleted only if it is
  not;
- `create`, `publish` and `delete` pass through no link: what lies behind one belongs to somebody else.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

from holdfast.errors import BadInput, StorageError
from holdfast.values import Buffer

VISIBLE_WITHIN = 75.0
"""Seconds that a network file system may take to show another host's file: NFS keeps what it knows of a
folder for 60."""


# An index ends in its seal, and the owner's file of a run in a text that is drawn anew for each version. So
# the ends of two versions differ, and telling them apart takes one small read.
VERSION_BYTES = 16
"""Bytes at the end of a published file that tell one version of it from another."""


class NotFound(StorageError):
    """No such file."""


class Unsettled(StorageError):
    """`publish` failed, but the new version is in place, or may be: nothing that it names may be deleted."""

    @property
    def in_place(self) -> bool:
        """True: it is there, but perhaps not durable. False: that can't be told."""
        return bool(self.details.get("in_place"))


class Kind(Enum):
    """What a name stands for."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


FOLDERS = (Kind.FOLDER, Kind.LINK)
"""What the folder of a store may be."""


class Entry(NamedTuple):
    """What a store knows of a name."""

    kind: Kind
    size: int
    modified: float
    """Seconds since the epoch, by the storage's clock; 0 if it keeps none."""


class Reader(Protocol):
    """An open file. Safe to use from several threads at once."""

    size: int

    def read(self, start: int, length: int) -> bytes:
        """Those bytes, or fewer at the end of the file."""
        ...

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        """Fill writable buffers one after the other from `start`; returns the bytes read."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """A new file that nobody sees as complete yet. Safe to use from several threads at once."""

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None: ...

    def finish(self) -> None:
        """Make content and name durable, then close. After a failure the file is abandoned: never retry."""
        ...

    def discard(self) -> None:
        """Close and delete. Never raises."""
        ...


class Store(Protocol):
    """A folder of files, and the first parent of its children.

    `create`, `publish` and `delete` raise a `StorageError` if a folder on the way from the first parent is a
    link.
    """

    url: str

    def open(self, path: str) -> Reader: ...

    def create(self, path: str) -> Writer:
        """A new file; one that exists already is a `StorageError`, not overwritten."""
        ...

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        """Put a small file in place at once. `replacing` is the last VERSION_BYTES bytes of the version
        it may replace, None if there must be none; otherwise `Conflict`.

        Returns: it is in place, and durable. Raises `Unsettled`: it is in place, or that can't be told.
        Raises `Conflict` or another `StorageError`: it is known not to be in place, and will not be."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file, or a folder that is empty; one that is not there is no error.

        A link is removed as such, what it leads to stays."""
        ...

    def remove(self) -> bool:
        """Remove this folder itself if it is empty, and no link. Is it gone?"""
        ...

    def stat(self, path: str = "") -> Entry | None:
        """What is under a name, a link if it is one; None if nothing is.

        Without a path: this folder, links followed unless it is a child of another store."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Names right inside a folder, sorted; folders, and links to folders, end with `/`. A missing folder
        is empty.

        A link that leads nowhere, or in a circle, is a name like any other."""
        ...

    def child(self, folder: str) -> Store:
        """The store of a folder inside this one; it need not exist yet."""
        ...


def replace_file(store: Store, path: str, data: bytes) -> None:
    """Put a small file in place at once, whatever stands there; a link is replaced, not followed."""
    store.publish(path, data, version_of(store, path))


def version_of(store: Store, path: str) -> bytes | None:
    """The last bytes of a file, which tell one published version from another; None if it is not there."""
    try:
        reader = store.open(path)
    except NotFound:
        return None
    with closing(reader):
        return reader.read(max(reader.size - VERSION_BYTES, 0), VERSION_BYTES)


def checked(path: str) -> str:
    """A relative path that stays inside, or one sentence."""
    # Names come from indexes, too, which a forger may have written.
    parts = path.split("/")
    if not path or "\0" in path or path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise BadInput(f"{path!r} is not a path inside a store.")
    return path


@contextmanager
def storage_errors(doing: str, path: str) -> Iterator[None]:
    """Turn the system's errors into one sentence that names the file."""
    try:
        yield
    # A StorageError is an OSError itself, and says more than what would be made of it here.
    except StorageError:
        raise
    except OSError as error:
        # ENOTDIR: a part of the path is a file, so there is nothing of that name below it either.
        kind = NotFound if error.errno in (errno.ENOENT, errno.ENOTDIR) else StorageError
        hints = {
            errno.ENOSPC: "Free space there, or prune old steps, and save again.",
            errno.EDQUOT: "Free space in the quota, or prune old steps, and save again.",
            errno.EROFS: "Choose a folder that can be written to.",
            errno.EACCES: "Choose a folder that this user can write to.",
        }
        reason = os.strerror(error.errno) if error.errno else str(error)
        raised = kind(
            f"{doing} {path} failed: {reason}.",
            hint=hints.get(error.errno or 0, ""),
            details={"errno": error.errno},
        )
        # Set by hand: OSError takes an errno from two arguments, and this one was given a sentence.
        raised.errno = error.errno
        raise raised from None
