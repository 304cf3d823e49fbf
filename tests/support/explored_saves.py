"""Saves of several jobs into one folder of a bucket, step by step: each rank is the real `SaveJob`, with the real
protocol, over the message store and the bucket of `explored_bucket`.

Left out: the rendezvous and the end of a call, lost message stores, what hearts of other ranks do at a death (who
waits sees it at its deadline here), and repeated looks for the index, of which there is one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from holdfast import Shard
from holdfast._core.base.deadline import Deadline, Limits
from holdfast._core.base.options import Options
from holdfast._core.format.index import Index
from holdfast._core.io import index_file
from holdfast._core.protocol import core
from holdfast._core.protocol.call import Call
from holdfast._core.protocol.effects import Claim, Context, Do, Get, Look, Pause, Put, Steps
from holdfast._core.protocol.operation import read_state
from holdfast._core.protocol.phases import TRANSITIONS
from holdfast._core.protocol.runner import Cancel
from holdfast._core.roster.lost import Seen
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.saving import cleanup, commit
from holdfast._core.saving.job import SaveJob
from holdfast._core.saving.request import SaveRequest
from holdfast._core.state.flatten import flatten
from holdfast.errors import CommitUnconfirmed, HoldfastError, NotCommitted
from tests.support.explore import Script, State
from tests.support.explored_bucket import (
    CLOCK,
    INDEX,
    LATER,
    Bucket,
    ObjectWorld,
    Shared,
    bucket_store,
    over_roster,
    packed,
    running,
)


class _Operation:
    """`protocol.operation.Operation` without threads: its effects are requests of the explorer."""

    def __init__(self, call: Call, title: str, attempt: str, first: int) -> None:
        self.context = Context(
            call.rank, call.participants, "K", title, call.deadline, call.limits, transitions=TRANSITIONS
        )
        self.attempt, self.cancel, self.bytes_total = attempt, Cancel(), 0
        self._first = first
        """The number of the process that is rank 0 of this job."""

    def read_state(self, read: Callable[[], None]) -> HoldfastError | None:
        return read_state(read, self.context.rank)

    def tick(self) -> None: ...

    def progress(self, moved: int) -> None: ...

    def seconds(self) -> float:
        return 0.0

    def phases(self) -> dict[str, float]:
        return {}

    def run(self, steps: Steps, collect_error: HoldfastError | None, pause_collector: bool) -> Any:
        self.context.collect_error = collect_error
        go = partial(steps.send, None)
        while True:
            try:
                effect = go()
            except StopIteration as end:
                return end.value
            try:
                go = partial(steps.send, self._perform(effect))
            except HoldfastError as error:
                go = partial(steps.throw, error)

    def _perform(self, effect: Any) -> Any:
        match effect:
            case Do(_, action):
                return action()
            case Put(key, message):
                return over_roster("put", key, packed(message), ())
            case Get(keys):
                found = over_roster("take", tuple(keys), self.context.deadline.passed())
                return [None if text is None else json.loads(text) for text in found[1:]]
            case Claim(key, message):
                return json.loads(over_roster("claim", key, packed(message), ())[1])
            case Pause(key, _):
                found = over_roster("pause", key, self.context.deadline.passed())
                if found == ("late",):
                    CLOCK.sleep(LATER)
                return found == ("woken", True)
            case Look(ranks):
                found = over_roster("look", tuple(self._first + rank for rank in ranks), ())
                return {
                    rank: Seen(ended="its process has ended", there=False) if ended else Seen(there=True)
                    for rank, ended in zip(ranks, found[1:], strict=True)
                }
        raise AssertionError(f"{effect}: only `rendezvous`, which is not explored, has this effect")


class _Job(SaveJob):
    def __init__(self, request: SaveRequest, attempt: str, first: int) -> None:
        self._attempt, self._first = attempt, first
        super().__init__(request)

    def begin(self) -> None:
        request = self.request
        self.operation = _Operation(request.call, request.title, self._attempt, self._first)  # type: ignore[assignment]
        self.is_committer = self.operation.context.is_committer
        self.commit, self.files = None, []


class Saves(ObjectWorld):
    """Jobs that save into one folder at once.

    replace: there is a committed checkpoint before, which each of them may replace.
    seconds: the deadline of each save; so much may pass in pauses between repeated requests.
    """

    def __init__(
        self,
        jobs: int = 2,
        ranks: int = 3,
        seconds: float = 0.25,
        faults: int = 1,
        hurries: int = 0,
        kills: int = 0,
        start: Bucket | None = None,
        names: str = "abc",
    ) -> None:
        super().__init__()
        self.jobs, self.ranks, self.seconds = jobs, ranks, seconds
        self.faults, self.hurries, self.kills = faults, hurries, kills
        self.start = start or ObjectWorld.start
        self.attempts = [letter * 12 for letter in names[:jobs]]
        self.own = [f"data/{attempt}" for attempt in self.attempts]
        self.groups = [number for number in range(jobs) for _ in range(ranks)]
        self.processes = [self._process(number, rank) for number in range(jobs) for rank in range(ranks)]
        self.writers = range(0, jobs * ranks, ranks)
        self.files = [f"{own}-r{rank:05d}" for own in self.own for rank in range(ranks)]
        self._names: dict[bytes, tuple[str, frozenset[str]]] = {}

    def _process(self, number: int, rank: int) -> Callable[[Script], Any]:
        def save(script: Script) -> tuple[str, bytes | None]:
            with running(script):
                deadline = Deadline(self.seconds, CLOCK)
                call = Call(
                    MemoryRoster(rank, self.ranks), tuple(range(self.ranks)), deadline, Limits(self.seconds)
                )
                state = {"w": Shard(torch.full((1,), float(number)), (self.ranks,), (rank,))}
                request = SaveRequest(
                    store=bucket_store("run", deadline),
                    collect=partial(flatten, state),
                    call=call,
                    options=Options(writer_threads=1),
                )
                made = _Job(request, self.attempts[number], number * self.ranks)
                try:
                    made.run()
                    result = "committed"
                except CommitUnconfirmed:
                    result = "unconfirmed"
                except HoldfastError:
                    result = "failed"
                return result, made.commit.replaced_version if made.commit is not None else None

        return save

    # -- properties --------------------------------------------------------------------------------------

    def _read(self, index: bytes) -> tuple[str, frozenset[str]]:
        """Return the attempt and the files of an index."""
        if index not in self._names:
            with_files = Index(lambda start, length: index[start : start + length], len(index), "the index")
            self._names[index] = str(with_files.about["attempt"]), frozenset(with_files.file_names())
        return self._names[index]

    def check(self, state: State[Shared], is_over: bool) -> str:
        bucket = state.shared.bucket
        keys = {key for key, _ in bucket.objects}
        index = bucket.get(f"run/{INDEX}")
        there = None
        if index is not None:
            there, files = self._read(index)
            missing = {f"run/{name}" for name in files} - keys
            if missing:
                return f"the committed index of {there} names objects that are missing: {missing}"
        came = {self._read(data)[0] for _, data in bucket.published}
        winners: dict[bytes | None, str] = {}
        for process, node in enumerate(state.nodes):
            if node.result is None:
                continue
            result, replaced = node.result  # type: ignore[misc]
            attempt = self.attempts[self.groups[process]]
            if result == "committed":
                if attempt not in came:
                    return f"rank {process} reports success of {attempt}, whose index was never in place"
                if process % self.ranks == 0 and winners.setdefault(replaced, attempt) != attempt:
                    return "two jobs have replaced one version"
            if result == "failed" and attempt == there:
                return f"rank {process} reports failure of {attempt}, whose index is in place"
            if result == "unconfirmed" and any(
                isinstance(one.request, tuple) and one.request[0] == "delete" for one in node.path()
            ):
                return f"rank {process} can't tell, and has deleted"
        return ""


def _nothing_there(store: Any) -> NotCommitted:
    return NotCommitted("There is none.")


@contextmanager
def in_place_of_threads() -> Iterator[None]:
    """Let a save do all on one thread, at one time of day, and look once where it would look for long."""
    with ExitStack() as patches:
        for place, name, value in (
            (cleanup, "start_thread", lambda work, name: work()),
            (cleanup, "REAL_CLOCK", CLOCK),
            (commit, "VISIBLE_WITHIN", 0.0),
            (core, "VISIBLE_WITHIN", 0.0),
            (commit, "time", SimpleNamespace(time=CLOCK.now)),
            (index_file, "nothing_there", _nothing_there),
        ):
            patches.enter_context(patch.object(place, name, value))
        yield
