"""What stacks decide, and what they don't."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from holdfast._watch.answering import summary
from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import (
    AT_EXIT,
    Ending,
    Frame,
    GroupOperation,
    GroupProgress,
    Rank,
    SourceLine,
    Stack,
)
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Diagnosis

WAITS = "    all_reduce (torch/distributed/distributed_c10d.py:3000)\n    step (train.py:50)\n    train (train.py:90)\n"


def dump(folder: Path, rank: int, lines: str, again: str = "", more: str = "", state: str = "idle") -> None:
    for name, text in ((f"rank-{rank}.txt", lines), (f"rank-{rank}-again.txt", again)):
        if text:
            (folder / name).write_text(
                f'Process {rank}: python\n\nThread {rank} ({state}): "MainThread"\n{text}{more}'
            )


def among_waiting(folder: Path, lines: str, again: str = "", more: str = "") -> Diagnosis:
    """Ranks 0 to 2 wait, and rank 3 is elsewhere."""
    for rank in range(3):
        dump(folder, rank, WAITS)
    dump(folder, 3, lines, again, more)
    return diagnose(read_all([str(folder)]))


BEFORE = "    read (data.py:7)\n    step (train.py:40)\n    train (train.py:90)\n"
MOVED = "    read (data.py:9)\n    step (train.py:40)\n    train (train.py:90)\n"
BEHIND = "    write (log.py:7)\n    step (train.py:60)\n    train (train.py:90)\n"
BEHIND_MOVED = "    write (log.py:9)\n    step (train.py:60)\n    train (train.py:90)\n"


def who(found: Diagnosis) -> tuple[int, ...] | None:
    return found.who.ranks if found.who is not None else None


@pytest.mark.parametrize(
    ("lines", "again", "says"),
    [
        (BEFORE, MOVED, "is at read (data.py:7), and moves: later at read (data.py:9)"),
        (BEFORE, BEFORE, "is at read (data.py:7), at both looks"),
        (BEFORE, "", "is at read (data.py:7)"),
        (BEHIND, BEHIND_MOVED, "is at write (log.py:7), and moves: later at write (log.py:9)"),
        (BEHIND, BEHIND, "is at write (log.py:7), at both looks"),
    ],
)
def test_a_rank_that_is_not_there_is_named_and_where_it_is(
    lines: str, again: str, says: str, tmp_path: Path
) -> None:
    """And no cause: before the collective or behind it, it may come, or have left it out."""
    found = among_waiting(tmp_path, lines, again)
    assert found.why is None
    assert found.who is not None
    assert (found.who.ranks, found.who.waiting) == ((3,), (0, 1, 2))
    assert [one.text.split("; ")[0] for one in found.who.known] == [says]


@pytest.mark.parametrize(("state", "named"), [("idle", (7,)), ("active", None), ("active+gil", None)])
def test_a_rank_that_uses_the_cpu_on_one_line_may_wait_for_its_gpu(
    state: str, named: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """Composed from https://github.com/pytorch/pytorch/issues/95944: all ranks wait for their GPUs, the last one in
    `item()`, which py-spy shows as a line of the program. `(active)` is what it shows of a thread that runs."""
    waits = (
        "    synchronize (torch/cuda/__init__.py:496)\n    train (train.py:120)\n    main (train.py:300)\n"
    )
    item = "    train (train.py:96)\n    main (train.py:300)\n"
    for rank in range(7):
        dump(tmp_path, rank, waits)
    dump(tmp_path, 7, item, item, state=state)
    found = diagnose(read_all([str(tmp_path)]))
    assert who(found) == named
    assert found.why is None


@pytest.mark.parametrize("function", ["run", "<module>"])
def test_a_function_of_the_program_is_not_idle(function: str, tmp_path: Path) -> None:
    """Composed from https://github.com/pytorch/pytorch/issues/54059: one rank validates, and the others wait in a
    barrier. It is in a call of C, of which py-spy shows nothing."""
    dump(tmp_path, 0, f"    {function} (train.py:52)\n")
    for rank in (1, 2, 3):
        dump(
            tmp_path,
            rank,
            f"    barrier (torch/distributed/distributed_c10d.py:2500)\n    {function} (train.py:60)\n",
        )
    found = diagnose(read_all([str(tmp_path)]))
    assert (who(found), found.why) == ((0,), None)


@pytest.mark.parametrize("world", [4, 8])
def test_two_places_of_half_of_the_ranks_decide_nothing(world: int, tmp_path: Path) -> None:
    """Composed from https://github.com/modelscope/ms-swift/issues/1817, which posts two stacks, and not all. Both
    may wait for a rank that is not shown."""
    for rank in range(4):
        name, line = ("recv", 50) if rank < 2 else ("all_reduce", 80)
        dump(
            tmp_path,
            rank,
            f"    {name} (torch/distributed/distributed_c10d.py:2)\n    step (schedule.py:{line})\n",
        )
    (tmp_path / "job.log").write_text(f"world size {world}\n")
    found = diagnose(read_all([str(tmp_path)]))
    assert (who(found), found.why) == (None, None)
    assert [one.ranks for one in found.places] == [(0, 1), (2, 3)]


def test_the_thread_that_works_for_an_idle_main_thread_counts(tmp_path: Path) -> None:
    idle = "    main_loop (ray/_private/worker.py:900)\n"
    assert who(among_waiting(tmp_path, idle)) == (3,)
    busy = among_waiting(tmp_path, idle, more=f'\nThread 77 (idle): "actor"\n{WAITS}')
    assert who(busy) is None


def test_kernels_that_are_launched_decide_nothing(tmp_path: Path) -> None:
    """No host is blocked: where each of them is says nothing of the GPU."""
    for rank in range(4):
        line = 136 if rank else 245
        dump(
            tmp_path, rank, f"    apply (layer.py:7)\n    forward (model.py:{line})\n    run (engine.py:9)\n"
        )
    found = diagnose(read_all([str(tmp_path)]))
    assert (found.who, found.why) == (None, None)


def test_more_than_one_rank_is_named_with_what_each_does(tmp_path: Path) -> None:
    dump(tmp_path, 4, BEFORE, MOVED)
    found = among_waiting(tmp_path, BEFORE, BEFORE)
    assert found.who is not None
    assert found.who.ranks == (3, 4)
    assert [one.ranks for one in found.who.known] == [(3,), (4,)]


def test_ranks_that_make_a_group_are_not_all_known_to_make_the_same(tmp_path: Path) -> None:
    helper = "    _new_process_group_helper (torch/distributed/distributed_c10d.py:2000)\n"
    for rank in range(3):
        dump(
            tmp_path,
            rank,
            helper + "    new_group (torch/distributed/distributed_c10d.py:5000)\n    main (train.py:9)\n",
        )
    made = diagnose(read_all([str(tmp_path)]))
    assert (who(made), made.why) == (None, None)


def test_a_rank_that_rests_on_one_line_may_come(tmp_path: Path) -> None:
    here = SourceLine("roll call")
    program = (Frame("step", "train.py", 50), Frame("train", "train.py", 90))
    waits = Stack(
        "MainThread", (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3000), *program), here
    )
    polls = Stack(
        "MainThread", (Frame("look", "data.py", 7), Frame("step", "train.py", 40), program[1]), here
    )
    for rank, stack in enumerate([waits, waits, waits, polls]):
        found = Rank(rank, stacks=(stack,), later=(stack,), busy=0.0)
        answer = {"roll_call": found, "members": {}, "world_size": 4, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert (who(said), said.why) == ((3,), None)


def test_machines_that_wait_for_memory_are_told(tmp_path: Path) -> None:
    for rank, starved in enumerate([0.02, 0.49, 0.93, 0.61]):
        answer = {"roll_call": Rank(rank, starved=starved), "members": {}, "world_size": 4, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    evidence = read_all([str(tmp_path)])
    said = diagnose(evidence)
    words = "ranks 2-3: waited for memory up to 93% of the time between the two looks"
    assert (said.who, said.why) == (None, None)
    assert [one.what.startswith(words) for one in said.observations] == [True]
    assert f"  {words} (" in summary("somebody asks", said, evidence, "")


STDLIB = "/usr/lib/python3.12"
LOOP = (Frame("train", "train.py", 90), Frame("<module>", "train.py", 200))
REDUCES = Frame("all_reduce", "torch/distributed/distributed_c10d.py", 3000)
AT_EXIT_WAITS = (
    Frame("barrier", "torch/distributed/distributed_c10d.py", 5000),
    Frame("final", "train.py", 7),
    AT_EXIT,
)
IN_LOOP_WAITS = (REDUCES, *LOOP)
AT_EXIT_UPLOADS = (Frame("upload", "train.py", 9), AT_EXIT)
JOINS = (Frame("_shutdown", f"{STDLIB}/threading.py", 1590),)
READS = (Frame("read", "data.py", 7), *LOOP)
READS_ON = (Frame("parse", "data.py", 20), *LOOP)
ENDED: tuple[Frame, ...] = ()


def called(
    folder: Path, *ranks: tuple[Frame, ...] | tuple[tuple[Frame, ...], tuple[Frame, ...]]
) -> Diagnosis:
    """What is said of a roll call whose ranks are at these calls, and at others later if two are given."""
    here = SourceLine("roll call")
    for rank, calls in enumerate(ranks):
        first, later = calls if calls and not isinstance(calls[0], Frame) else (calls, calls)
        stacks = [(Stack("MainThread", one, here, ident="1"),) for one in (first, later) if one]
        found = Rank(rank, stacks=stacks[0], later=stacks[1], busy=0.0) if stacks else ended(rank)
        answer = {"roll_call": found, "members": {}, "world_size": len(ranks), "by": rank}
        (folder / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    return diagnose(read_all([str(folder)]))


def ended(rank: int) -> Rank:
    return Rank(rank, endings=(Ending("exit code 0", SourceLine("kernel"), is_clean=True),))


@pytest.mark.parametrize(
    ("ranks", "kind", "named"),
    [
        # One hangs in an `atexit` handler, or joins a thread, and the others wait in a handler.
        ((AT_EXIT_WAITS, AT_EXIT_WAITS, AT_EXIT_UPLOADS), None, (2,)),
        ((AT_EXIT_WAITS, AT_EXIT_WAITS, JOINS), None, (2,)),
        # The others have ended, and nobody waits.
        ((ENDED, ENDED, AT_EXIT_UPLOADS), None, None),
        ((ENDED, ENDED, (AT_EXIT_UPLOADS, AT_EXIT_WAITS)), None, None),
        # The others wait in the program: this one has left it, for whatever reason.
        ((IN_LOOP_WAITS, IN_LOOP_WAITS, AT_EXIT_UPLOADS), "ended", (2,)),
        ((IN_LOOP_WAITS, IN_LOOP_WAITS, JOINS), "ended", (2,)),
        ((IN_LOOP_WAITS, IN_LOOP_WAITS, ENDED), "ended", (2,)),
        # One waits after the end of all others.
        ((IN_LOOP_WAITS, ENDED, ENDED), "ended", (0,)),
        # One is in its program, while the others wait at their exits.
        ((AT_EXIT_WAITS, AT_EXIT_WAITS, READS), None, (2,)),
        ((AT_EXIT_WAITS, AT_EXIT_WAITS, (READS, READS_ON)), None, (2,)),
    ],
)
def test_a_hang_at_an_exit(
    ranks: tuple[tuple[Frame, ...], ...], kind: str | None, named: tuple[int, ...] | None, tmp_path: Path
) -> None:
    found = called(tmp_path, *ranks)
    assert (found.why.kind if found.why is not None else None) == kind, found
    assert who(found) == named


def test_of_stacks_from_outside_nobody_knows_who_is_at_its_exit(tmp_path: Path) -> None:
    """The handler's own calls are all that is dumped; they may be those of a thread of a library, too."""
    for rank in range(3):
        dump(tmp_path, rank, "    upload (train.py:9)\n" if rank == 2 else WAITS, "    upload (train.py:9)\n")
    assert diagnose(read_all([str(tmp_path)])).why is None


