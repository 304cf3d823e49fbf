"""Writes an object from front to back, in parts that are sent while the next ones are made.

An object of one part is one PUT. Of more parts, up to `AT_ONCE` are under way, and as many bytes again wait
here at most: a write that comes too early, or while all parts are under way, waits.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.base.values import Buffer
from holdfast._core.store.object_client import (
    PATIENCE,
    Client,
    Meta,
    Request,
    SlowWarning,
    begin,
    left,
    library,
)
from holdfast._core.store.object_errors import explained
from holdfast._core.store.object_publish import library_delete
from holdfast.errors import StorageError

PART, MOST_PARTS = 16 << 20, 9000
"""Bytes of a part, at least, and parts of an object, at most: S3 takes 10,000."""
AT_ONCE = 4
"""Parts of an object that are under way at once."""
EARLY = 32 << 20
"""Bytes that may come before their turn."""
_LOOK = 0.25
"""Seconds between two looks whether an upload has failed."""
GIVEN_UP = 10.0
"""Seconds that a writer that is discarded takes to abort its upload."""


class _GivenUp(Exception):
    pass


def part_bytes(size: int) -> int:
    """Return the size of the parts of an object of about `size` bytes."""
    part = max(PART, -(-size // MOST_PARTS))
    # The header and the index of a data file come on top of its size. With this in each part, they make no
    # part more, which would cost a request, and often a round trip.
    return part + part // 64


class ObjectWriter:
    def __init__(self, client: Client, key: str, size: int, deadline: Deadline | None) -> None:
        """size: about as large as it will be. 0: not known."""
        self._client, self._key, self._deadline = client, key, deadline
        if size:  # the data of a save, whose trainer has had an answer; this process may only write
            client.has_answered = True
        self._part = part_bytes(size)
        self._begun = REAL_CLOCK.now()
        self._turn = threading.Condition()
        self._at = 0
        """How many bytes have come, without a gap."""
        self._early: dict[int, bytes] = {}
        self._buffer = bytearray()
        self._upload: Request[object] | None = None
        self._parts: queue.Queue[bytearray | None] = queue.Queue(1)
        self._first_taken = self._last_taken = False
        """Whether the upload has taken its first part, which nobody keeps, and its last one."""
        self._ended = False

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        with self._turn:
            while start > self._at and self._held() + sum(map(len, views)) > EARLY and not self._ended:
                if not self._turn.wait(1.0) and left(self._deadline) <= 0:
                    raise self._error(TimeoutError())
            if self._ended or start < self._at:
                raise StorageError(f"{self._client.url(self._key)} was given up, or written twice.")
            if start > self._at:
                self._early[start] = b"".join(views)
                return
            self._append(views)
            while self._at in self._early:
                self._append([memoryview(self._early.pop(self._at))])
            self._turn.notify_all()

    def _held(self) -> int:
        return sum(map(len, self._early.values()))

    def _append(self, views: list[memoryview]) -> None:
        for view in views:
            self._at += len(view)
            while len(view):
                room = self._part - len(self._buffer)
                if not room:
                    self._send()
                    continue
                self._buffer += view[:room]
                view = view[room:]

    def _send(self) -> None:
        """Give a part to the upload, once it has room for it."""
        part, self._buffer = self._buffer, bytearray()  # not copied: nobody writes into it any more
        if self._upload is None:
            self._upload = begin(self._put_parts)
        self._give(part)

    def _give(self, part: bytearray | None) -> None:
        assert self._upload is not None
        warning = self._warning()
        while True:
            if self._upload.ended(0):  # it has failed: otherwise it waits for the last part
                self._upload.result(0)
            try:
                return self._parts.put(part, timeout=_LOOK)
            except queue.Full:
                if self._deadline is not None and self._deadline.passed():
                    raise self._error(TimeoutError()) from None
                warning.look()

    def _warning(self) -> SlowWarning:
        return SlowWarning("Writing", self._client.url(self._key), left(self._deadline))

    def _put_parts(self) -> object:
        try:
            ends = math.inf if self._deadline is None else REAL_CLOCK.now() + self._deadline.left()
            return self._client.tried(self._put, ends)
        except StorageError:
            raise
        except Exception as error:
            raise self._error(error) from None

    def _put(self) -> object:
        try:
            return library().put(
                self._client.parts, self._key, self._given(), chunk_size=self._part, max_concurrency=AT_ONCE
            )
        except Exception as error:
            if not self._first_taken:  # it has only been asked for an upload, and may be asked again
                raise
            if self._last_taken and self._is_whole():
                return None
            raise self._error(error) from None

    def _given(self) -> Iterator[bytearray]:
        # Waits for `finish` or `discard`, one of which ends each writer.
        while (part := self._parts.get()) is not None:
            if not part:  # an exception here makes obstore abort the upload
                raise _GivenUp
            self._first_taken = True
            yield part
        self._last_taken = True

    def _is_whole(self) -> bool:
        """Return whether the object is there as a whole: the reply to its last request may be lost."""
        with suppress(Exception):

            def look() -> Meta:
                meta: Meta = library().head(self._client.once, self._key)
                return meta

            meta = self._client.call("Looking at", self._key, look, self._deadline)
            return bool(meta["size"] == self._at)
        return False

    def finish(self) -> None:
        url = self._client.url(self._key)
        with self._turn:
            if self._early or self._ended:
                raise StorageError(f"{url} is not whole: bytes {self._at} and on were not written.")
            self._ended = True
            if self._upload is None:
                data = self._buffer

                def put() -> object:
                    return library().put(self._client.once, self._key, data, use_multipart=False)

                self._client.call("Writing", self._key, put, self._deadline)
                return
            if self._buffer:
                self._send()
            self._give(None)
        warning = self._warning()
        while True:
            try:
                self._upload.result(_LOOK)
                return
            except TimeoutError:
                if self._deadline is not None and self._deadline.passed():
                    raise self._error(TimeoutError()) from None
                warning.look()

    def _error(self, error: BaseException) -> StorageError:
        seconds = REAL_CLOCK.now() - self._begun
        return explained("Writing", self._client.url(self._key), error, seconds)

    def discard(self) -> None:
        with suppress(Exception), self._turn:
            self._ended = True
            self._early.clear()
            self._turn.notify_all()
        with suppress(Exception):
            if self._upload is not None:
                with suppress(queue.Empty):
                    self._parts.get_nowait()
                self._parts.put_nowait(bytearray())
                self._upload.ended(GIVEN_UP)
        with suppress(Exception):
            library_delete(self._client, self._key, Deadline(min(GIVEN_UP, PATIENCE)))
