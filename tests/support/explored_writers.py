"""Writers that publish one object at once, step by step: the real `object_publish` over `explored_bucket`."""

from __future__ import annotations

from functools import partial
from typing import cast

from holdfast._core.base.deadline import Deadline
from holdfast._core.store.base import VERSION_BYTES, Unsettled, version_of
from holdfast.errors import Conflict, StorageError
from tests.support.explore import Script, State
from tests.support.explored_bucket import (
    CLOCK,
    INDEX,
    Bucket,
    ObjectWorld,
    Put,
    Shared,
    bucket_store,
    running,
)

ATTEMPTS = {1: 0.05, 2: 0.25, 3: 0.65}
"""The deadline of a publish that leaves time for so many attempts."""
BASE = b"base " * 8


def version(writer: int) -> bytes:
    return f"writer {writer} ".encode() * 8


class Writers(ObjectWorld):
    """Writers that create the object, or replace one version of it.

    attempts: how often each may send its request. later: one more, which replaces what it finds. remover: one that
    deletes the object. equal: all write the same bytes. tried: the bucket's conditions are known to be kept.
    """

    def __init__(
        self,
        writers: int = 2,
        attempts: int = 2,
        faults: int = 2,
        replace: bool = False,
        later: bool = False,
        remover: bool = False,
        equal: bool = False,
        tried: bool = True,
        honest: bool = True,
    ) -> None:
        super().__init__()
        self.faults, self.remover, self.equal, self.tried, self.honest = faults, remover, equal, tried, honest
        self.base = BASE if replace else None
        if replace:
            self.start = Bucket(frozenset({(f"run/{INDEX}", BASE)}), frozenset(), ())
        self.data = [version(0 if equal else writer) for writer in range(writers + later)]
        self.seconds = ATTEMPTS[attempts]
        self.processes = [
            partial(self._publish, writer, later and writer == writers) for writer in range(writers + later)
        ]
        self.processes += [self._remove] * remover
        self.groups = self.writers = range(len(self.processes))

    def _publish(self, writer: int, is_later: bool, script: Script) -> tuple[str, bytes | None]:
        with running(script):
            store = bucket_store("run", Deadline(self.seconds, CLOCK), self.tried)
            before = self.base and self.base[-VERSION_BYTES:]
            try:
                before = version_of(store, INDEX) if is_later else before
                store.publish(INDEX, self.data[writer], before)
            except Conflict:
                return "conflict", before
            except Unsettled:
                return "unsettled", before
            except StorageError as error:
                return "refused" if "ignores conditions" in error.message else "failed", before
            return "won", before

    def _remove(self, script: Script) -> str:
        with running(script):
            try:
                bucket_store("run", Deadline(9.0, CLOCK)).delete(INDEX)
            except StorageError:
                return "not removed"
            return "removed"

    def check(self, state: State[Shared], is_over: bool) -> str:
        bucket = state.shared.bucket
        published = [data for _, data in bucket.published]
        if not self.honest and published:
            return "a bucket that ignores conditions is written to"
        if self.remover and len(published) > len(set(published)):
            return "a version that was removed is in place again"
        won: set[bytes | None] = set()
        for node, data in zip(state.nodes, self.data, strict=False):
            if node.result is None:
                continue
            word, before = cast("tuple[str, bytes | None]", node.result)
            if word == "won" and before in won:
                return "two writers have won one version"
            won |= {before} if word == "won" else set()
            if word == "won" and data not in published:
                return "a writer has won whose bytes were never in place"
            if word == "unsettled" and not any(_is_of_index(one.request) for one in node.path()):
                return "a writer can't tell of an object that it has not sent"
            if word == "refused" and self.honest:
                return "a bucket that keeps conditions is refused"
            if self.equal:
                continue  # nobody can tell whose bytes they are
            if word in ("conflict", "failed") and bucket.get(f"run/{INDEX}") == data:
                return f"a writer is told {word!r}, and its bytes are in place"
            if word == "conflict" and not self.remover and not set(published) - {data}:
                return "a writer is told of another's version, and there was none"
        return ""


def _is_of_index(request: object) -> bool:
    return isinstance(request, Put) and request.key.endswith(INDEX)
