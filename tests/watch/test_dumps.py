"""Dumps of single ranks: torch's own flight records, stacks, and files that are none."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._watch import read
from holdfast._watch.diagnose import diagnose
from holdfast._watch.dumps import ranks_of_names
from holdfast._watch.read import read_all
from holdfast.errors import BadInput
from tests.support.processes import ProcessWorld
from tests.support.waiting import wait_until


def recorded(rank: int, folder: str) -> None:
    """Issue collectives that end, write torch's records, and leave."""
    from torch._C import _distributed_c10d as c10d

    dist.all_reduce(torch.ones(4))
    if rank == 0:
        work = dist.all_reduce(torch.ones(8), async_op=True)
    # A thread of torch notes the end of an operation some time after its caller goes on.
    wait_until(lambda: json.loads(c10d._dump_fr_trace_json())["entries"][0]["retired"])
    (Path(folder) / f"trace_{rank}").write_bytes(c10d._dump_fr_trace())
    (Path(folder) / f"json_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
    if rank:
        wait_until((Path(folder) / "json_0.json").exists)
        work = dist.all_reduce(torch.ones(8), async_op=True)
    work.wait()


def phase_without_a_collective(rank: int) -> str:
    """Answer a roll call before this process has issued any collective."""
    from holdfast._watch.own_stacks import OwnEvidence

    with holdfast.events.phase("setup"):
        look = OwnEvidence(rank, [])
    return look.again([], ()).phase


def test_a_rank_without_a_collective_answers_a_roll_call() -> None:
    """torch's record then has no entries at all."""
    with ProcessWorld(1) as world:
        assert world.run(phase_without_a_collective) == ["setup"]


def test_torchs_own_records_are_read(tmp_path: Path) -> None:
    """Two ranks, of which one has not come to the second operation."""
    with ProcessWorld(2) as world:
        world.run(recorded, str(tmp_path))
    evidence = read_all([str(tmp_path / f"trace_{rank}") for rank in range(2)])
    pending = {rank: one for rank, one in evidence.operations() if one.is_pending}
    assert list(pending) == [0]
    assert (pending[0].kind, pending[0].number, pending[0].sizes) == ("all_reduce", 2, (8, 8))
    assert pending[0].calls[-1].function
    assert any(call.function == "recorded" for call in pending[0].calls)
    found = diagnose(evidence)
    assert found.why is None
    assert found.who is not None
    assert (found.who.ranks, found.who.basis, found.who.number) == ((1,), "counts", 2)
    again = read_all([str(tmp_path / f"json_{rank}.json") for rank in range(2)])
    assert {(rank, one.number, one.is_pending) for rank, one in again.operations()} == {
        (rank, one.number, one.is_pending) for rank, one in evidence.operations()
    }


def test_stacks_of_faulthandler(tmp_path: Path) -> None:
    """Of a process of its own: this one has the threads that other tests have left."""
    (tmp_path / "train.py").write_text(
        "import faulthandler, sys, threading\n"
        "end = threading.Event()\n"
        "threads = [threading.Thread(target=end.wait) for _ in range(5)]\n"
        "for one in threads:\n"
        "    one.start()\n"
        "def train():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        faulthandler.dump_traceback(file, all_threads=True)\n"
        "train()\n"
        "end.set()\n"
    )
    dump = str(tmp_path / "rank-3.txt")
    subprocess.run([sys.executable, str(tmp_path / "train.py"), dump], check=True, timeout=60)
    stacks = read_all([dump]).ranks[3].stacks
    assert [call.function for call in stacks[0].calls] == ["train", "<module>"]
    assert len(stacks) == 6
    assert all(one.calls[-1].function == "_bootstrap" for one in stacks[1:])


def test_stacks_of_py_spy(tmp_path: Path) -> None:
    (tmp_path / "rank-1.txt").write_text(
        "Process 175053: python train.py\nPython v3.10.14 (/usr/bin/python3.10)\n\n"
        'Thread 9 (idle): "loader"\n    wait (threading.py:320)\n'
        'Thread 175053 (active+gil): "MainThread"\n    ncclLocalOpAppend (libnccl.so.2)\n'
        '    broadcast (torch/distributed/distributed_c10d.py:10)\n        Arguments:\n            group_name: "pp_0"\n'
    )
    (tmp_path / "rank-2.json").write_text(
        json.dumps(
            [
                {
                    "thread_id": 1,
                    "thread_name": "MainThread",
                    "frames": [{"name": "f", "filename": "a.py", "line": 3}],
                }
            ]
        )
    )
    ranks = read_all([str(tmp_path)]).ranks
    assert ranks[1].stacks[0].names == {"group_name": "pp_0"}
    assert [call.function for call in ranks[1].stacks[0].calls] == ["ncclLocalOpAppend", "broadcast"]
    assert ranks[2].stacks[0].calls[0] == ("f", "a.py", 3)


def test_stacks_of_nobody_blame_nobody(tmp_path: Path) -> None:
    (tmp_path / "dump.txt").write_text('Process 1: python\n\nThread 1 (idle): "MainThread"\n    f (a.py:1)\n')
    evidence = read_all([str(tmp_path / "dump.txt")])
    assert not evidence.ranks
    assert any("name the files rank-0.txt" in wanted for wanted in diagnose(evidence).collect)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-3.txt", 3), ("nccl_trace_rank_12", 12), ("x/attempt_0/5/stderr.log", 5), ("rank-3-again.txt", 3),
        ("job.log", None), ("worker-2.log", 2), ("slurm-rank3.out", 3), ("rank-3.log.gz", 3), ("model_v2b.log", None),
        ("worker-5b9aa8fe-01000000-4242.err", None), ("slurm-98765.out", None), ("train.log.1", None),
        ("stacks_120533.txt", None), ("dump-2.txt", None), ("rank-1000000.txt", None),
    ],
)  # fmt: skip
def test_the_rank_of_a_files_name(name: str, rank: int | None) -> None:
    """The numbers of jobs, processes, times and samples are none."""
    assert ranks_of_names([name]).get(name) == rank


