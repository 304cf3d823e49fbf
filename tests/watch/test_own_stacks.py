"""A look at a program's threads changes nothing in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.roster import memory
from holdfast._core.roster.beacon import beacon_of
from holdfast._watch.collector import Collector
from holdfast._watch.diagnose import diagnose
from holdfast._watch.dumps import read_roll_call
from holdfast._watch.evidence import (
    OPERATION,
    ROLL_CALL,
    Evidence,
    Frame,
    GroupOperation,
    Rank,
    SourceLine,
    Stack,
)
from holdfast._watch.own_stacks import OwnEvidence, stacks_here
from holdfast._watch.places import known_of
from holdfast._watch.positions import is_held, position_among
from holdfast._watch.verdict import Why
from holdfast.testing import Board, MemoryRoster
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until


def looked_at(seen: list[Stack]) -> None:
    """Have another thread look at this one."""
    look = threading.Thread(target=lambda: seen.extend(stacks_here()))
    look.start()
    look.join()


def frees_its_batch(seen: list[Stack]) -> bool:
    for _ in range(1):
        batch = torch.ones(4)
        freed = weakref.ref(batch)
        torch.nn.Linear(2, 2).eval()  # which is not Python's `eval`
        looked_at(seen)
        del batch
    return freed() is None


def test_tensors_of_a_function_are_freed_when_it_deletes_them() -> None:
    seen: list[Stack] = []
    assert frees_its_batch(seen)
    assert any(call.function == "frees_its_batch" for call in seen[0].calls)


def test_a_save_that_waits_for_a_rank_in_a_collective_closes_a_circle(tmp_path: Path) -> None:
    """As the answers of the ranks to a roll call tell it."""
    board, answers = Board(), list[tuple[Rank, dict[str, tuple[int, ...]]]]()
    roster = MemoryRoster(0, 2, board)
    beacon = beacon_of(roster)

    def save(mine: MemoryRoster) -> None:
        holdfast.save({"w": torch.ones(3)}, tmp_path / "a", job=holdfast.Job(roster=mine, timeout=60))

    def answer_and_come() -> None:
        wait_until(lambda: any(one.waiting_for for one in beacon.operations))
        look = OwnEvidence(0, beacon.operations)
        answers.append((look.again(beacon.operations, look.found.stacks), look.members))
        save(MemoryRoster(1, 2, board))

    other = threading.Thread(target=answer_and_come)
    other.start()
    save(roster)
    other.join()
    here, group = SourceLine("roll call"), "0:default_pg"
    call = GroupOperation(group, 7, "all_reduce", "started", here)
    blocked = (Stack("MainThread", (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 9),), here),)
    late = Rank(1, (call,), stacks=blocked, later=blocked, busy=0.0)
    before = msgspec.structs.replace(call, number=6, state="completed")
    (first, members) = answers[0]
    # Where a thread stands at a look is not this test's concern: both are blocked. Torch's recorder still has the
    # collectives of groups that other tests have destroyed.
    operations = (*(one for one in first.operations if one.is_ours), before)
    seen = {"stacks": blocked, "later": blocked, "busy": 0.0, "progress": ()}
    first = msgspec.structs.replace(first, operations=operations, **seen)
    collector = Collector()
    for one in (first, late):
        told = {"roll_call": one, "members": {group: [0, 1], **members}, "world_size": 2, "by": 0}
        read_roll_call(json.loads(msgspec.json.encode(told)), collector, f"rank-{one.rank}")
    found = diagnose(collector.evidence())
    assert found.why is not None
    assert found.why.kind == "cycle"
    assert f"rank 0 waits in save of {tmp_path / 'a'}, rank 1 waits in all_reduce #7 of" in found.why.summary


def test_a_save_that_waits_for_a_rank_is_known_to_wait(tmp_path: Path) -> None:
    board, found = Board(), list[str]()

    def save(rank: int) -> None:
        job = holdfast.Job(roster=MemoryRoster(rank, 2, board), timeout=60)
        holdfast.save({"w": torch.ones(3)}, tmp_path / "a", job=job)

    def come_late() -> None:
        ends = time.monotonic() + 30
        while not found and time.monotonic() < ends:
            stacks = stacks_here()
            ours = [stack for stack in stacks if stack.thread == OPERATION]
            if any(call.file == memory.__file__ for stack in ours for call in stack.calls[:4]):
                found.append(position_among(stacks).does)
            time.sleep(0.01)
        save(1)

    late = threading.Thread(target=come_late)
    late.start()
    save(0)
    late.join()
    assert found == ["waits"]


AT_THE_END = """
import atexit, sys, threading
from holdfast._watch.evidence import AT_EXIT
from holdfast._watch.own_stacks import _raised, stacks_here
from holdfast._watch.positions import has_ended, is_in_its_program

