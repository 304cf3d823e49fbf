"""A bucket and message stores whose every request is a step of `explore`: what obstore is asked, and the effects of
the protocol.

`library` stands in the place of the module obstore, so the code above it is the real one. A conditional PUT is done;
or it gets no answer, or a 503, and is done at any later time or never; or it gets a 409 or a 403, and is never done.
Other requests are done, or get no answer: a PUT of data is not done then, as an object more that no index names breaks
no property, and a deletion is, as that is the more dangerous.

A rank that looks for messages and finds too little waits, and looks again: only the last look is explored, unless the
rank's time is up, which costs one of `hurries`, or nothing where its job can't go on otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from holdfast._core.base.deadline import Deadline
from holdfast._core.store import object_client, object_publish, object_writer, objects
from holdfast._core.store.object_client import Client
from holdfast._core.store.objects import ObjectStore
from tests.support.explore import Alternatives, Script, State, Step, World

T = TypeVar("T")
INDEX = "index.safetensors"
LATER = 3600.0
"""Seconds by which the clock of a process moves when its time is up."""
Answer = tuple[Any, ...]


class Put(NamedTuple):
    key: str
    data: bytes
    mode: str | None
    """`create`, the ETag that must be there, or None for no condition."""

    def __repr__(self) -> str:
        return f"PUT {self.key} {e_tag_of(self.data)[1:5]} if {(self.mode or '-')[:6]}"


class Bucket(NamedTuple):
    objects: frozenset[tuple[str, bytes]]
    pending: frozenset[tuple[int, Put]]
    """Requests that got no answer, each with the number of such requests before it."""
    published: tuple[tuple[bytes | None, bytes], ...]
    """Of every version of the index that was ever put in place: the one before it, and itself."""

    def get(self, key: str) -> bytes | None:
        return dict(self.objects).get(key)

    def put(self, put: Put, honest: bool) -> Bucket | None:
        """Return the bucket after a request that arrives; None if its condition does not hold."""
        there = self.get(put.key)
        if honest and put.mode == "create" and there is not None:
            return None
        if honest and put.mode not in (None, "create") and (there is None or e_tag_of(there) != put.mode):
            return None
        objects = frozenset(
            {(put.key, put.data), *((key, data) for key, data in self.objects if key != put.key)}
        )
        published = self.published
        if put.key.endswith(INDEX):
            published = (*published, (there, put.data))
        return Bucket(objects, self.pending, published)

    def later(self, put: Put) -> Bucket:
        number = max((number for number, _ in self.pending), default=-1) + 1
        return self._replace(pending=self.pending | {(number, put)})

    def without(self, key: str) -> Bucket:
        return self._replace(objects=frozenset(one for one in self.objects if one[0] != key))


def e_tag_of(data: bytes) -> str:
    """As S3's: equal for equal bytes."""
    return f'"{hashlib.md5(data).hexdigest()}"'


class Shared(NamedTuple):
    rosters: tuple[frozenset[tuple[str, str]], ...]
    bucket: Bucket


# -- what the code under test calls instead of obstore -------------------------------------------------


class AlreadyExistsError(Exception):
    pass


class PreconditionError(Exception):
    pass


class GenericError(Exception):
    pass


_now: list[Script] = []
"""The process that runs."""


def _ask(*request: Any) -> Any:
    answer = _now[-1].ask(request if len(request) > 1 else request[0])
    assert isinstance(answer, tuple)
    match answer:
        case ("refused", mode, status):
            kind = AlreadyExistsError if mode == "create" else PreconditionError
            code = "PreconditionFailed" if status == 412 else "ConditionalRequestConflict"
            raise kind(f"Server returned non-2xx status code: {status}: <Code>{code}</Code>")
        case ("unanswered",):
            raise TimeoutError
        case ("status", status):
            raise GenericError(f"Server returned non-2xx status code: {status} Whatever")
        case ("missing",):
            raise FileNotFoundError("Server returned non-2xx status code: 404 Not Found")
    return answer


def _meta(key: str, data: bytes) -> dict[str, Any]:
    when = datetime.fromtimestamp(0, UTC)
    return {"path": key, "last_modified": when, "size": len(data), "e_tag": e_tag_of(data), "version": None}


