"""The judgement of many simulated ranks, and what looking for a call costs."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.base.values import Message
from holdfast._core.roster.beacon import Beacon
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.presence import Vitals, at_key
from holdfast._core.roster.process import Identity
from holdfast._core.roster.torch_store import TorchRoster
from holdfast._core.torch_private import flight_records, forget_groups
from holdfast._frameworks import install
from holdfast._watch import roll_call
from holdfast._watch.answering import Answering, Asked, summary
from holdfast._watch.collector import Collector
from holdfast._watch.diagnose import diagnose
from holdfast._watch.dumps import read_roll_call
from holdfast._watch.evidence import Frame, GroupOperation, Rank, SourceLine, Stack
from holdfast._watch.own_stacks import OwnEvidence
from holdfast._watch.shared_call import ask_for_call
from holdfast.errors import RosterLost
from tests.support.cpu_time import cpu_seconds
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until


def answer(
    rank: int, world: int, calls: tuple[Frame, ...], pending: bool, later: tuple[Frame, ...] = ()
) -> Any:
    """What a rank of a simulated world answers."""
    here = SourceLine("roll call")
    operation = GroupOperation(
        "0:default_pg", 7 if pending else 6, "all_reduce", "started" if pending else "completed", here, (1, 1)
    )
    stacks = (Stack("MainThread", calls, here),)
    found = Rank(
        rank, (operation,), stacks=stacks, later=(Stack("MainThread", later or calls, here),), busy=0.0
    )
    members = {"0:default_pg": list(range(world))} if rank == 0 else {}
    return json.loads(
        msgspec.json.encode({"roll_call": found, "members": members, "world_size": world, "by": rank})
    )


def test_a_thousand_ranks_are_judged_in_seconds() -> None:
    """And in time that grows with their number only."""
    main = Frame("train", "train.py", 90)
    waits = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3000), main)
    works = (Frame("plan", "planner.py", 5), Frame("train", "train.py", 80))
    moved = (Frame("plan", "planner.py", 9), Frame("train", "train.py", 80))
    seconds = {}
    for world in (1000, 4000):
        collector = Collector()
        began = time.monotonic()
        for rank in range(world):
            late = rank == 613
            read_roll_call(
                answer(rank, world, works if late else waits, not late, moved if late else ()),
                collector,
                f"rank-{rank}",
            )
        evidence = collector.evidence()
        found = diagnose(evidence)
        assert found.who is not None
        assert (found.why, found.who.ranks, found.is_complete) == (None, (613,), True)
        if world == 1000:
            assert time.monotonic() - began < 10
        seconds[world] = cpu_seconds(partial(diagnose, evidence))
    assert seconds[4000] < 12 * seconds[1000]


@pytest.mark.parametrize(
    ("looks", "says"),
    [
        ((6.0, 7.0, 8.0), "is over"),  # it has ended between the last two looks
        ((6.0, 11.0, 12.0), "has failed by its timeout"),
        ((6.0, 9.5, 11.5), "has ended (whether by its timeout is not known)"),
        ((6.0, 6.5, 9.9), "is over"),  # the timeout can't have passed, however far apart the looks are
    ],
)
def test_the_end_of_a_collective_is_told_as_far_as_it_is_known(
    looks: tuple[float, float, float], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timeout is 10 s. The record of gloo does not tell whether it has failed."""
    done, now = 3, 0.0

    def records(entries: bool = False) -> list[Any]:
        numbers = {"last_enqueued_collective": 4, "last_completed_collective": done}
        return [{"pg_status": {"0": numbers}, "entries": [{"pg_id": 0, "timeout_ms": 10_000}]}]

    monkeypatch.setattr(roll_call, "flight_records", records)
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now)
    pending = roll_call.PendingCollectives()
    assert (pending.over(), pending.too_long()) == (None, None)
    now = looks[0]
    assert (pending.over(), pending.too_long()) == (None, (6.0, 10.0))
    pending.called()
    pending.tell()
    now = looks[1]
    assert (pending.over(), pending.too_long()) == (None, None)
    now, done = looks[2], 4
    ended = pending.over()
    assert ended is not None
    assert ended[1] == says