def look(name):
    stack = stacks_here()[0]
    raised = [(one.what, one.is_cause) for one in _raised()]
    print(name, stack.calls[-1] == AT_EXIT, has_ended(stack), is_in_its_program(stack), raised)

looks = {name: (threading.Event(), threading.Event()) for name in ("program", "joins", "handler")}

def watch():
    for name, (asked, done) in looks.items():
        asked.wait()
        look(name)
        done.set()

def ask(name):
    asked, done = looks[name]
    asked.set()
    done.wait(60)

def outlives_the_program():
    threading.main_thread().join()
    ask("joins")

threading.Thread(target=watch, daemon=True).start()
atexit.register(ask, "handler")
ask("program")
threading.Thread(target=outlives_the_program).start()
raise ValueError("the batch is empty")
"""


def test_a_main_thread_at_its_exit_is_told_from_one_in_its_program() -> None:
    """In an `atexit` handler no Python call shows it. What has ended the program is told."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    raised = "[('ValueError: the batch is empty', True)]"
    assert done.stdout.splitlines() == [
        "program False False True []",
        f"joins False True False {raised}",
        f"handler True True False {raised}",
    ]


def receives_two_at_one_line(rank: int) -> list[tuple[Stack, ...]]:
    """Rank 0 is looked at twice in each of two messages."""
    store = dist.distributed_c10d._get_default_store()
    seen: list[tuple[Stack, ...]] = []

    def look() -> None:
        before = ""
        for number in range(2):
            wait_until(lambda: stacks_here()[0].names.get("message", before) != before)  # noqa: B023
            seen.extend((stacks_here(), stacks_here()))
            before = seen[-1][0].names["message"]
            store.set(f"seen {number}", "")

    if rank == 0:
        other = threading.Thread(target=look)
        other.start()
    for number in range(2):
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        else:
            store.wait([f"seen {number}"])
            dist.send(torch.ones(1), 0)
    if rank == 0:
        other.join()
    return seen


def test_a_loop_that_receives_at_one_line_goes_on_from_message_to_message() -> None:
    with ProcessWorld(2) as world:
        first, same, another, _ = world.run(receives_two_at_one_line)[0]
    for later, stays in ((same, True), (another, False)):
        rank = Rank(0, stacks=first, later=later, busy=0.0)
        assert later[0].calls == first[0].calls
        assert is_held(rank, position_among(rank.stacks)) is stays
        (told,) = known_of(Evidence({0: rank}), [0])
        assert ("at both looks" in told.text) is stays
        assert ("and moves: later there in another call" in told.text) is not stays


def test_ranks_at_both_ends_of_a_message_are_no_circle() -> None:
    def at(way: str, peer: int, tag: int) -> Rank:
        names = {"peer": str(peer), "tag": str(tag), "of": "0", "message": "1"}
        torchs = Frame(way, "torch/distributed/distributed_c10d.py", 9)
        stack = Stack(
            "MainThread", (torchs, Frame("step", "train.py", 3)), SourceLine("roll call"), names, "7"
        )
        return Rank(1 - peer, stacks=(stack,), later=(stack,), busy=0.0)

    def why(tag: int, way: str = "recv") -> Why | None:
        return diagnose(Evidence({0: at("send", 1, 1), 1: at(way, 0, tag)}, world_size=2)).why

    assert why(1) is None  # a long message
    other = why(2)
    assert other is not None
    assert other.kind == "cycle"
    assert "send with rank 1 under tag 1, rank 1 waits in recv with rank 0 under tag 2" in other.summary
    both_send = why(1, "send")
    assert both_send is not None
    assert both_send.kind == "cycle"


