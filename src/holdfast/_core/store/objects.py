"""Folders of object stores: s3://, gs://, az://. A file is an object; its key is the path in the bucket.

There are no folders in a bucket: one is there while an object is in it. Nor are there links or locks, and of
the times of objects only those of pins decide anything. `object_publish` says how a file is published,
`object_writer` how one is written.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial

from holdfast._core.base.deadline import Deadline
from holdfast._core.base.values import Buffer
from holdfast._core.format.names import split_reference
from holdfast._core.store.base import (
    VERSION_BYTES,
    Capabilities,
    Entry,
    Kind,
    NotFound,
    OtherSize,
    checked,
    version_of,
)
from holdfast._core.store.object_client import Client, Meta, client_of, library
from holdfast._core.store.object_errors import status_of
from holdfast._core.store.object_publish import PROBE, library_delete, publish, version_in
from holdfast._core.store.object_writer import ObjectWriter
from holdfast._core.store.run_folder import is_spelled_as_ours
from holdfast.errors import BadInput, Conflict, StorageError

HEAD = 64 << 10
"""Bytes that are read when an object is opened, which also tells its size and version."""
_URL = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{0,254})(?:/(.*))?\Z", re.DOTALL)


class ObjectReader:
    """An object, as the version that it had when it was first read."""

    def __init__(
        self, client: Client, key: str, deadline: Deadline | None, first: int, size: int | None = None
    ) -> None:
        """size: of the object, if it is known; then no request is made yet."""
        self._client, self._key, self._deadline = client, key, deadline
        self._first, self._head = first, b""
        """The bytes that were read when it was opened, and their position."""
        self._version: dict[str, str] | None = None
        self._lock = threading.Lock()
        if size is not None:
            self.size = size
            return
        self._head, meta = client.call("Opening", key, self._open, deadline)
        self.size = meta["size"]
        self._version = version_in(meta)
        if self.size == self._first + len(self._head) and (
            not self._first or len(self._head) >= VERSION_BYTES
        ):
            client.note_version(key, self._head[-VERSION_BYTES:], self._version)

    def _open(self) -> tuple[bytes, Meta]:
        obstore, first = library(), self._first
        try:
            found = obstore.get(self._client.once, self._key, options={"range": (first, first + HEAD)})
            return bytes(found.bytes()), found.meta
        except Exception as error:
            if status_of(error) != 416:  # an empty object has no range
                raise
            return b"", obstore.head(self._client.once, self._key)

    def read(self, start: int, length: int) -> bytes:
        stop = min(start + length, self.size)
        if stop <= start:
            return b""
        if self._first <= start and stop <= self._first + len(self._head):
            return self._head[start - self._first : stop - self._first]
        data = bytes(self._range(start, stop))
        if stop == self.size and self._version is not None:
            self._client.note_version(self._key, data[-VERSION_BYTES:], self._version)
        return data

    def read_into(self, start: int, buffers: Sequence[Buffer]) -> int:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        stop = min(start + sum(map(len, views)), self.size)
        if stop <= start:
            return 0
        if self._first <= start and stop <= self._first + len(self._head):
            data = memoryview(self._head)[start - self._first : stop - self._first]
        else:
            data = self._range(start, stop)
        done = 0
        for view in views:
            part = data[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def _range(self, start: int, stop: int) -> memoryview:
        options: dict[str, object] = {"range": (start, stop)}
        if self._version is not None:
            options["if_match"] = self._version.get("e_tag")

        def get() -> tuple[Buffer, Meta]:
            found = library().get(self._client.once, self._key, options=options)
            return found.bytes(), found.meta

        try:
            found, meta = self._client.call("Reading", self._key, get, self._deadline)
        except StorageError as error:
            status = error.details.get("status")
            if status == 412:
                raise self._replaced() from None
            if status == 416:  # it ends before these bytes
                raise OtherSize.of(ObjectReader(self._client, self._key, self._deadline, 0).size) from None
            raise
        version = version_in(meta)
        with self._lock:  # requests that began before the first answer had no condition
            if self._version is None:
                self._version = version
        if version.get("e_tag") != self._version.get("e_tag"):
            raise self._replaced()
        if meta["size"] != self.size:
            raise OtherSize.of(meta["size"])
        data = memoryview(found)
        if len(data) != stop - start:
            raise StorageError(
                f"Reading {self._client.url(self._key)} failed: of bytes {start} to {stop} only {len(data)} "
                "came."
            )
        return data

    def _replaced(self) -> NotFound:
        return NotFound(f"Reading {self._client.url(self._key)} failed: it was replaced since it was opened.")

    def close(self) -> None:
        """Do nothing: a reader holds no connection."""


class ObjectStore:
    """A folder of a bucket."""

    capabilities = Capabilities(
        times=False,
        any_order=False,
        exclusive_create=False,
        sized=True,
        opens_at=True,
        opens_known=True,
        confirms=True,
        folders=False,
        reopens=True,
        at_once=True,
        reads=16 << 20,
        bounded=True,
        pins=True,
        references=True,
    )

    def __init__(self, client: Client, prefix: str, deadline: Deadline | None = None) -> None:
        self._client, self._prefix, self._deadline = client, prefix, deadline
        self.url = client.url(prefix).rstrip("/")

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{checked(path)}" if self._prefix else checked(path)

    def _key_to_read(self, path: str) -> str:
        """Return the key of a file, or of one that a reference names."""
        if (referred := split_reference(path)) is None:
            return self._key(path)
        above, _, own = self._prefix.rpartition("/")
        if not is_spelled_as_ours(own):
            raise BadInput(
                f"{self.url} names a data file of {referred[0]}, which only a step of a run may do: it was "
                "copied or renamed.",
                hint="Load the step that it was copied from.",
            )
        return "/".join(filter(None, (above, *referred)))

    def parent(self) -> ObjectStore:
        return ObjectStore(self._client, self._prefix.rpartition("/")[0], self._deadline)

    def bounded(self, deadline: Deadline) -> ObjectStore:
        return ObjectStore(self._client, self._prefix, deadline)

    def open_known(self, path: str, size: int, first: int, length: int) -> ObjectReader:
        if length < HEAD:  # what is read when it is opened may be all
            return self.open(path, first)
        return ObjectReader(self._client, self._key_to_read(path), self._deadline, 0, size)

    def open(self, path: str, first: int = 0) -> ObjectReader:
        try:
            return ObjectReader(self._client, self._key_to_read(path), self._deadline, first)
        except NotFound:
            if (referred := split_reference(path)) is None:
                raise
            raise NotFound(
                f"{self.url} is not complete by itself: it names {referred[1]} of {referred[0]}, which is "
                "not beside it.",
                hint="If it was copied, load it where it was saved; of a whole run a copy is complete.",
            ) from None

    def create(self, path: str, size: int = 0) -> ObjectWriter:
        return ObjectWriter(self._client, self._key(path), size, self._deadline)

    def publish(self, path: str, data: bytes, replacing: bytes | None) -> None:
        key, version = self._key(path), None
        if replacing is not None:
            # What is there was read shortly before, as a rule.
            while (version := self._client.version_noted(key, replacing)) is None:
                self._client.forget_version(key)
                if version_of(self, path) != replacing:  # which notes what it reads
                    raise Conflict(
                        f"{self.url}/{path} was put in place by another save since this one began; that one "
                        "stands, this one is void.",
                        hint="Give every job its own folder.",
                    )
        publish(self._client, key, bytes(data), replacing, version, self._deadline)

    def delete(self, path: str) -> None:
        key = self._key(path)
        self._client.forget_version(key)
        library_delete(self._client, key, self._deadline)

    def remove(self) -> bool:
        return not self._first(self._prefix)

    def stat(self, path: str = "") -> Entry | None:
        if path and (entry := self.begin_stats([path])()[0]) is not None:
            return entry
        key = self._key_to_read(path) if path else self._prefix
        return Entry(Kind.FOLDER, 0, 0.0) if self._first(key) else None

    def begin_stats(self, paths: Sequence[str]) -> Callable[[], list[Entry | None]]:
        keys = [self._key_to_read(path) for path in paths]

        def look(key: str) -> Entry | None:
            try:
                meta = library().head(self._client.once, key)
            except FileNotFoundError:
                return None
            return Entry(Kind.FILE, meta["size"], meta["last_modified"].timestamp())

        looks = [partial(look, key) for key in keys]
        return self._client.begin_all("Looking at", keys[0] if keys else "", looks, self._deadline)

    def list(self, folder: str = "") -> list[str]:
        prefix = self._key(folder) if folder else self._prefix

        def listed() -> list[str]:
            found = library().list_with_delimiter(self._client.pages, prefix or None)
            skip = len(prefix) + 1 if prefix else 0
            folders = {path[skip:] + "/" for path in found["common_prefixes"]}
            files = {meta["path"][skip:] for meta in found["objects"]}
            return sorted(name for name in folders | files if name and not name.startswith(PROBE))

        return self._client.call("Listing", prefix, listed, self._deadline)

    def _first(self, prefix: str) -> bool:
        """Return whether there is any object in a folder."""

        def look() -> bool:
            pages = library().list(self._client.once, prefix or None, chunk_size=16)
            return any(PROBE not in meta["path"] for page in pages for meta in page)

        return self._client.call("Listing", prefix, look, self._deadline)

    def child(self, folder: str) -> ObjectStore:
        return ObjectStore(self._client, self._key(folder), self._deadline)


def open_objects(url: str) -> ObjectStore:
    """Return the store at a URL. Credentials come from the environment, or from the host's role."""
    found = _URL.match(url)
    if found is None:
        # Not the whole URL, which may hold a password.
        raise BadInput(
            f"The URL after {url.partition('://')[0]}:// is not of the form bucket/folder.",
            hint="s3://bucket/run; credentials are given in the environment.",
        )
    scheme, bucket, path = found.groups()
    if any(ord(letter) < 32 or letter == "\x7f" for letter in path or ""):
        raise BadInput(
            f"The URL after {scheme}://{bucket} has a control character in it, such as a newline at its end."
        )
    path = (path or "").strip("/")
    return ObjectStore(client_of(scheme, bucket), checked(path) if path else "")