def test_of_ranks_that_call_at_once_one_tells_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done, now = 3, 0.0

    def records(entries: bool = False) -> list[Any]:
        numbers = {"last_enqueued_collective": 4, "last_completed_collective": done}
        return [{"pg_status": {"0": numbers}, "entries": [{"pg_id": 0, "timeout_ms": 10_000}]}]

    class SeesNoCall(MemoryRoster):
        """The call of the other rank comes between its look and its own call."""

        def get(self, keys: Sequence[str]) -> list[Message | None]:
            return [None] * len(keys)

    monkeypatch.setattr(roll_call, "flight_records", records)
    monkeypatch.setattr(roll_call, "start_thread", lambda work, name: threading.Thread())
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now)
    first = MemoryRoster(0, 2)
    rosters = [first, SeesNoCall(1, 2, first.board)]
    calls = [roll_call.RollCall(roster) for roster in rosters]
    for look in ((1.0, 3), (7.0, 3), (8.0, 4)):
        now, done = look
        for call, roster in zip(calls, rosters, strict=True):
            call._look(roster, Beacon(roster))
            if now > 1.0:  # the first look only notices the collective
                call._pending.tell()
    assert [record.message for record in caplog.records if "is over" in record.message] == [
        "The collective of the last roll call is over, after 7 s."
    ]


def test_a_record_that_does_not_tell_a_timeout_is_read_once_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All its entries take half a second to read, with the GIL, of a program that may be computing."""
    done, read = 3, list[bool]()

    def records(entries: bool = False) -> list[Any]:
        read.append(entries)
        numbers = {"last_enqueued_collective": done + 1, "last_completed_collective": done}
        return [{"pg_status": {"0": numbers}, "entries": [{"pg_id": 0, "timeout_ms": None}]}]

    monkeypatch.setattr(roll_call, "flight_records", records)
    monkeypatch.setattr(roll_call, "NOTICED", 0.0)
    pending = roll_call.PendingCollectives()
    for number in (3, 4):
        done = number
        assert [pending.too_long() for _ in range(5)] == [None] * 5
    assert read.count(True) == 2


def test_of_a_process_that_uses_cuda_only_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the time of a call is known without. That a graph can be captured meanwhile, a test on a GPU shows."""
    # The record keeps the groups of earlier tests of this process.
    before = {key for key, _, _ in roll_call._statuses()}
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=70),
    )
    try:
        dist.new_group([0], timeout=timedelta(seconds=50))
        dist.all_reduce(torch.ones(1))
        assert any(record.get("entries") for record in flight_records(entries=True))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not any(record.get("entries") for record in flight_records(entries=True))
        [(key, enqueued, _)] = [one for one in roll_call._statuses() if one[0] not in before]
        assert enqueued == 1
        assert roll_call.PendingCollectives()._limit(key, 0) == 50.0
    finally:
        dist.destroy_process_group()