def blocked(function: str, operations: tuple[GroupOperation, ...], **names: str) -> Rank:
    """Rank 0, whose main thread is in a function of torch and has issued these operations."""
    torchs = Frame(function, "torch/distributed/distributed_c10d.py", 9)
    stack = Stack("MainThread", (torchs, Frame("step", "train.py", 3)), SourceLine("roll call"), names, "7")
    return Rank(0, operations, stacks=(stack,), later=(stack,), busy=0.0)


def issued(group: str, number: int, name: str = "all_reduce") -> GroupOperation:
    return GroupOperation(group, number, name, "started", ROLL_CALL, thread="7", backend="gloo")


def test_a_thread_waits_in_one_of_the_operations_that_it_has_issued() -> None:
    handle = issued("1:metrics", 3)
    members: dict[str, tuple[int, ...]] = {"1:metrics": (0, 2), "2:train": (0, 1)}
    done = tuple(msgspec.structs.replace(issued(group, 2), state="completed") for group in members)
    busy = Stack("MainThread", (Frame("compute", "train.py", 5),), ROLL_CALL, ident="7")
    others = {rank: Rank(rank, done, stacks=(busy,), later=(busy,), busy=1.0) for rank in (1, 2)}

    def who(rank: Rank) -> tuple[int, ...] | None:
        found = diagnose(Evidence({0: rank, **others}, world_size=3, members=members)).who
        assert found is not None
        return found.ranks

    assert who(blocked("all_reduce", (handle, issued("2:train", 3)), **{"in": "2:train"})) == (1,)
    assert who(blocked("all_reduce", (handle, issued("2:train", 3)), **{"in": "1:metrics"})) == (2,)
    assert who(blocked("recv", (handle,), **{"in": "2:train", "peer": "1"})) == (1,)
    assert who(blocked("wait", (handle,))) == (2,)  # torch's own functions wait for handles, too


def test_the_peer_of_a_message_is_no_source_of_a_broadcast() -> None:
    shared = issued("1:weights", 3, "broadcast")
    receives = blocked("recv", (shared,), **{"in": "2:pipe", "peer": "2"})
    waits = msgspec.structs.replace(
        blocked("broadcast", (shared,), **{"in": "1:weights", "peer": "0"}), rank=1
    )
    evidence = Evidence({0: receives, 1: waits, 2: Rank(2)}, world_size=3, members={"1:weights": (0, 1, 2)})
    assert diagnose(evidence).why is None


def test_a_broadcast_in_a_function_called_send_is_no_message() -> None:
    """DeepSpeed's pipelines have had such functions, for backends without messages."""

    def at(rank: int, function: str) -> Rank:
        share = issued("2:pipe", 3, "broadcast")
        one = blocked("broadcast", (share,), **{"in": "2:pipe", "peer": "0"})
        calls = (one.stacks[0].calls[0], Frame(function, "pipe.py", 4))
        stacks = (msgspec.structs.replace(one.stacks[0], calls=calls),)
        return msgspec.structs.replace(one, rank=rank, stacks=stacks, later=stacks)

    ranks = {0: at(0, "send"), 1: at(1, "recv")}
    found = diagnose(Evidence(ranks, world_size=2, members={"2:pipe": (0, 1)}))
    assert found.who is not None
    assert (found.who.ranks, found.why) == ((), None)
    assert "nobody is missing" in found.who.summary