def test_numbers_of_files_from_0_on_are_ranks() -> None:
    names = ["4242/0.out", "4242/1.out", "4242/2.out", "app.log.1", "app.log.2", "dump-0.txt", "dump-2.txt"]
    assert ranks_of_names(names) == {name: int(name[5]) for name in names[:3]}


def test_other_files_of_a_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("world size 2\n")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')
    (tmp_path / "trace_1").write_bytes(b"\x80\x04\x95")
    evidence = read_all([str(tmp_path)])
    assert evidence.world_size == 2
    told = [Path(one.source.file).name for one in evidence.of("not read")]
    assert told == ["config.json", "metrics.jsonl", "trace_1"]
    with pytest.raises(BadInput, match=r"config\.json is no flight record"):
        read_all([str(tmp_path / "job.log"), str(tmp_path / "config.json")])
    (tmp_path / "job.log").unlink()
    with pytest.raises(BadInput, match=r"config\.json is no flight record"):
        read_all([str(tmp_path)])


def test_a_folder_of_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "FILES", 3)
    for rank in range(4):
        (tmp_path / f"rank-{rank}.log").touch()
    with pytest.raises(BadInput, match="has more than 3 files"):
        read_all([str(tmp_path)])


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def test_a_forged_pickle_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"entries": [Runs()]}, protocol=2))
    with pytest.raises(BadInput, match="trace_0 is no flight record, because it names"):
        read_all([str(tmp_path / "trace_0")])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}q\x00.", b"\x80", b'{"entries": 3}', b'{"entries": [1]}', b'{"entries": [{"process_group": []}]}',
        b'{"roll_call": {"rank": "x"}}', b'{"roll_call": 1}', b'["' + b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_dump_is_said_in_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace_0").write_bytes(content)
    with pytest.raises(BadInput, match="trace_0") as error:
        read_all([str(tmp_path / "trace_0")])
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(
    "text",
    [
        '[{"frames": [3]}]',
        '[{"frames": 3}]',
        '[{"thread_id": 1, "frames": [{"name": {}, "line": []}]}]',
        '{"entries": [{"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "state": "started", '
        '"collective_seq_id": 1e999}]}',
        '{"entries": [], "pg_status": {"0": {"last_enqueued_collective": 1e999}}}',
        '{"roll_call": {"rank": 1e999}}',
        '{"roll_call": {"rank": 0, "stacks": [{"thread": "", "calls": [[]], "source": ["", 0]}]}}',
        '{"communicators": [{"hash": 1, "size": 1e999, "missing_ranks": [{"rank": 0}], "ranks": []}]}',
        '{"a": ' + "[" * 200_000,
    ],
)
def test_hostile_json_is_read_or_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    with suppress(BadInput):
        diagnose(read_all([str(tmp_path)]))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("world size 2\n")
    os.mkfifo(tmp_path / "rank-0.json")
    os.mkfifo(tmp_path / "job-0")  # as a roll call has it
    (tmp_path / "zeros.log").symlink_to("/dev/zero")
    (tmp_path / "round.log").symlink_to("round.log")
    (tmp_path / "up").symlink_to("..")
    code = f"from holdfast._watch.read import read_all; print(read_all([{str(tmp_path)!r}]).world_size)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout == "2\n"