class _Library:
    def put(self, client: str, key: str, data: bytes, mode: Any = None, use_multipart: bool = False) -> Any:
        assert not use_multipart
        assert client == "once" or mode is None, "obstore repeats it, and takes our object for another's"
        put = Put(key, bytes(data), mode["e_tag"] if isinstance(mode, dict) else mode)
        _ask(put)
        return {"e_tag": e_tag_of(put.data), "version": None}

    def get(self, client: str, key: str, options: dict[str, Any]) -> Any:
        first, stop = options["range"]
        data = _ask("get", key)[1]
        if first >= len(data):
            raise GenericError("Server returned non-2xx status code: 416 Range Not Satisfiable")
        part = data[first:stop]
        return SimpleNamespace(meta=_meta(key, data), bytes=lambda: part)

    def head(self, client: str, key: str) -> Any:
        return _meta(key, _ask("head", key)[1])

    def delete(self, client: str, key: str) -> None:
        _ask("delete", key)

    def list(self, client: str, prefix: str | None, chunk_size: int) -> Any:
        # What is removed when nothing is left: on objects, nothing. So the answer changes nothing.
        return [[{"path": f"{prefix}/x"}]]


_LIBRARY = _Library()


class _AtOnce:
    """A request that is made on the caller's thread."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        try:
            self._result = action()
        except Exception as error:
            self._error = error

    def ended(self, seconds: float) -> bool:
        return True

    def result(self, seconds: float) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


class Clock:
    """The clock of the process that runs."""

    def now(self) -> float:
        return _now[-1].seconds

    def wall(self) -> float:
        return _now[-1].seconds

    def sleep(self, seconds: float) -> None:
        _now[-1].seconds += seconds


CLOCK = Clock()


def _urandom(count: int) -> bytes:
    script = _now[-1]
    script.drawn += 1
    return hashlib.sha256(f"{script.process} {script.drawn}".encode()).digest()[:count]


@contextmanager
def in_place_of_obstore() -> Iterator[None]:
    """Let stores of s3:// ask the explorer."""
    with ExitStack() as patches:
        for module in (object_publish, object_client, object_writer, objects):
            for name, value in (
                ("library", lambda: _LIBRARY),
                ("begin", _AtOnce),
                ("REAL_CLOCK", CLOCK),
                ("time", SimpleNamespace(sleep=CLOCK.sleep)),
                ("os", SimpleNamespace(urandom=_urandom)),
            ):
                if hasattr(module, name) and (name != "os" or module is object_publish):
                    patches.enter_context(patch.object(module, name, value))
        patches.enter_context(
            patch.object(object_client, "_obstore", lambda *_, retries: "repeating" if retries else "once")
        )
        yield


@contextmanager
def running(script: Script) -> Iterator[None]:
    _now.append(script)
    try:
        yield
    finally:
        _now.pop()


def bucket_store(prefix: str, deadline: Deadline | None, tried: bool = True) -> ObjectStore:
    """Return a store of its own client, as each process has. tried: its conditions need no test any more."""
    client = Client("s3", "bucket")
    client.keeps_conditions = tried
    return ObjectStore(client, prefix, deadline)


def over_roster(*request: Any) -> Any:
    return _ask(*request)


# -- the answers -----------------------------------------------------------------------------------------