def test_a_call_in_c_is_known_by_its_name() -> None:
    lock = threading.Lock()
    begin, holder, pipe = threading.Barrier(5), {"lock": [lock]}, os.pipe()
    os.write(pipe[1], bytes(100))

    def acquires() -> None:
        begin.wait()
        lock.acquire()
        lock.release()

    def with_a_limit() -> None:
        begin.wait()
        holder["lock"][0].acquire(timeout=max(len(holder), 60.0))
        lock.release()

    def enters() -> None:
        begin.wait()
        with lock:
            pass

    def reads() -> None:
        begin.wait()
        for _ in range(101):  # Python replaces instructions that it has executed often
            os.read(pipe[0], 1)

    functions = (acquires, with_a_limit, enters, reads)
    threads = [threading.Thread(target=one, name=one.__name__) for one in functions]
    with lock:
        for thread in threads:
            thread.start()
        begin.wait()

        def calls() -> dict[str, str]:
            own = {stack.thread: stack for stack in stacks_here()}
            return {
                thread.name: own[thread.name].names.get("calls", "")
                for thread in threads
                if own[thread.name].calls[0].function == thread.name
            }

        wanted = {"acquires": "acquire", "with_a_limit": "acquire", "enters": "__enter__", "reads": "read"}
        wait_until(lambda: calls() == wanted)
    os.write(pipe[1], bytes(1))
    for thread in threads:
        thread.join()
    for end in pipe:
        os.close(end)


WITHOUT_COLUMNS = """
import threading, time
from types import SimpleNamespace
from holdfast._watch.own_stacks import stacks_here

lock, limits = threading.Lock(), SimpleNamespace(seconds=60.0)
lock.acquire()

def waits():
    lock.acquire(timeout=limits.seconds)

threading.Thread(target=waits, name="waits", daemon=True).start()
ends = time.monotonic() + 30
while time.monotonic() < ends:
    told = {stack.thread: stack for stack in stacks_here()}
    if "waits" in told and told["waits"].calls[0].function == "waits":
        break
print(told["waits"].calls[0].function, repr(told["waits"].names.get("calls", "")))
"""


def test_no_method_is_told_of_code_without_columns() -> None:
    """There the call and the loads of its arguments can't be told apart: it would be `seconds`."""
    command = [sys.executable, "-X", "no_debug_ranges", "-c", WITHOUT_COLUMNS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "waits ''\n", ended.stderr


def test_a_rank_in_another_call_is_not_taken_for_one_that_waits_for_its_handle() -> None:
    """Rank 0 waits for rank 1, which has a handle for which rank 2 is missing."""
    train, metrics = issued("2:train", 3), issued("1:metrics", 3)
    done = tuple(msgspec.structs.replace(one, number=2, state="completed") for one in (train, metrics))
    members: dict[str, tuple[int, ...]] = {"1:metrics": (1, 2), "2:train": (0, 1)}
    busy = Stack("MainThread", (Frame("compute", "train.py", 5),), ROLL_CALL, ident="7")

    def who(calls: str) -> tuple[int, ...] | None:
        rests = (Stack("MainThread", (Frame("step", "train.py", 7),), ROLL_CALL, {"calls": calls}, "7"),)
        ranks = {
            0: blocked("all_reduce", (train,), **{"in": "2:train"}),
            1: Rank(1, (metrics, *done), stacks=rests, later=rests, busy=0.0),
            2: Rank(2, done, stacks=(busy,), later=(busy,), busy=1.0),
        }
        found = diagnose(Evidence(ranks, world_size=3, members=members)).who
        assert found is not None
        return found.ranks

    assert who("wait") == (2,)
    assert who("acquire") == (1,)
    assert who("sleep") == (1,)


def test_a_wrapper_of_typing_is_no_place_of_the_program() -> None:
    """As torch's `all_gather_into_tensor` stands in a stack."""
    packages = "/venv/lib/python3.13/site-packages"
    calls = (
        Frame("all_gather_single", f"{packages}/torch/distributed/distributed_c10d.py", 4394),
        Frame("all_gather_into_tensor", f"{packages}/torch/distributed/distributed_c10d.py", 4340),
        Frame("wrapper", f"{packages}/typing_extensions.py", 3140),
        Frame("wrapper", f"{packages}/torch/distributed/c10d_logger.py", 83),
        Frame("gather", "/code/train.py", 7),
    )
    position = position_among((Stack("MainThread", calls, ROLL_CALL),))
    assert (position.does, position.call) == ("waits", calls[-1])
