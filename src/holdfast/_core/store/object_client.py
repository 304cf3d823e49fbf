"""A bucket of an object store, by obstore: requests under a deadline, from any thread.

A request runs on a thread of its own, and its caller waits. So a signal (Ctrl-C, SIGTERM) is heard in the
middle of a request, and a request can be given up: its thread ends at the limits below. Not by obstore's
coroutines: a process that ends right after one of them is aborted now and then.

obstore does not survive a fork: a child that uses it hangs, and then its parent does, too. So a child gets an
error instead.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from holdfast._core.base.deadline import REAL_CLOCK, Deadline
from holdfast._core.base.threads import start_thread
from holdfast._core.store.object_errors import (
    explained,
    is_answer,
    is_final,
    is_passing,
    missing_package,
)
from holdfast._core.store.schemes import environment
from holdfast.errors import StorageError

T = TypeVar("T")
CONNECT, READ, REQUEST = 5.0, 30.0, 120.0
"""Seconds for a connection, between two bytes of a reply, and for a whole request with its body."""
PATIENCE = 180.0
"""Seconds for which requests are tried again."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
"""Seconds before a request is tried again for the first time, and at most; between them they grow."""
FIRST_ANSWER, FIRST_TRIES = 20.0, 3
"""Seconds for which a request is tried again, and how often it is made at least, while the server has not
answered any: it may have a wrong address, and its user wants to know soon; or it, a DNS or a service of roles
starts together with the job."""
SLOW = 30.0
"""Seconds after which a warning says that a request has not succeeded yet."""
_UNBOUNDED = 100_000
"""Repetitions of a request that are bounded by PATIENCE only."""

log = logging.getLogger("holdfast")