class ObjectWorld(World[Shared]):
    """Processes over one bucket and, by group, one message store."""

    honest = True
    """Does the server keep conditions?"""
    start = Bucket(frozenset(), frozenset(), ())
    own: Sequence[str] = ()
    """Of each group, what the keys of its own data files have in them."""
    writers: Sequence[int] = ()
    """The processes that write what others read, beside the messages: the index, and the data of older ones."""
    files: Sequence[str] = ()
    """Of each process, the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], Alternatives[Shared]] = {}

    def begin(self) -> Shared:
        return Shared((frozenset(),) * (max(self.groups) + 1), self.start)

    def alternatives(self, process: int, request: Any, state: State[Shared]) -> Alternatives[Shared]:
        group, shared = self.groups[process], state.shared
        if request[0] in _ROSTER:
            may_hurry = state.hurries < self.hurries
            answers = self._of_roster(request, shared.rosters[group], state.dead, may_hurry)
            return Alternatives(
                [
                    Step(answer, shared._replace(rosters=_with(shared.rosters, group, after)), 0, hurries)
                    for answer, after, hurries in answers
                ],
                shared=False,
                # A put only wakes others, and once the outcome stands, no message that is read changes.
                private=not may_hurry
                and not any(
                    node.result is None and node.seconds >= LATER
                    for other, node in enumerate(state.nodes)
                    if self.groups[other] == group
                )
                and (request[0] == "put" or OUTCOME in dict(shared.rosters[group])),
            )
        key = request.key if isinstance(request, Put) else request[1]
        steps = [
            Step(answer, shared._replace(bucket=after), faults)
            for answer, after, faults in self._of_bucket(request, shared.bucket)
        ]
        is_own = bool(self.own) and self.own[group] in key
        # The data of a job is known to others once its index is, or may be, in place.
        known = is_own and any(put.key.endswith(INDEX) for _, put in shared.bucket.pending)
        known = known or (is_own and len(shared.bucket.published) > len(self.start.published))
        mine = is_own and request[0] != "delete" and self.files[process] in key
        is_shared = (not is_own or known) and self._is_noticed(process, request, state)
        return Alternatives(steps, is_shared, private=mine and not known)

    def _is_noticed(self, process: int, request: Any, state: State[Shared]) -> bool:
        """Return whether another group may still change what this request finds, or find what it changes."""
        reads = not isinstance(request, Put) and request[0] != "delete"
        return bool(state.shared.bucket.pending) or any(
            node.result is None and other not in state.dead and (not reads or other in self.writers)
            for other, node in enumerate(state.nodes)
            if self.groups[other] != self.groups[process]
        )

    def _of_bucket(self, request: Any, bucket: Bucket) -> list[tuple[Answer, Bucket, int]]:
        if isinstance(request, Put):
            done = bucket.put(request, self.honest)
            found: list[tuple[Answer, Bucket, int]] = [
                (("done",), done, 0) if done is not None else (("refused", request.mode, 412), bucket, 0)
            ]
            if request.mode is None:  # data: of no consequence for what no index names
                return [*found, (("unanswered",), bucket, 1)]
            late = bucket.later(request)
            found.append((("unanswered",), late, 1))
            found.append((("status", 503), late, 1))
            found.append((("refused", request.mode, 409), bucket, 1))
            found.append((("status", 403), bucket, 1))
            return found
        kind, key = request
        if kind == "delete":
            return [(("done",), bucket.without(key), 0), (("unanswered",), bucket.without(key), 1)]
        data = bucket.get(key)
        return [(("missing",) if data is None else ("found", data), bucket, 0), (("unanswered",), bucket, 1)]

    def _of_roster(
        self, request: Any, roster: frozenset[tuple[str, str]], dead: frozenset[int], may_hurry: bool
    ) -> list[tuple[Answer, frozenset[tuple[str, str]], int]]:
        board = dict(roster)
        match request:
            case ("put", key, text, _):
                return [(("done",), frozenset((board | {key: text}).items()), 0)]
            case ("take", keys, is_late):
                # A look that finds too little ends in a pause, and in another look: only the last is explored.
                others = [key for key in keys if key != OUTCOME]
                there = all(key in board for key in others) if others else len(keys) == 1 or OUTCOME in board
                answer = self._taken(keys, board)
                if there or is_late or ABANDONED in board.get(OUTCOME, ""):
                    return [(answer, roster, 0)]
                return [(answer, roster, 1)] if may_hurry else []
            case ("claim", key, text, _):
                standing = board.setdefault(key, text)
                return [(("claimed", standing), frozenset(board.items()), 0)]
            case ("pause", key, is_late):
                if key in board:
                    return [(("woken", True), roster, 0)]
                # After a look that found too little, so its time is up.
                return [(("woken", False) if is_late else ("late",), roster, 0)]
            case ("look", ranks, _):
                return [(("seen", *(rank in dead for rank in ranks)), roster, 0)]
        raise AssertionError(request)

    @staticmethod
    def _taken(keys: Sequence[str], board: dict[str, str]) -> Answer:
        if ABANDONED in board.get(OUTCOME, "") and OUTCOME in keys:  # then nothing else is looked at
            board = {OUTCOME: board[OUTCOME]}
        return ("messages", *map(board.get, keys))

    def overdue(self, process: int, request: Any, state: State[Shared]) -> Step[Shared] | None:
        board = dict(state.shared.rosters[self.groups[process]])
        return Step(self._taken(request[1], board), state.shared) if request[0] == "take" else None

    def of_nobody(self, shared: Shared) -> Sequence[tuple[str, Shared]]:
        found = []
        for one in shared.bucket.pending:
            after = shared.bucket.put(one[1], self.honest) or shared.bucket
            after = after._replace(pending=after.pending - {one})
            found.append((f"late: {one[1]}", shared._replace(bucket=after)))
        return found


OUTCOME, ABANDONED = "K/outcome", '"state": "abandoned"'
_ROSTER = ("put", "take", "claim", "pause", "look")


def _with(rosters: tuple[Any, ...], group: int, after: Any) -> tuple[Any, ...]:
    return (*rosters[:group], after, *rosters[group + 1 :])


def packed(message: Any) -> str:
    return json.dumps(message, sort_keys=True)
