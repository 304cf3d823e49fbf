"""Publishes an object by a conditional PUT, and finds out whether it is in place (docs/decisions/0052).

The reply to a PUT can be lost, and its repetition then says that the object exists: our own. S3 also sends a
409 if conditions collide, which proves nothing. So conditional PUTs are never repeated by the library. After
an unclear answer the object is read: our bytes mean that it is in place, those of another save that ours
never will be, and if nothing has changed, the same request is sent again, which is harmless. That proves
something only because the bytes of each version are unique: an index ends with its seal, an owner file with
random text.

A server that ignores conditions would let two saves win. So each bucket is tried once in a process, before
the first publishing. There only a refusal by the server counts: an object that is still the old one after a
request without an answer shows nothing, as the request may not have arrived.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.store.base import VERSION_BYTES, NotFound, Unsettled
from holdfast._core.store.object_client import (
    PATIENCE,
    REQUEST,
    Client,
    Meta,
    SlowWarning,
    begin,
    current_environment,
    left,
    library,
)
from holdfast._core.store.object_errors import code_of, explained, is_busy, is_final, status_of
from holdfast.errors import Conflict, StorageError

PROBE = ".holdfast-probe-"
"""Begins the names of the objects that try a bucket."""
_COMPARED = 4096
"""Bytes at the end of an object that are compared with ours."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_NO_PROOF = ("ConditionalRequestConflict", "OperationAborted")
"""Codes of a 409 that tell nothing of the condition."""


def version_in(meta: Meta) -> dict[str, str]:
    """Return what identifies a version of an object, for a condition."""
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}


def publish(
    client: Client,
    key: str,
    data: bytes,
    replacing: bytes | None,
    version: dict[str, str] | None,
    deadline: Deadline | None,
) -> None:
    """Put an object in place if there is none, or if the one there has this version. Raises as
    `store.base.Store.publish` does."""
    check_conditions(client, key.rpartition("/")[0], deadline)
    attempt = _Attempt(client, key, data, "create" if replacing is None else version, deadline)
    put = attempt.run()
    client.note_version(key, data[-VERSION_BYTES:], version_in(put))


class _Attempt:
    def __init__(
        self,
        client: Client,
        key: str,
        data: bytes,
        mode: str | dict[str, str] | None,
        deadline: Deadline | None,
        only_refusals: bool = False,
    ) -> None:
        """only_refusals: repeat the request until the server itself has done or refused it."""
        self._client, self._key, self._data = client, key, data
        self._mode, self._deadline, self._only_refusals = mode, deadline, only_refusals
        self._unclear: BaseException | None = None
        """The last error after which the object may be in place, or may still come there."""

    def run(self) -> Meta:
        begun, pause = REAL_CLOCK.now(), _FIRST_PAUSE
        warning = SlowWarning("Publishing", self._client.url(self._key), left(self._deadline))
        while True:
            credentials = current_environment()
            try:
                return begin(self._put).result(min(left(self._deadline), REQUEST))
            except Exception as error:
                if is_final(error) and credentials != current_environment():
                    continue  # they were being renewed, one variable after the other
                here = self._after(error, REAL_CLOCK.now() - begun)
            if here is not None:
                return here
            if REAL_CLOCK.now() + pause >= begun + PATIENCE or left(self._deadline) <= pause:
                raise self._unsettled(REAL_CLOCK.now() - begun)
            warning.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _put(self) -> Meta:
        meta: Meta = library().put(
            self._client.once, self._key, self._data, mode=self._mode, use_multipart=False
        )
        return meta

    def _after(self, error: Exception, seconds: float) -> Meta | None:
        """Return the metadata of our object if it is in place, None if the request is to be repeated."""
        refused = type(error).__name__ in ("AlreadyExistsError", "PreconditionError")
        status = status_of(error)
        if refused and status != 409 and self._unclear is None:
            raise self._conflict()
        if not refused and is_final(error):
            if self._unclear is None:
                raise explained("Publishing", self._client.url(self._key), error, seconds)
            raise self._unsettled(seconds)
        if not refused or status == 409:
            self._unclear = error
        if is_busy(error):
            return None
        if self._only_refusals and (not refused or code_of(error) in _NO_PROOF):
            return None
        try:
            meta = self._look()
        except FileNotFoundError:
            if self._mode != "create":
                raise self._conflict() from None  # what was to be replaced is gone
            return None
        except Exception:
            return None  # look again after the next attempt
        if meta.get("ours"):
            return meta
        if isinstance(self._mode, dict) and self._mode.items() <= meta.items():
            return None  # the old version is still there
        raise self._conflict()

    def _look(self) -> Meta:
        """Return the metadata of the object that is in place, with `ours` if it has our bytes."""
        obstore, size = library(), len(self._data)
        first = max(size - _COMPARED, 0)

        def look() -> tuple[Meta, bytes]:
            try:
                found = obstore.get(self._client.once, self._key, options={"range": (first, size)})
                return dict(found.meta), bytes(found.bytes())
            except Exception as error:
                if status_of(error) != 416:
                    raise
                return obstore.head(self._client.once, self._key), b""  # a shorter object

        meta, tail = begin(look).result(left(self._deadline))
        return dict(meta) | {"ours": meta["size"] == size and tail == self._data[first:]}

    def _conflict(self) -> Conflict:
        return Conflict(
            f"{self._client.url(self._key)} was put in place by another save since this one began; that one "
            "stands, this one is void.",
            hint="Give every job its own folder.",
        )

    def _unsettled(self, seconds: float) -> Unsettled:
        unclear = self._unclear or TimeoutError()
        why = explained("Publishing", self._client.url(self._key), unclear, seconds).message
        return Unsettled(f"{why} Whether it is in place can't be told.", details={"in_place": False})


def check_conditions(client: Client, folder: str, deadline: Deadline | None) -> None:
    """Raise StorageError if the bucket does not keep the conditions of a PUT."""
    if client.keeps_conditions:
        return
    # Threads that publish at once may each try it: one would wait longer than its deadline for another.
    key = f"{folder}/{PROBE}{os.urandom(8).hex()}".lstrip("/")
    try:
        put = _Attempt(client, key, os.urandom(32), "create", deadline).run()
        stale = _other_than(version_in(put))
        for what, mode in (("If-None-Match", "create"), ("If-Match", stale)):
            try:
                _Attempt(client, key, os.urandom(32), mode, deadline, only_refusals=True).run()
            except Conflict:
                continue
            raise StorageError(
                f"{client.scheme}://{client.bucket} can't hold checkpoints: its server ignores "
                f"conditions of writes ({what}), so of two saves into one folder both would succeed.",
                hint="Use a server that keeps them, as S3, GCS and Azure do, or a newer version of this.",
            )
    except Unsettled as error:  # nothing but the probe may be in place
        raise StorageError(
            f"{client.scheme}://{client.bucket} could not be tried before the first publishing: "
            f"{error.message}"
        ) from None
    finally:
        with suppress(StorageError):  # it is small, and no list of ours shows it
            library_delete(client, key, deadline)
    client.keeps_conditions = True


def _other_than(version: dict[str, str]) -> dict[str, str]:
    """Return a version that an object never had."""
    generation = version.get("version", "")  # a number in Google's stores; others compare the ETag
    other = {"version": str(int(generation) + 1)} if generation.isdecimal() else {}
    return {"e_tag": f'"{os.urandom(16).hex()}"', **other}


def library_delete(client: Client, key: str, deadline: Deadline | None) -> None:
    """Delete an object; a missing one is no error."""
    with suppress(NotFound):
        client.call("Deleting", key, lambda: library().delete(client.once, key), deadline)