def test_random_bytes_are_read_or_refused(tmp_path: Path) -> None:
    """Never another error: with parts of real lines mixed in, from fixed seeds."""
    parts = [
        b"[rank3]:[E627 12:26:40.04 ProcessGroupNCCL.cpp:629] [Rank 99999999999] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=",
        b"OpType=ALLREDUCE, Timeout(ms)=600000)", b"\x1b[31m", b"[PG ID 0 PG GUID 0(", b"default_pg) Rank 5] last enqueued work: 3, last completed work: -1",
        b"Traceback (most recent call last):\n", b'  File "x", line 3, in f\n', b"ValueError: x\n", b"comm 0x1 rank 999999 nranks 7 commId 0x3 - Init START",
        b"h:1:2 [0] NCCL INFO ", b'Thread 1 (idle): "MainThread"\n', b"    f (a.py:1)\n", b"Process 1: RANK=3\n", b"[rank99999999]: Error\n",
    ]  # fmt: skip
    path = tmp_path / "trace_0"
    for seed in range(300):
        chance = random.Random(seed)
        data = b"".join(chance.choice([chance.randbytes(9), chance.choice(parts)]) for _ in range(40))
        path.write_bytes(chance.choice([b"", b"\x80\x02", b"{", b"["]) + data)
        try:
            diagnose(read_all([str(path)]))
        except BadInput:
            continue


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from holdfast._tools.cli import cli

    (tmp_path / "job.log").write_bytes(b"[rank1]: ValueError: \x1b]0;title\x07\x1b[2J bad\n")
    result = CliRunner().invoke(cli, ["diagnose", str(tmp_path / "job.log")])
    assert result.exit_code == 0
    assert "\x1b" not in result.output
    assert "rank 1" in result.output


def entry(rank: int, name: str, dtype: str, number: int = 7, p2p: bool = False) -> dict[str, Any]:
    return {
        "process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": number, "p2p_seq_id": number,
        "profiling_name": f"nccl:{name}", "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": [dtype],
        "state": "started", "retired": False, "is_p2p": p2p, "record_id": 0,
    }  # fmt: skip


def records(folder: Path, *entries: dict[str, Any]) -> list[str]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(len(entries))))}}
    for rank, one in enumerate(entries):
        (folder / f"trace_{rank}").write_bytes(
            pickle.dumps({"pg_config": config, "entries": [one]}, protocol=2)
        )
    return [str(folder / f"trace_{rank}") for rank in range(len(entries))]


def test_other_types_under_one_number_are_a_mismatch(tmp_path: Path) -> None:
    types = ["Float", "Float", "BFloat16", "Float"]
    places = records(tmp_path, *(entry(rank, "all_reduce", dtype) for rank, dtype in enumerate(types)))
    found = diagnose(read_all(places)).why
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", (2,))
    assert "under number 7" in found.summary
    assert "of BFloat16" in found.summary