class Request(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        start_thread(self._run, "holdfast-objects")

    def _run(self) -> None:
        try:
            self._result.append(self._action())
        except BaseException as error:
            self._error = error
        self._ended.set()

    def ended(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def result(self, seconds: float) -> T:
        """Return what the call returned, or raise what it raised; TimeoutError if it has not ended."""
        if not self._ended.wait(max(seconds, 0.0)):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result[0]


Meta: TypeAlias = Mapping[str, Any]
"""The metadata of an object, as obstore gives it: `e_tag`, `version`, `size` and others."""


class _ForkGuard:
    """Whether this process may use obstore."""

    def __init__(self) -> None:
        self.used = False
        self.before_fork: int | None = None
        """The process that used obstore before this one was forked from it."""
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self.used:
            self.before_fork = self.before_fork or os.getppid()

    def use(self) -> None:
        self.used = True
        if self.before_fork is not None:
            raise StorageError(
                f"This process was forked from process {self.before_fork} after that one had used an object "
                "store, whose connections do not survive that: it would hang.",
                hint="Start it by spawn or forkserver (DataLoader(multiprocessing_context=...)), or use "
                "the object store only in its parent.",
            )


_process = _ForkGuard()


class SlowWarning:
    """Warns once that a request has not succeeded for SLOW seconds."""

    def __init__(self, doing: str, url: str, limit: float) -> None:
        self._doing, self._url, self._limit = doing, url, limit
        self._begun, self._is_due = REAL_CLOCK.now(), True

    def look(self) -> None:
        seconds = REAL_CLOCK.now() - self._begun
        if seconds >= SLOW and self._is_due:
            self._is_due = False
            log.warning(
                "%s %s has not succeeded for %.0f s: the server refuses, does not answer, or is slow. It is "
                "given up after %.0f s at most.", self._doing, self._url, seconds, self._limit,
            )  # fmt: skip


def begin(action: Callable[[], T]) -> Request[T]:
    """Begin a request on a thread of its own."""
    _process.use()
    return Request(action)


class _Handles(NamedTuple):
    """obstore's stores for a bucket: one makes a request once, the other repeats it for PATIENCE seconds."""

    made_in: int
    """A hash of the environment, in which credentials may be renewed."""
    once: object
    repeating: object


class Client:
    """A bucket."""

    def __init__(self, scheme: str, bucket: str) -> None:
        self.scheme, self.bucket = scheme, bucket
        self._made = self._make()
        self.has_answered = False
        """Whether the server is known to be there."""
        self._versions: dict[str, tuple[bytes, dict[str, str]]] = {}
        """The last bytes of small objects that were read or written here, and their version, by key."""
        self._noting = threading.Lock()
        self.keeps_conditions = False
        """Whether this bucket is known to keep the conditions of a PUT."""

    def _make(self) -> _Handles:
        made_in = current_environment()  # first: what is renewed after this is seen the next time
        once, repeating = (_obstore(self.scheme, self.bucket, retries=times) for times in (0, _UNBOUNDED))
        return _Handles(made_in, once, repeating)

    def _handles(self) -> _Handles:
        if self._made.made_in != current_environment():
            self._made = self._make()
        return self._made

    @property
    def once(self) -> object:
        """For requests that `call` repeats, and for conditional PUTs, whose replies only `object_publish`
        understands."""
        return self._handles().once

    @property
    def pages(self) -> object:
        """For listings: each page is repeated by itself, once the server has answered at all."""
        return self._handles().repeating if self.has_answered else self.once

    @property
    def parts(self) -> object:
        """For uploads: each part is repeated by itself."""
        return self._handles().repeating

    def url(self, key: str) -> str:
        return f"{self.scheme}://{self.bucket}/{key}"

    def note_version(self, key: str, tail: bytes, version: dict[str, str]) -> None:
        with self._noting:
            while len(self._versions) >= 256:
                del self._versions[next(iter(self._versions))]
            self._versions[key] = tail, version

    def forget_version(self, key: str) -> None:
        with self._noting:
            self._versions.pop(key, None)

    def version_noted(self, key: str, tail: bytes) -> dict[str, str] | None:
        """Return the version of an object that was seen with these last bytes; None if it was not."""
        with self._noting:
            found, version = self._versions.get(key, (None, None))
        return version if found == tail else None

    def begin_all(
        self, doing: str, key: str, actions: Sequence[Callable[[], T]], deadline: Deadline | None = None
    ) -> Callable[[], list[T]]:
        """Begin several such requests at once; return a function that waits for their results."""
        begun, limit = REAL_CLOCK.now(), PATIENCE + REQUEST
        limit = limit if deadline is None else min(limit, deadline.left())
        warning = SlowWarning(doing, self.url(key), limit)
        requests = [begin(partial(self.tried, action, begun + limit)) for action in actions]

        def results() -> list[T]:
            soon = begun + min(SLOW, limit)
            try:
                if not all(request.ended(soon - REAL_CLOCK.now()) for request in requests):
                    warning.look()
                return [request.result(begun + limit - REAL_CLOCK.now()) for request in requests]
            except StorageError:
                raise
            except Exception as error:
                raise explained(doing, self.url(key), error, REAL_CLOCK.now() - begun) from None

        return results

    def tried(self, action: Callable[[], T], ends: float) -> T:
        """Make such a request on this thread. ends: when nobody waits for it any more."""
        begun, pause, tries = REAL_CLOCK.now(), FIRST_PAUSE, 0
        while True:
            credentials, tries = current_environment(), tries + 1
            try:
                result = action()
            except Exception as error:
                now = REAL_CLOCK.now()
                if is_final(error) and credentials != current_environment() and now < ends:
                    continue  # they were being renewed, one variable after the other
                self.has_answered = self.has_answered or is_answer(error)
                patience = PATIENCE if self.has_answered or tries < FIRST_TRIES else FIRST_ANSWER
                rest = begun + patience - now
                if not is_passing(error) or rest <= 0 or now + pause > ends:
                    raise
            else:
                self.has_answered = True
                return result
            # Ranks that were refused together come apart. The last try is made when patience ends.
            REAL_CLOCK.sleep(min(random.uniform(pause / 2, pause), rest))
            pause = min(2 * pause, LONGEST_PAUSE)

    def call_all(
        self, doing: str, key: str, actions: Sequence[Callable[[], T]], deadline: Deadline | None = None
    ) -> list[T]:
        """Make several such requests at once."""
        return self.begin_all(doing, key, actions, deadline)()

    def call(self, doing: str, key: str, action: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Make a request that may be repeated. Raises StorageError, NotFound among them."""
        return self.call_all(doing, key, [action], deadline)[0]


def left(deadline: Deadline | None) -> float:
    """Return for how long to try."""
    return PATIENCE if deadline is None else min(PATIENCE, deadline.left())


_clients: dict[tuple[str, str], tuple[int, Client]] = {}
"""The client of each bucket, with a hash of the environment that it was made in."""
_known = threading.Lock()


def client_of(scheme: str, bucket: str) -> Client:
    """Return the client of a bucket; a new one if the environment has changed: it may name another server."""
    now = current_environment()
    with _known:
        before, client = _clients.get((scheme, bucket), (0, None))
        if client is None or before != now:
            client = Client(scheme, bucket)
            _clients[scheme, bucket] = now, client
        return client


def current_environment() -> int:
    """Return a hash of the variables that hold addresses and credentials."""
    return hash(tuple(sorted(environment().items())))


@cache
def library() -> ModuleType:
    """Return obstore. Raises StorageError if it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise missing_package(error) from None
    return obstore


def _obstore(scheme: str, bucket: str, retries: int) -> object:
    """Return obstore's handle of a bucket, which repeats each request up to `retries` times."""
    store = library().store
    kinds = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    options: dict[str, object] = {
        "connect_timeout": timedelta(seconds=CONNECT),
        "read_timeout": timedelta(seconds=READ),
        "timeout": timedelta(seconds=REQUEST),
    }
    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    http = any(os.environ.get(name, "").startswith("http://") for name in endpoints)
    if http or "http://" in os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY", ""):
        options["allow_http"] = True
    backoff = {
        "init_backoff": timedelta(seconds=FIRST_PAUSE),
        "max_backoff": timedelta(seconds=LONGEST_PAUSE),
        # A pause is drawn from the first one up to `base` times the last: it grows only if that is above e.
        "base": 6,
    }
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=PATIENCE), "backoff": backoff}
    try:
        return kinds[scheme](bucket, client_options=options, retry_config=retry)
    except Exception as error:
        raise explained("Opening", f"{scheme}://{bucket}", error, 0.0) from None