def test_a_collective_of_an_earlier_process_group_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that aborts its groups and begins again in the same process leaves their calls in the record."""
    monkeypatch.setattr(roll_call, "NOTICED", 0.0)
    monkeypatch.setattr(roll_call, "SHARE", 0.0001)
    store = dist.HashStore()  # type: ignore[attr-defined]
    pair: list[Any] = [None, None]

    def join(rank: int) -> None:
        pair[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = torch.ones(1), torch.ones(1)
    works = [pair[0].allreduce([one])]
    pending = roll_call.PendingCollectives()
    wait_until(lambda: pending.too_long() is not None)
    forget_groups()  # as `install` does when a program makes its default group
    for _ in range(5):
        assert pending.too_long() is None
        time.sleep(0.01)
    works.append(pair[1].allreduce([other]))
    for work in works:
        work.wait()


def numbers_of_each_default_group(rank: int) -> list[list[int]]:
    """What a roll call tells of a default group before its first collective, and after two, three groups long."""

    def numbers() -> list[int]:
        # The last one: that the first is over may be recorded later.
        return sorted(operation.number for operation in OwnEvidence(0, []).found.operations)[-1:]

    holdfast.install("torch-dcp", session=False)
    told = []
    for again in range(3):
        if again:
            dist.destroy_process_group()
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        told.append(numbers())
        dist.barrier()
        dist.all_reduce(torch.ones(1))
        told.append(numbers())
    return told


def test_what_an_earlier_process_group_did_is_no_evidence() -> None:
    """Its groups have the names of those that a program makes later: a rank that is late to the first collective
    of the new one had issued another there."""
    with ProcessWorld(1) as world:
        assert world.run(numbers_of_each_default_group) == [[[], [2]] * 3]


def test_a_process_group_that_goes_during_a_call_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    roster = TorchRoster()
    call, beacon = roll_call.RollCall(roster), Beacon(roster)
    answering = Answering(roster, beacon, 0, Asked(0, "it hangs", 0.1, time.time()), threading.Event())
    dist.destroy_process_group()
    del store
    call._answer(answering, beacon)
    assert not caplog.records


@pytest.mark.gpu
def test_a_graph_is_captured_while_records_are_read() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            flight_records(entries=True)

    reader = threading.Thread(target=read)
    try:
        reader.start()
        for _ in range(20):
            values = torch.ones(1 << 20, device=device)
            dist.all_reduce(values)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                values.mul_(2)
            graph.replay()
    finally:
        over.set()
        reader.join()
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rank", "ended", "looks"),
    [
        (2, {0, 1}, True),
        (2, {0}, True),
        (2, set(), False),
        (5, {0, 1, 2, 3, 4}, True),
        (5, {0, 1, 2, 4}, True),
        (5, {0, 1}, False),
    ],
)
def test_when_the_first_ranks_have_ended_others_look_for_calls(
    rank: int, ended: set[int], looks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ROLL_CALLS", str(tmp_path))
    ask_for_call(str(tmp_path), "somebody asks")
    base = MemoryRoster(rank, 6)
    for one in range(rank):
        beacon = Beacon(MemoryRoster(one, 6))
        beacon.ended = "its program has ended" if one in ended else ""
        base.put(at_key(one), beacon.message())
    call = roll_call.RollCall(base)
    call._look_in_folder(base)
    if looks:
        wait_until(lambda: call._waiting_call is not None)
    else:
        assert not call._looks.is_set()
        assert call._waiting_call is None


def stops_in_a_collective(rank: int, folder: Path) -> list[str]:
    """Rank 0 is stopped before a collective; return what this rank has logged, which is also in a file."""
    told: list[str] = []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            (folder / f"told-{rank}").write_text(told[-1], encoding="utf-8")

    logging.getLogger("holdfast").addHandler(Note())
    holdfast.install("torch-dcp")
    group = dist.new_group(timeout=timedelta(seconds=40))
    calls = install._current.roll_call
    assert calls is not None
    wait_until(lambda: calls._host is not None, 60)
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with suppress(RuntimeError):  # on a busy machine it may not be resumed within the timeout
        dist.all_reduce(torch.ones(1), group=group)
    return told


def test_ranks_that_can_not_call_the_roll_say_who_hosts_the_message_store(tmp_path: Path) -> None:
    """A process that is stopped answers nobody, and its ranks' store neither."""
    with ProcessWorld(3, store_host="rank 0") as world:
        world.start(stops_in_a_collective, tmp_path)
        wait_until(lambda: all((tmp_path / f"told-{rank}").exists() for rank in (1, 2)), 120)
        pid = world.pid(0)
        world.signal(0, signal.SIGCONT)
        told = [result.get() for result in world.collect(60)]
    assert told[0] == []
    host = f"It is in the process of rank 0 (pid {pid} on host {socket.gethostname()}): it is stopped by a signal (state T)."
    for said in told[1:]:
        (silence,) = [text for text in said if "no roll can be called" in text]
        assert re.match(
            r"A collective has taken [23]\d of 40 s, and no roll can be called: the message store has not ",
            silence,
        )
        assert silence.endswith(host)


class Unreachable(MemoryRoster):
    """A roster whose reads fail while `is_silent`."""

    is_silent = True

    def get(self, keys: Sequence[str]) -> list[Message | None]:
        if self.is_silent:
            raise RosterLost("The message store can't be reached (reading: timed out).")
        return super().get(keys)


def test_one_read_that_fails_is_no_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been this process that was stopped in it."""
    roster = Unreachable(0, 2)
    calls = roll_call.RollCall(roster)
    monkeypatch.setattr(calls._pending, "too_long", lambda: (10.0, 20.0))
    monkeypatch.setattr(calls, "_call", lambda *_: None)
    for is_silent, told in (
        (True, 0),
        (False, 0),
        (True, 0),
        (True, 1),
        (True, 1),
        (False, 1),
        (True, 1),
        (True, 2),
    ):
        roster.is_silent = is_silent
        calls.beat()
        assert caplog.text.count("the message store has not answered for 0 s.") == told


def test_a_rank_shows_itself_soon_after_install() -> None:
    """In a large world its message is renewed once in a minute: if it hangs before, the others see nothing of it."""
    base = MemoryRoster(0, 100_000)
    beacon, user = Beacon(base), object()
    beacon.interval = 0.1
    assert beacon.pace == 60
    beacon.keep(user)
    try:
        wait_until(lambda: base.get([at_key(0)])[0] is not None, 30)
    finally:
        beacon.let_go(user)


HOLDS_ITS_GIL = """
import re, msgspec
from holdfast._core.roster.process import this_process
print(msgspec.json.encode(this_process(1)).decode(), flush=True)
re.match("(a+)+$", "a" * 99 + "b")
"""
PY_SPY = """#!/bin/sh
echo "$@" >> {calls}
cat << END
Process $5: /venv/bin/python train.py --rank 3
Python v3.11.7 (/venv/bin/python3.11)