def test_messages_between_two_ranks_are_not_joined_as_collectives(tmp_path: Path) -> None:
    """Each rank of a pipeline counts its own."""
    places = records(
        tmp_path, *(entry(rank, "send" if rank % 2 else "recv", "Float", 7 + rank, True) for rank in range(4))
    )
    found = diagnose(read_all(places))
    assert (found.who, found.why) == (None, None)


def test_a_cycle_over_two_groups_is_found(tmp_path: Path) -> None:
    """Rank 0 waits in one group for rank 1, which waits in the other one for rank 0."""
    groups = {"1": "train", "2": "sync"}
    config = {name: {"name": name, "desc": text, "ranks": "[0, 1]"} for name, text in groups.items()}
    for rank in range(2):
        entries = []
        for number, (name, text) in enumerate(groups.items()):
            one = entry(rank, "all_reduce", "Float", 6 + (number == rank)) | {"process_group": [name, text]}
            entries.append(one | ({} if number == rank else {"state": "completed", "retired": True}))
        (tmp_path / f"trace_{rank}").write_bytes(
            pickle.dumps({"pg_config": config, "entries": entries}, protocol=2)
        )
    found = diagnose(read_all([str(tmp_path)]))
    assert found.why is not None
    assert found.who is not None
    assert (found.why.kind, found.who.ranks, found.who.waiting) == ("cycle", None, (0, 1))


@pytest.mark.parametrize(("name", "told"), [("python", True), ("pt_autograd_0", False)])
def test_two_threads_of_a_rank_in_one_group_are_told(name: str, told: bool, tmp_path: Path) -> None:
    """A background save and a barrier; the backward pass has threads of its own, which are told nowhere."""
    for rank in range(2):
        first, second = ("barrier", "gather")[:: 1 if rank else -1]
        entries = [
            entry(rank, called, "Float", number)
            | {"thread_id": called, "thread_name": name if called == "gather" else "python"}
            for number, called in ((7, first), (8, second))
        ]
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps({"entries": entries}, protocol=2))
    found = diagnose(read_all([str(tmp_path)])).why
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", None)
    assert ("on two threads" in found.summary) == told


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("nccl:ALLREDUCE", "nccl:all_reduce_barrier"),
        ("nccl:ALLTOALL_BASE", "nccl:all_to_all"),
        ("nccl:_ALLGATHER_BASE", "nccl:_all_gather_base"),
        ("nccl:ALLGATHER", "nccl:_all_gather_base"),
        ("nccl:_REDUCE_SCATTER_BASE", "nccl:reduce_scatter_tensor_coalesced"),
        ("nccl:BROADCAST", "nccl:_broadcast_oop"),
        ("gloo:all_reduce", "gloo:sparse_all_reduce"),
    ],
)
def test_two_names_of_one_operation_are_no_mismatch(first: str, second: str, tmp_path: Path) -> None:
    """A log, a flight record and other calls of torch name one operation of NCCL in their own ways."""
    names = [first, second, first, first]
    places = records(tmp_path, *(entry(rank, name, "Float") for rank, name in enumerate(names)))
    assert diagnose(read_all(places)).why is None


@pytest.mark.parametrize(("received", "is_mismatch"), [(4, True), (5, False)])
def test_what_the_ranks_of_an_all_to_all_send_is_what_they_receive(
    received: int, is_mismatch: bool, tmp_path: Path
) -> None:
    """Of each rank both may differ, by its splits; of all of them, not."""
    sizes = [(4, 4), (5, 4), (4, received)]
    places = records(
        tmp_path,
        *(
            entry(rank, "nccl:all_to_all", "Float") | {"input_sizes": [[sent]], "output_sizes": [[got]]}
            for rank, (sent, got) in enumerate(sizes)
        ),
    )
    found = diagnose(read_all(places))
    assert (found.why is not None) == is_mismatch
    assert found.who is not None
    said = found.why.summary if found.why is not None else found.who.summary
    assert ("send 13 elements and receive 12" if is_mismatch else "with different sizes") in said
