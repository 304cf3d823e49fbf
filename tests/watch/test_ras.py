"""What NCCL's RAS and torch's debug server give of a job that hangs: all is told, and alone it decides nothing.

The texts of RAS are as they were posted: NVIDIA/nccl issues 1911, 1762 and 1730, and, with `DEAD` and as JSON, in NCCL's
user guide (troubleshooting/ras)."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast._watch.diagnose import diagnose
from holdfast._watch.read import read_all
from holdfast.errors import BadInput
from tests.support.processes import ProcessWorld

HEAD = """NCCL version 2.26.2 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
ISSUE_1911 = f"""{HEAD}    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124
"""
ISSUE_1762 = f"""{HEAD}    0         1         1         1         2         1   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node 10.4.109.13 managing GPU 0

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node 10.4.109.13

"""
GUIDE_DEAD = f"""{HEAD}    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

"""
ISSUE_1730 = f"""{HEAD}    0         1        32         8       256       256   RUNNING      OK

Errors
======

Warnings
========

[rank118]:[E603 17:48:01.005271823 ProcessGroupNCCL.cpp:632] [Rank 118] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2398459, OpType=ALLREDUCE, NumelIn=8652160, NumelOut=8652160, Timeout(ms)=1800000) ran for 1800068 milliseconds before timing out.
"""  # fmt: skip
COUNTS = {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 0}
GUIDE_JSON = {
    "nccl_version": "2.29.1",
    "communicators_count": 1,
    "communicators": [
        {
            "hash": "0xae94423cfbb2ef4a",
            "size": 2,
            "ranks_count": 1,
            "missing_ranks_count": 1,
            "ranks": [
                {"rank": 0, "host": "172.16.64.245", "pid": 1524344, "collective_counts": COUNTS},
            ],
            "missing_ranks": [
                {"rank": 1, "host": "172.16.64.245", "pid": 1524345, "status": {"unresponsive": True}}
            ],
        }
    ],
}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ISSUE_1911, "2 ranks have launched up to operation 641; Rank 12 -- GPU 4 managed by process 323032"),
        (ISSUE_1762, "the job INCOMPLETE: Missing communicator data from 1 job process; Process 60004"),
        (GUIDE_DEAD, "considered dead (unreachable via the RAS network); Process 3487984 on node"),
        (json.dumps(GUIDE_JSON, indent=2), "ae94423cfbb2ef4a INCOMPLETE: no answer of rank 1 of 2"),
    ],
)  # fmt: skip
def test_what_ras_says_is_told_and_does_not_decide(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "ras.out").write_text(text)
    found = diagnose(read_all([str(tmp_path / "ras.out")]))
    assert (found.who, found.why) == (None, None)
    assert any(told in one.what for one in found.observations), found.observations
    assert found.collect


def test_ranks_of_the_json_form_that_lag_are_told(tmp_path: Path) -> None:
    """The form is the guide's; two ranks with other counts are ours."""
    (one,) = GUIDE_JSON["communicators"]
    ranks = [{**one["ranks"][0], "rank": rank, "collective_counts": {**COUNTS, "AllReduce": 9 - (rank == 3)}} for rank in range(4)]  # type: ignore[index] # fmt: skip
    (tmp_path / "ras.json").write_text(
        json.dumps({"communicators": [{**one, "ranks": ranks, "missing_ranks": []}]})  # type: ignore[dict-item]
    )
    found = diagnose(read_all([str(tmp_path / "ras.json")]))
    said = "AllReduce operations launched: rank 3: 8; ranks 0-2: 9"
    assert any(said in one.what for one in found.observations)


def test_a_log_behind_the_answer_of_ras_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(ISSUE_1730)
    evidence = read_all([str(tmp_path / "job.log")])
    assert evidence.of("ras") == []
    assert [(one.name, one.number) for one in evidence.ranks[118].timeouts] == [("ALLREDUCE", 2398459)]


@pytest.mark.parametrize(
    "value", [{"communicators": 3}, {"communicators": [{"hash": 1}]}, {"communicators": [[]]}]
)
def test_damaged_json_of_ras_is_refused(value: object, tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(json.dumps(value))
    with pytest.raises(BadInput, match="no output of ncclras"):
        read_all([str(tmp_path / "ras.json")])


def served(rank: int) -> tuple[str, str]:
    """What torch's debug server gives of this rank."""
    from torch._C._distributed_c10d import _WorkerServer  # type: ignore[attr-defined]

    server = _WorkerServer("127.0.0.1", 0)
    dist.all_reduce(torch.ones(4))
    try:
        answers = []
        for name in ("dump_traceback", "fr_trace_json"):
            asked = urllib.request.Request(f"http://127.0.0.1:{server.port}/handler/{name}", method="POST")
            with urllib.request.urlopen(asked, timeout=30) as answer:
                answers.append(answer.read().decode())
        return answers[0], answers[1]
    finally:
        server.shutdown()


def test_what_torchs_debug_server_gives_is_read(tmp_path: Path) -> None:
    """Its dump has the stacks of all ranks in one file, whose name ends in the time; records are asked of each rank."""
    with ProcessWorld(2) as world:
        answers = world.run(served)
    dump = "\n".join(
        f"=== Rank {rank}: http://host:1/handler/dump_traceback? ===\n{stacks}"
        for rank, (stacks, _) in enumerate(answers)
    )
    (tmp_path / "stacks_20261125_000007.txt").write_text(dump)
    for rank, (_, record) in enumerate(answers):
        (tmp_path / f"rank-{rank}.json").write_text(record)
    evidence = read_all([str(tmp_path)])
    assert sorted(evidence.ranks) == [0, 1]
    for rank in evidence.ranks.values():
        assert any(call.function == "served" for stack in rank.stacks for call in stack.calls)
        assert [(one.name, one.number) for one in rank.operations] == [("all_reduce", 1)]