Thread $5 (active+gil): "MainThread"
    sre_ucs1_match (/usr/lib/libpython3.11.so.1.0)
    _sre_SRE_Pattern_match (/usr/lib/libpython3.11.so.1.0)
    match (/usr/lib/python3.11/re/__init__.py:166)
    load_batch (/job/train.py:11)
    <module> (/job/train.py:25)
    0x7f1869c4524a (/usr/lib/libc.so.6)
END
"""
"""It prints what py-spy 0.4.3 has printed of such a process."""


def test_a_rank_that_holds_its_gil_and_runs_is_looked_at_by_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one rank of its machine, and not while it is stopped: py-spy lets it go on then."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("HOLDFAST_ROLL_CALLS", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    calls = tmp_path / "calls"
    (tmp_path / "py-spy").write_text(PY_SPY.format(calls=calls))
    (tmp_path / "py-spy").chmod(0o755)
    rosters = [MemoryRoster(0, 3)]
    rosters.append(MemoryRoster(2, 3, rosters[0].board))
    for roster in rosters:
        roster.put(f"roll/0/{roster.rank}", {"by": roster.rank})
    asked = Asked(2, "somebody asks", 1.0, time.time())
    ranks = [Answering(roster, Beacon(roster), 0, asked, threading.Event()) for roster in rosters]
    with subprocess.Popen([sys.executable, "-c", HOLDS_ITS_GIL], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            who = msgspec.json.decode(child.stdout.readline(), type=Identity)
            rosters[0].put(at_key(1), msgspec.to_builtins(Vitals(who)))
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: who.state() == "T")
            for one in ranks:
                one._look_at_running([0, 1, 2])
            assert not calls.exists()
            child.send_signal(signal.SIGCONT)
            wait_until(lambda: who.state() == "R")
            for one in reversed(ranks):
                one._look_at_running([0, 1, 2])
        finally:
            child.kill()
    assert calls.read_text().split()[-1] == str(child.pid)
    assert len(calls.read_text().splitlines()) == 1
    collector = Collector()
    found = rosters[0].get(["roll/0/1"])[0]
    assert found is not None
    read_roll_call(found, collector, "rank-1.json")
    evidence = collector.evidence()
    assert evidence.ranks[1].busy == 1.0
    told = summary("somebody asks", diagnose(evidence), evidence, "").splitlines()
    assert "  rank 1: is at load_batch (/job/train.py:11)" in told
    assert "  ranks 0, 2: no answer. py-spy dump --pid PID, on its host, tells where it is." in told


def test_an_answer_from_before_the_end_of_a_collective_says_nothing_of_the_next() -> None:
    """A rank that was stopped answers once the others have gone on: it completes their collective by that."""
    here, group = SourceLine("roll call"), "0:default_pg"
    waits = (
        Stack("MainThread", (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3000),), here),
    )

    def found(rank: int, *operations: tuple[int, str]) -> Rank:
        made = (GroupOperation(group, number, "all_reduce", state, here) for number, state in operations)
        return Rank(rank, tuple(made), stacks=waits, later=waits, busy=0.0)

    def judged(*ranks: Rank) -> tuple[int, ...]:
        collector = Collector()
        for one in ranks:
            told = {"roll_call": one, "members": {group: [0, 1, 2]}, "world_size": 3, "by": 0}
            read_roll_call(json.loads(msgspec.json.encode(told)), collector, f"rank-{one.rank}")
        who = diagnose(collector.evidence()).who
        return who.absent if who is not None else ()

    stopped = found(1, (3, "completed"), (4, "started"))
    assert judged(found(0, (3, "started")), stopped, found(2, (3, "started"))) == ()
    assert judged(found(0, (3, "completed")), stopped, found(2, (3, "completed"))) == (0, 2)
    assert judged(found(0, (3, "started")), found(1, (2, "completed")), found(2, (3, "started"))) == (1,)