def test_who_waits_at_its_exit_for_those_that_wait_for_it_is_named(tmp_path: Path) -> None:
    """A rank that had fewer batches waits in a handler for the others, which wait for it in the loop."""
    here = SourceLine("roll call")
    for rank in range(3):
        left = rank == 2
        calls = AT_EXIT_WAITS if left else IN_LOOP_WAITS
        pending = GroupOperation("1:other" if left else "0:default_pg", 5, "barrier", "started", here)
        done = GroupOperation("0:default_pg" if left else "1:other", 4, "all_reduce", "completed", here)
        stacks = (Stack("MainThread", calls, here, ident="1"),)
        members = {"0:default_pg": (0, 1, 2), "1:other": (0, 1, 2)} if not rank else {}
        found = Rank(rank, (pending, done), stacks=stacks, later=stacks, busy=0.0)
        answer = {"roll_call": found, "members": members, "world_size": 3, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert said.why is not None
    assert (said.why.kind, who(said)) == ("cycle", (2,))


FATAL = """[E ProcessGroupNCCL.cpp:828] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, \
OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1804360 milliseconds before timing out.
Fatal Python error: Aborted

Thread 0x00002ac6175f7700 (most recent call first):
{calls}"""
"""As https://discuss.pytorch.org/t/187207 has it."""
ITEM = '  File "/job/train.py", line 96 in train\n  File "/job/train.py", line 300 in <module>\n'
ACQUIRES = f'  File "{STDLIB}/threading.py", line 355 in wait\n{ITEM}'
IN_BARRIER = (
    '  File "/lib/torch/distributed/distributed_c10d.py", line 2500 in barrier\n'
    '  File "/job/train.py", line 120 in train\n  File "/job/train.py", line 300 in <module>\n'
)
SYNCHRONIZES = IN_BARRIER.replace("distributed/distributed_c10d.py", "cuda/__init__.py").replace(
    "barrier", "synchronize"
)


@pytest.mark.parametrize(
    ("calls", "named", "says"),
    [(ITEM, None, "or at a GPU as in .item()"), (ACQUIRES, (3,), "rank 3 is not there")],
    ids=["item", "acquire"],
)
def test_a_rank_at_item_is_not_guilty_by_that(
    calls: str, named: tuple[int, ...] | None, says: str, tmp_path: Path
) -> None:
    """Of a call in C, such as `loss.item()`, faulthandler shows the line of the program; and not the state."""
    for rank in range(4):
        text = FATAL.format(rank=rank, calls=IN_BARRIER if rank < 3 else calls)
        for name in (f"rank-{rank}.txt", f"rank-{rank}-again.txt"):
            (tmp_path / name).write_text(text)
    found = diagnose(read_all([str(tmp_path)]))
    assert found.who is not None
    assert (found.who.ranks, found.why) == (named, None)
    assert says in found.who.summary
    # The log that the dump stands in is read, too.
    assert any("timed out in ALLREDUCE #9" in one.what for one in found.observations)


def test_a_rank_that_synchronizes_is_on_no_other_path(tmp_path: Path) -> None:
    """The others are at the end of the epoch, where the host waits; its stream has not come through."""
    before = SYNCHRONIZES.replace("line 120", "line 96")
    for rank in range(4):
        (tmp_path / f"rank-{rank}.txt").write_text(
            "Fatal Python error: Aborted\n\nThread 0x00002ac6175f7700 (most recent call first):\n"
            + (IN_BARRIER if rank < 3 else before)
        )
    (tmp_path / "job.log").write_text("world size 4\n")
    found = diagnose(read_all([str(tmp_path)]))
    assert (who(found), found.why) == (None, None)


def test_a_rank_that_synchronizes_in_a_save_may_come(tmp_path: Path) -> None:
    """It copies its part from the GPU, while the others have ended."""
    save = SYNCHRONIZES.replace(" in train", " in save")
    (tmp_path / "rank-1.json").write_bytes(
        msgspec.json.encode({"roll_call": ended(1), "members": {}, "world_size": 2, "by": 1})
    )
    (tmp_path / "rank-0.txt").write_text(FATAL.format(rank=0, calls=save))
    found = diagnose(read_all([str(tmp_path)]))
    assert (who(found), found.why) == (None, None)


@pytest.mark.parametrize(("active", "named"), [(True, None), (False, (3,))])
def test_the_state_of_a_thread_is_read_of_json(
    active: bool, named: tuple[int, ...] | None, tmp_path: Path
) -> None:
    waits = [("all_reduce", "torch/distributed/distributed_c10d.py", 3000), ("step", "train.py", 50)]
    item = [("step", "train.py", 40)]
    for rank in range(4):
        frames = [
            {"name": name, "short_filename": file, "line": line}
            for name, file, line in (item if rank == 3 else waits)
        ]
        thread = {"thread_id": 1, "thread_name": "MainThread", "active": active, "frames": frames}
        for name in (f"rank-{rank}.json", f"rank-{rank}-again.json"):
            (tmp_path / name).write_text(json.dumps([thread]))
    assert who(diagnose(read_all([str(tmp_path)]))) == named


def test_who_hangs_at_its_exit_after_an_error_has_died(tmp_path: Path) -> None:
    called(tmp_path, IN_LOOP_WAITS, IN_LOOP_WAITS, JOINS)
    path = tmp_path / "rank-2.json"
    answer = json.loads(path.read_bytes())
    error = Ending("ValueError: the batch is empty", SourceLine("roll call"))
    answer["roll_call"]["endings"] = msgspec.to_builtins([error])
    path.write_text(json.dumps(answer))
    found = diagnose(read_all([str(tmp_path)])).why
    assert found is not None
    assert (found.kind, found.ranks) == ("died", (2,))
    assert "the batch is empty" in found.summary


def test_short_names_of_py_spy_are_of_the_library_of_python(tmp_path: Path) -> None:
    """It shows `socket.py`, not the folder: a rank that waits for a socket is at no GPU."""
    reads = "    recv_into (socket.py:706)\n    read (train.py:40)\n    train (train.py:90)\n"
    for rank in range(3):
        dump(tmp_path, rank, WAITS, WAITS)
    dump(tmp_path, 3, reads, reads, state="active")
    found = diagnose(read_all([str(tmp_path)]))
    assert found.who is not None
    assert (found.who.ranks, str(found.who.call)) == ((3,), "read (train.py:40)")
    assert "in recv_into (socket.py:706)" in found.who.known[0].text


def test_ranks_in_backward_wait_for_one_that_has_not_come(tmp_path: Path) -> None:
    """The collectives of DDP are on threads that Python does not know."""
    here, members = SourceLine("roll call"), {"0:default_pg": (0, 1, 2)}
    engine = Frame("_engine_run_backward", "/lib/torch/autograd/graph.py", 865)
    backward = (engine, Frame("backward", "/lib/torch/_tensor.py", 630), *LOOP)
    for rank in range(3):
        calls = backward if rank else READS
        stacks = (Stack("MainThread", calls, here, ident="1"),)
        state, number = ("started", 8) if rank else ("completed", 7)
        one = GroupOperation("0:default_pg", number, "all_reduce", state, here, backend="gloo")
        found = Rank(rank, (one,), stacks=stacks, later=stacks, busy=0.0)
        answer = {"roll_call": found, "members": {} if rank else members, "world_size": 3, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert said.who is not None
    assert (said.who.ranks, said.who.waiting, said.who.basis, said.why) == ((0,), (1, 2), "counts", None)


def test_a_rank_that_sleeps_beside_a_collective_in_the_background_does_not_wait(tmp_path: Path) -> None:
    """It has issued an operation that others have not come to, and is stuck before the one that they wait in."""
    here, groups = SourceLine("roll call"), {"1:a": (0, 1), "2:b": (0, 1)}
    for rank, (pending, done, calls) in enumerate((("1:a", "2:b", READS), ("2:b", "1:a", IN_LOOP_WAITS))):
        stacks = (Stack("MainThread", calls, here, ident="1"),)
        operations = tuple(
            GroupOperation(group, number, "all_reduce", state, here, thread="1", backend="gloo")
            for group, number, state in ((pending, 5, "started"), (done, 4, "completed"))
        )
        found = Rank(rank, operations, stacks=stacks, later=stacks, busy=0.0)
        answer = {"roll_call": found, "members": {} if rank else groups, "world_size": 2, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert (who(said), said.why) == ((0,), None)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_job_of_gloo_gets_no_advice_for_nccl(backend: str, tmp_path: Path) -> None:
    one = GroupOperation("0:default_pg", 8, "all_reduce", "started", SourceLine("roll call"), backend=backend)
    answer = {"roll_call": Rank(0, (one,)), "members": {}, "world_size": 4, "by": 0}
    (tmp_path / "rank-0.json").write_bytes(msgspec.json.encode(answer))
    wanted = " ".join(diagnose(read_all([str(tmp_path)])).collect)
    assert ("NCCL" in wanted) == (backend == "nccl")
    assert "py-spy dump" in wanted


def test_of_ranks_that_complete_operations_between_the_looks_none_waits(tmp_path: Path) -> None:
    here = SourceLine("roll call")
    for rank in range(3):
        calls = IN_LOOP_WAITS if rank < 2 else READS_ON
        stacks = (Stack("MainThread", calls, here, ident="1"),)
        seen = GroupOperation("0:default_pg", 7, "all_reduce", "completed", here, seconds=0.1, backend="gloo")
        progress = (GroupProgress("0:default_pg", 50 + rank, 49 + rank, here),)
        found = Rank(rank, (seen,), progress, stacks=stacks, later=stacks, busy=0.5)
        answer = {"roll_call": found, "members": {}, "world_size": 3, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert (said.who, said.why) == (None, None)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("stopped by a signal (state T)", "stopped"),
        ("stopped by a debugger (state t)", "stopped"),
        ("in a system call, mostly of storage (state D)", None),  # a healthy rank that writes is in one, too
    ],
)
def test_only_a_stopped_process_is_a_cause(state: str, kind: str | None, tmp_path: Path) -> None:
    here = SourceLine("roll call")
    stack = Stack("MainThread", IN_LOOP_WAITS, here, ident="1")
    for rank in range(3):
        found = Rank(rank, stacks=(stack,), later=(stack,), busy=0.0) if rank else Rank(0, state=state)
        answer = {"roll_call": found, "members": {}, "world_size": 3, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert (said.why.kind if said.why is not None else None) == kind
    assert said.who is not None
    assert (said.who.ranks, [one.text for one in said.who.known]) == ((0,), [state])


def test_of_a_rank_that_does_not_answer_no_more_is_said_than_that(tmp_path: Path) -> None:
    """It may have come, with a network that does not carry on."""
    here = SourceLine("roll call")
    stack = Stack("MainThread", IN_LOOP_WAITS, here, ident="1")
    for rank in range(3):
        one = GroupOperation("0:default_pg", 8, "all_reduce", "started", here, thread="1", backend="gloo")
        found = Rank(rank, (one,), stacks=(stack,), later=(stack,), busy=0.0)
        members = {} if rank else {"0:default_pg": (0, 1, 2, 3)}
        answer = {"roll_call": found, "members": members, "world_size": 4, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert said.who is not None
    assert (said.who.ranks, said.why) == ((3,), None)
    assert said.who.summary.endswith("; all others have come to it, and rank 3 has not answered")
    assert [one.text for one in said.who.known] == ["it has not answered"]


@pytest.mark.parametrize(("name", "told"), [("all_to_all", True), ("gather", False), ("all_gather", False)])
def test_sizes_that_may_differ_are_told_of_exchanges_only(name: str, told: bool, tmp_path: Path) -> None:
    here = SourceLine("roll call")
    for rank in range(2):
        one = GroupOperation("0:default_pg", 8, name, "started", here, (4 + rank, 4 + rank))
        members = {} if rank else {"0:default_pg": (0, 1)}
        answer = {"roll_call": Rank(rank, (one,)), "members": members, "world_size": 2, "by": rank}
        (tmp_path / f"rank-{rank}.json").write_bytes(msgspec.json.encode(answer))
    said = diagnose(read_all([str(tmp_path)]))
    assert said.who is not None
    assert (said.who.ranks, said.why) == ((), None)
    assert ("splits" in said.who.summary) == told
