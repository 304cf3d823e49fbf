"""Logs as people have them: prefixes, colours, hidden lines, several starts in one file, and files of any size."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._watch import packed
from holdfast._watch.diagnose import diagnose
from holdfast._watch.evidence import Evidence
from holdfast._watch.log import BLOCK, lines_that_tell
from holdfast._watch.log_lines import without_prefix
from holdfast._watch.read import read_all
from holdfast._watch.verdict import Diagnosis
from holdfast.errors import BadInput
from tests.museum.museum import exhibits


def read(folder: Path, *lines: str) -> Evidence:
    (folder / "job.log").write_text("\n".join(lines) + "\n")
    return read_all([str(folder / "job.log")])


def of(folder: Path, *lines: str) -> Diagnosis:
    return diagnose(read(folder, *lines))


def timeout(rank: int, number: int, name: str = "ALLREDUCE", size: int = 1, at: str = "12:26:40", group_rank: int | None = None) -> str:  # fmt: skip
    return (
        f"[rank{rank}]:[E627 {at}.040073493 ProcessGroupNCCL.cpp:629] [Rank {rank if group_rank is None else group_rank}] "
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType={name}, NumelIn={size}, "
        f"NumelOut={size}, Timeout(ms)=600000) ran for 600014 milliseconds before timing out."
    )


def status(
    rank: int, number: int, done: int, enqueued: int, group: str = "0(default_pg)", at: str = "12:26:41"
) -> str:
    return (
        f"[rank{rank}]:[E627 {at}.073594829 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID {group} Rank {rank}] failure "
        f"detected by watchdog at work sequence id: {number} PG status: last enqueued work: {enqueued}, last completed "
        f"work: {done}"
    )


@pytest.mark.parametrize(
    ("line", "rank", "text"),
    [
        ("\x1b[36m(WorkerDict pid=3851, ip=10.0.0.1)\x1b[0m [rank11]:[E710 x", 11, "[E710 x"),
        ("[default5]:[rank13]:[E1 x", 13, "[E1 x"),
        ("18:11:06.680 [rank4]:[E205 x", 4, "[E205 x"),
        ("2024-08-23T22:22:50.870Z | [rank6]:[E x", 6, "[E x"),
        ("[rank3[]:[E508 x", 3, "[E508 x"),
        ("node.log [stderr] [rank3]:[E909 x", 3, "[E909 x"),
        ("[default0]:Error: x", None, "Error: x"),
        ("[default0]:  File x", None, "  File x"),
        ("[trainer3]:[rank11]:   File x", 11, "   File x"),
        ("[rank3]:[rank11]: Error: x", 11, "Error: x"),
        ("[rank3]: [rank11]: Error: x", 11, "Error: x"),
        ("[rank3]:[rank11]:[E710 x", 11, "[E710 x"),
        ("[3]:  File x", None, "  File x"),
        (
            "(EngineCore_DP0 pid=410) ERROR 11-28 12:02:21 [core.py:708] Traceback (most",
            None,
            "Traceback (most",
        ),
        ("INFO 11-28 12:02:21 [v1/core.py:77] x", None, "x"),
        (
            "(MapWorker(MapBatches(vLLM)) pid=12, ip=10.0.0.1) (EngineCore_DP0 pid=3) INFO 03-08 17:27:28 [a.py:5] x",
            None,
            "x",
        ),
        ("(MegatronPolicyWorker[rank=3] pid=8, ip=10.0.0.4) [rank11]:[E710 x", 11, "[E710 x"),
        ("[2025-06-22 16:13:55 TP0] Watchdog x", None, "Watchdog x"),
        ("3: Error: x", None, "Error: x"),
    ],
)
def test_prefixes_of_launchers(line: str, rank: int | None, text: str) -> None:
    found = without_prefix(line.encode())
    assert (found.rank, found.text) == (rank, text)


AT = "2026-11-26T09:10:11.123456789Z"
SUMMARY = """Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 12)
"""
LOGS = [
    SUMMARY,
    'world size 4\nTraceback (most recent call last):\n  File "a.py", line 3, in f\n    f()\nValueError: x\n',
]
LOGS += ["".join(one.text for one in exhibit.sections if one.kind == "log") for exhibit in exhibits()]


def each(wrapped: Callable[[str], str]) -> Callable[[str], bytes]:
    return lambda text: "".join(wrapped(line) + "\n" for line in text.splitlines()).encode()


FORMS: dict[str, Callable[[str], bytes]] = {
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-8 with a mark": lambda text: text.encode("utf-8-sig"),
    "cut while it was written": lambda text: b"\0" * 70_000 + text.encode().replace(b"\n", b"\n\0\0"),
    "gzip in two parts": lambda text: gzip.compress(text[:99].encode()) + gzip.compress(text[99:].encode()),
    "gzip without its end": lambda text: gzip.compress(text.encode() + b"x" * 9)[:-9],
    "colours": each(lambda line: f"\x1b]0;title\x07\x1b[1;31m{line}\x1b[0m"),
    "docker": each(lambda line: json.dumps({"log": f"3%\r{line}\n", "stream": "stderr", "time": AT})),
    "gcloud": each(lambda line: json.dumps({"insertId": "a", "textPayload": line, "timestamp": AT})),
    "containerd": each(lambda line: f"{AT} stderr F {line}"),
    "kubectl logs --prefix": each(lambda line: f"[pod/train-0/pytorch] {line}"),
    "kubectl logs --prefix --timestamps": each(lambda line: f"[pod/train-0/pytorch] {AT} {line}"),
    "journald": each(lambda line: f"Nov  6 09:10:11 node-17 torchrun[1234]: {line}"),
    "journald -o short-iso": each(lambda line: f"2026-11-26T09:10:11+0000 node-17 python3.12[1234]: {line}"),
    "Loki": each(lambda line: f'{AT} {{app="train", container="pytorch", pod="train-worker-0", node="a"}} {line}'),
    "srun -l": each(lambda line: f"12: {line}"),
    "srun -l of Kubernetes": each(lambda line: f"{AT}  3: {line}"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_a_log_changes_no_answer(form: str, tmp_path: Path) -> None:
    """Logs of the museum, and of launchers, as they come to people."""

    def said(name: str, data: bytes) -> list[object]:
        (tmp_path / name).write_bytes(data)
        found = diagnose(read_all([str(tmp_path / name)]))
        said_of = (found.who.ranks, found.who.number, found.who.group) if found.who is not None else ()
        read_of = [*(one.what for one in found.advice), *(one.title for one in found.looks_like)]
        return [found.says, said_of, read_of, found.heard_of, found.world_size, len(found.collect)]

    for text in filter(None, LOGS):
        assert said("wrapped.log", FORMS[form](text)) == said("job.log", text.encode()), text


def test_what_can_not_be_unpacked_is_said(tmp_path: Path) -> None:
    (tmp_path / "job.log.zst").write_bytes(b"\x28\xb5\x2f\xfd\x04\x00")
    with pytest.raises(BadInput, match=r"job\.log\.zst is packed\. zstdcat"):
        read_all([str(tmp_path / "job.log.zst")])


@pytest.mark.parametrize(
    "line",
    [
        "[rank27]: ImportError: y",
        "[default3]: ImportError: y",
        "  rank      : 27 (local_rank: 3)",
    ],
)
def test_a_log_of_a_host_is_not_that_of_the_rank_of_its_number(line: str, tmp_path: Path) -> None:
    """The pods of one job are `train-worker-3`, with eight ranks each."""
    (tmp_path / "train-worker-3.log").write_text(
        f"Traceback (most recent call last):\nValueError: x\n{line}\n"
    )
    assert 3 not in read_all([str(tmp_path)]).ranks


def test_lines_that_ray_has_left_out_are_counted(tmp_path: Path) -> None:
    evidence = read(
        tmp_path,
        "WORLD_SIZE=2",
        timeout(0, 5) + "\x1b[32m [repeated 14x across cluster]\x1b[0m",
        timeout(1, 5),
    )
    assert evidence.hidden == 14
    assert not evidence.is_complete
    assert any("RAY_DEDUP_LOGS" in wanted for wanted in diagnose(evidence).collect)


def test_the_rank_is_that_of_the_launcher(tmp_path: Path) -> None:
    evidence = read(tmp_path, timeout(5, 7, group_rank=0))
    assert list(evidence.ranks) == [5]
    assert evidence.ranks[5].operations[0].group_rank == 0


def test_the_smallest_number_is_the_cause(tmp_path: Path) -> None:
    """Later timeouts follow from it, whoever prints first."""
    found = of(
        tmp_path,
        timeout(0, 9, "BROADCAST", 7),
        timeout(3, 7, "BROADCAST", 64),
        timeout(1, 7, "BROADCAST", 64),
        timeout(2, 7, "BROADCAST", 9999),
        status(3, 7, 6, 8),
    ).why
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", (2,))
    assert "under number 7" in found.summary


def test_sizes_of_operations_that_may_differ_are_no_mismatch(tmp_path: Path) -> None:
    lines = [timeout(rank, 610, "COALESCED", 1000 + rank) for rank in range(4)]
    lines += [timeout(rank, 11, "ALLTOALL_BASE", 1000 + rank) for rank in range(4)]
    assert of(tmp_path, *lines).why is None


def test_numbers_of_two_starts_are_not_compared(tmp_path: Path) -> None:
    lines = [
        timeout(5, 29),
        status(5, 29, 28, 29),
        timeout(11, 46, at="23:53:05"),
        status(11, 46, 45, 46, at="23:53:06"),
    ]
    found = of(tmp_path, *lines)
    assert found.why is None
    assert found.heard_of == (5, 11)
    near = [line.replace("23:53", "12:27") for line in lines]
    why = of(tmp_path, *near).why
    assert why is not None
    assert why.kind == "mismatch"


def test_the_next_number_alone_proves_no_mismatch(tmp_path: Path) -> None:
    """A connection that breaks may let some ranks complete an operation that others wait in."""
    lines = [timeout(7, 9), status(7, 9, 8, 9), timeout(5, 10), status(5, 10, 9, 10)]
    assert of(tmp_path, *lines).why is None


def test_groups_with_the_same_local_number_are_not_joined(tmp_path: Path) -> None:
    def old(rank: int, group_rank: int, name: str) -> list[str]:
        line = timeout(rank, 100, name, group_rank=group_rank)
        return [line, f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG 3 Rank {group_rank}] Timeout at NCCL work: 100, last enqueued NCCL work: 100, last completed NCCL work: 99."]  # fmt: skip

    assert of(tmp_path, *old(0, 0, "ALLREDUCE"), *old(5, 1, "BROADCAST")).why is None


def test_an_error_after_the_timeouts_is_no_cause(tmp_path: Path) -> None:
    error = "[rank2]: ValueError: bad sample"
    before, after = of(tmp_path, error, timeout(0, 5)), of(tmp_path, timeout(0, 5), error)
    assert before.why is not None
    assert (before.why.kind, before.why.ranks) == ("died", (2,))
    assert after.why is None


@pytest.mark.parametrize(
    "line",
    [
        "[rank2]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.",
        "[rank2]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4",
        "[rank2]: torch.distributed.DistStoreError: Socket Timeout",
        "[rank2]: KeyboardInterrupt",
        "[rank2]: requests.exceptions.ReadTimeout: Read timed out.",
    ],
)
def test_what_survivors_raise_is_no_cause(line: str, tmp_path: Path) -> None:
    assert of(tmp_path, line, timeout(0, 5)).why is None


def test_an_error_that_follows_from_a_consequence_is_none_either(tmp_path: Path) -> None:
    lines = [
        "[rank2]: Traceback (most recent call last):",
        "[rank2]: RuntimeError: Connection reset by peer",
        "[rank2]: During handling of the above exception, another exception occurred:",
        "[rank2]: Traceback (most recent call last):",
        "[rank2]: KeyError: 'loss'",
    ]
    assert of(tmp_path, *lines, timeout(0, 5)).why is None


RAISED = """{0}:
Traceback (most recent call last):
  File "/job/data.py", line 8, in fetch
    raise ConnectionError("no route to api")
ConnectionError: no route to api"""
LATE = """[rank{0}]: Traceback (most recent call last):
[rank{0}]:   File "/job/train.py", line 12, in main
[rank{0}]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 16000ms for recv operation to complete"""
HEADS = ["Exception in thread flush", "Exception ignored in <function Shard.__del__ at 0x7f>", "retry"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("prefix", ["[rank{}]:", "[rank{}]: ", "[default{}]:", "{}: ", "of its file"])
def test_an_error_that_a_launcher_has_marked_ends_nobody(prefix: str, head: str, tmp_path: Path) -> None:
    """`torchrun --role rank --tee 3` marks every line as torch marks an error that nobody has caught."""
    programs = {rank: ["started"] for rank in range(3)}
    programs[0] += RAISED.format(head).splitlines()
    for rank in (0, 2):
        programs[rank] += ["step 4", *LATE.format(rank).splitlines()]
    for rank, lines in programs.items():
        if prefix == "of its file":
            (tmp_path / f"rank-{rank}.log").write_text("\n".join(lines) + "\n")
    if prefix == "of its file":
        found = diagnose(read_all([str(tmp_path)]))
    else:
        found = of(
            tmp_path, *(prefix.format(rank) + line for rank, lines in programs.items() for line in lines)
        )
    assert found.why is None
    assert found.who is not None
    assert (found.who.waiting, found.who.ranks) == ((0, 2), None)


@pytest.mark.parametrize("prefix", ["", "[rank{}]:", "[rank{}]: ", "[default{}]:"])
def test_an_error_that_torch_has_marked_ends_a_rank(prefix: str, tmp_path: Path) -> None:
    error = [f"[rank1]: {line}" for line in RAISED.format("x").splitlines()[1:]] + ["its second line"]
    lines = [*(f"{prefix.format(rank)}started" for rank in range(3))] if prefix else ["started"]
    lines += [prefix.format(1) + line for line in error]
    late = [prefix.format(0) + line for line in LATE.format(0).splitlines()]
    found = of(tmp_path, *lines, *late).why
    assert (found and found.kind, found and found.ranks) == ("died", (1,))
    # One that comes after a timeout may follow from it.
    assert of(tmp_path, *late, *lines).why is None


ABORTS = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. "
    "888892 vs 4. Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        ("".join(f"[rank1]:{line}\n" for line in ABORTS.splitlines()), "rank 1"),
        ("".join(f"[default1]:{line}\n" for line in ABORTS.splitlines()), "a rank"),
        (ABORTS, "a rank"),
        ("[rank1]: Traceback (most recent call last):\n[rank1]: RuntimeError:" + ABORTS.partition("what(): ")[2], "rank 1"),
    ],
)  # fmt: skip
def test_a_message_of_gloo_that_is_too_long_proves_a_mismatch(error: str, rank: str, tmp_path: Path) -> None:
    lost = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: Connection reset by peer"
    found = of(tmp_path, "[rank0]:started", error, lost).why
    assert found is not None
    assert (found.kind, found.ranks) == ("mismatch", None)  # which of the two differs is not known
    assert found.summary.startswith(
        f"{rank} has received 888892 bytes in gloo for an operation that can receive 4: "
    )


def test_a_process_that_aborts_has_ended_and_why_is_not_known(tmp_path: Path) -> None:
    """An error in C++ may follow from the end of another rank, or be that of a child."""
    found = of(tmp_path, "[rank1]:terminate called after throwing an instance of 'c10::Error'", timeout(0, 5))
    assert found.why is None
    assert found.heard_of == (0, 1)
    assert any(one.what.startswith("rank 1: terminate called") for one in found.observations)


def test_the_rank_on_a_host_is_not_that_of_the_job(tmp_path: Path) -> None:
    lines = [
        "[rank0]:Error: x",
        "[rank1]:started",
        *(f"[rank1]:{line}" for line in LATE.format(9).splitlines()),
    ]
    assert list(read(tmp_path, *lines).ranks) == [9]


def test_an_error_that_was_caught_ends_nobody(tmp_path: Path) -> None:
    """It is not marked by torch, and the same rank goes on."""
    (tmp_path / "rank-2.log").write_text(
        "Traceback (most recent call last):\nValueError: cache miss\nWORLD_SIZE=4\n" + timeout(2, 5) + "\n"
    )
    assert diagnose(read_all([str(tmp_path / "rank-2.log")])).why is None


TORCHRUN = """W1128 12:50:00.100000 40 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 11 closing signal SIGTERM
Root Cause (first observed failure):
[0]:
  time      : 2026-{time}
  host      : node0
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: {pid})
"""


@pytest.mark.parametrize(
    ("time", "pid", "is_cause"),
    [
        ("06-27_12:16:30", 12, True),
        ("06-27_12:27:40", 12, False),  # a minute after the first timeout
        ("06-27_12:16:30", 11, False),  # torchrun itself has ended it
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_an_end_that_is_later_than_the_first_timeout_is_no_cause(
    time: str, pid: int, is_cause: bool, order: int, tmp_path: Path
) -> None:
    for name, text in [("a", TORCHRUN.format(time=time, pid=pid)), ("b", timeout(0, 5) + "\n")][::order]:
        (tmp_path / f"{name if order > 0 else 'z' + name}.log").write_text(text)
    (ending,) = read_all([str(tmp_path)]).ranks[3].endings
    assert ending.what.startswith("ended by SIGKILL")
    assert ending.is_cause == is_cause


EXITED = "E1128 12:50:00.1 40 site-packages/torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) "


@pytest.mark.parametrize(
    ("more", "pid", "is_told"),
    [("", 12, True), ("", 11, False), (TORCHRUN.format(time="06-27_12:16:30", pid=12), 12, False)],
)
def test_a_process_that_failed_is_told_if_the_log_ends_before_the_summary(
    more: str, pid: int, is_told: bool, tmp_path: Path
) -> None:
    sent = TORCHRUN.splitlines()[0]  # torchrun itself ends the process of pid 11
    line = EXITED + f"local_rank: 3 (pid: {pid}) of binary: /usr/bin/python"
    advice = of(tmp_path, sent, line, *more.splitlines(), timeout(0, 5)).advice
    said = f"on its host, the process of local rank 3 (pid {pid}) failed first, exit code -9"
    assert (said in [one.what for one in advice]) == is_told


STACK = """Stack trace of the failed collective:
#0 all_reduce from /opt/torch/distributed/distributed_c10d.py:2806
#1 sync_all_async_calls from /opt/megatron/core/async_utils.py:149
#7 of_another_rank from /opt/x.py:3
"""


@pytest.mark.parametrize("prefix", ["", "(WorkerDict pid=3851, ip=10.0.0.1) "])
def test_the_stack_of_the_failed_collective_is_that_of_its_operation(prefix: str, tmp_path: Path) -> None:
    head = "[rank1]:[E627 12:26:40.074084476 ProcessGroupNCCL.cpp:664] "
    lines = [timeout(1, 29), status(1, 29, 28, 29), *(head + STACK).splitlines(), timeout(2, 29)]
    evidence = read(tmp_path, *(prefix + line for line in lines))
    (one,), (other,) = evidence.ranks[1].operations, evidence.ranks[2].operations
    assert [str(call) for call in one.calls] == [
        "all_reduce (torch/distributed/distributed_c10d.py:2806)",
        "sync_all_async_calls (megatron/core/async_utils.py:149)",
    ]
    assert not other.calls


@pytest.mark.parametrize("prefix", ["", "(WorkerDict pid=3851, ip=10.0.0.1) "])
def test_what_holdfast_has_told_is_shown(prefix: str, tmp_path: Path) -> None:
    told = [
        "WARNING:holdfast:save of step 3: rank 0 has waited 30 s for rank 2 to write: rank 2 (host a). It waits on.",
        "WARNING:holdfast:Roll call of 4 of 4 ranks, because a collective takes 30 s:",
        "  rank 0 waits in all_reduce #5 of group 0:default_pg for 30 s; rank 2 has not come to it.",
        "  rank 2: is at load (data.py:12)",
        "  holdfast diagnose run/roll-calls/1 tells more.",
        "WARNING:holdfast:The collective of the last roll call is over, after 31 s.",
        "WARNING:holdfast:save of step 3: rank 2 came after 31 s.",
    ]
    found = [one.text for one in read(tmp_path, *(prefix + line for line in told), f"{prefix}  x").of("told")]
    assert found == [line.strip() for line in told]


def test_lines_that_a_terminal_has_broken_are_joined(tmp_path: Path) -> None:
    """As in https://github.com/om-ai-lab/VLM-R1/issues/257."""
    lines = [line for rank in range(4) for line in (timeout(rank, 5), status(rank, 5, 4, 5))]
    whole = read(tmp_path, *lines)
    for width in (80, 117, 200):
        parts = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
        broken = read(tmp_path, "loss 1.0", *parts)
        assert list(broken.ranks) == [0, 1, 2, 3]
        for rank in range(4):
            (one,), (other,) = broken.ranks[rank].operations, whole.ranks[rank].operations
            assert (one.number, one.group, one.sizes) == (other.number, other.group, other.sizes)
        first = broken.ranks[1].operations[0].source.line
        assert parts[first - 2].startswith("[rank1]:[E627")


def test_a_heartbeat_that_has_timed_out_is_read(tmp_path: Path) -> None:
    line = "[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated"
    assert [one.values for one in read(tmp_path, line).of("heartbeat")] == [("1",)]


def test_a_port_that_is_taken_is_a_cause(tmp_path: Path) -> None:
    error = "[rank0]: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    assert read(tmp_path, error).ranks[0].endings[0].is_cause
    late = error.replace("EADDRINUSE", "ETIMEDOUT").replace("already in use", "x")
    assert not read(tmp_path, late).ranks[0].endings[0].is_cause


def test_failures_that_launchers_sum_up(tmp_path: Path) -> None:
    summary = [
        "Root Cause (first observed failure):",
        "[0]:",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : {} (pid: 12)",
    ]
    killed = of(tmp_path, *(line.format(-9) for line in summary)).why
    assert killed is not None
    assert (killed.kind, killed.ranks) == ("died", (3,))
    aborted = of(tmp_path, *(line.format(-6) for line in summary), timeout(0, 1))
    assert aborted.why is None
    by_srun = of(tmp_path, "srun: error: node1: task 3: Killed", "srun: error: node1: task 4: Killed").why
    assert by_srun is not None
    assert by_srun.ranks == (3,)


def test_a_broken_gpu_is_named(tmp_path: Path) -> None:
    line = (
        "[default0]:[rank12]:[E817 17:40:34.22 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12] Process group "
        "watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
    )
    found = of(tmp_path, line).why
    assert found is not None
    assert (found.kind, found.ranks) == ("died", (12,))


def test_a_heartbeat_alone_does_not_decide(tmp_path: Path) -> None:
    stuck = (
        "[rank11]:[E423 18:59:02.19 ProcessGroupNCCL.cpp:1890] [PG ID 0 PG GUID 0(default_pg) Rank 11] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    )
    found = of(tmp_path, stuck)
    assert (found.who, found.why) == (None, None)
    assert any(one.what.startswith("the watchdog of rank 11 stood still") for one in found.advice)


def init(process: int, rank: int, size: int, name: str, what: str) -> str:
    return f"k8s17:{process}:9 [0] NCCL INFO ncclCommInitRank comm 0x55 rank {rank} nranks {size} commId {name} - Init {what}"


@pytest.mark.parametrize("line", ["{'train_runtime': 119.8187, 'epoch': 2.57}", "`Trainer.fit` stopped: `max_steps=10` reached."])  # fmt: skip
def test_a_program_that_has_trained_may_still_save(line: str, tmp_path: Path) -> None:
    """Composed from https://github.com/tatsu-lab/stanford_alpaca/issues/65, which hangs in a save after the training."""
    stuck = "[rank0]:[E423 18:59:02.19 x] [PG ID 0 PG GUID 0(default_pg) Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds"
    assert of(tmp_path, line, stuck).why is None


def test_who_cancels_a_job_kills_no_rank_of_it(tmp_path: Path) -> None:
    """Composed from https://github.com/IGNF/myria3d/issues/123: rank 0 prepares data, and the job is cancelled."""
    cancelled = "slurmstepd: error: *** STEP 6053.0 ON node1 CANCELLED AT 2024-04-23T12:18:08 ***"
    assert of(tmp_path, cancelled, "srun: error: node1: task 0: Killed").why is None


def test_a_job_that_hangs_again_after_its_restart_is_not_compared(tmp_path: Path) -> None:
    """Composed from https://github.com/flyteorg/flyte-sdk/pull/698: each start hangs for its 600 s."""
    first, again = {"at": "12:26:40"}, {"at": "12:38:20"}
    lines = [timeout(0, 46, **first), status(0, 46, 45, 46, **first)]
    lines += [timeout(5, 29, **again), status(5, 29, 28, 29, **again)]
    assert of(tmp_path, *lines).why is None


def test_a_loader_that_the_launcher_ends_is_no_cause(tmp_path: Path) -> None:
    """Composed from https://github.com/ultralytics/ultralytics/issues/16400, whose log is that of one rank."""
    (tmp_path / "rank-0.log").write_text(
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: RuntimeError: DataLoader worker (pid 3349014) is killed by signal: Terminated. \n"
    )
    (tmp_path / "rank-1.log").write_text(timeout(1, 5) + "\n")
    assert diagnose(read_all([str(tmp_path)])).why is None


def test_a_communicator_whose_lines_are_left_out_is_open(tmp_path: Path) -> None:
    """Composed from https://github.com/vllm-project/vllm/issues/13535 (Ray, and a timeout long after the start)."""
    begun = [init(270 + rank, rank, 4, "0xabc", "START") for rank in range(4)]
    some = [init(270 + rank, rank, 4, "0xabc", "COMPLETE") for rank in range(3)]

    def who(*lines: str) -> tuple[int, ...] | None:
        found = of(tmp_path, *lines)
        assert found.why is None
        return found.who.ranks if found.who is not None else None

    assert who(*begun, *some) == (3,)
    ray = "(RayWorkerWrapper pid=270, ip=10.175.94.190) "
    assert who(*begun, f"{ray}{some[0]} [repeated 3x across cluster]") is None
    assert who(*begun, *some, timeout(3, 31)) is None


def test_the_rank_in_a_smaller_communicator_is_not_that_of_the_job(tmp_path: Path) -> None:
    whole = [init(270 + rank, rank, 4, "0xabc", what) for what in ("START", "COMPLETE") for rank in range(4)]
    part = [
        init(272, 0, 2, "0xdef", "START"),
        init(273, 1, 2, "0xdef", "START"),
        init(272, 0, 2, "0xdef", "COMPLETE"),
    ]
    found = of(tmp_path, *whole, *part).who
    assert found is not None
    assert found.ranks == (3,)


def test_all_alike_needs_all(tmp_path: Path) -> None:
    lines = [line for rank in range(4) for line in (timeout(rank, 18), status(rank, 18, 17, 39))]
    whole = of(tmp_path, "WORLD_SIZE=4", *lines)
    assert whole.who is not None
    assert (whole.why, whole.who.ranks) == (None, ())
    assert "nobody is missing" in whole.who.summary
    of_five = of(tmp_path, "WORLD_SIZE=5", *lines)
    assert of_five.who is not None
    assert (of_five.why, of_five.who.ranks) == (None, (4,))
    unknown = of(tmp_path, *lines)
    assert (unknown.who, unknown.why) == (None, None)


def test_lines_are_numbered_across_blocks_and_carriage_returns() -> None:
    filler = b"loss 1.0\n" * (BLOCK // 9 + 10)
    bars = b"\r".join(b"%d/9 [00:01]" % step for step in range(9))
    data = filler + bars + b"\rKeyboardInterrupt\n" + filler + b"Error: last"
    found = list(lines_that_tell(io.BytesIO(data)))
    assert [line for _, line in found] == [b"KeyboardInterrupt", b"Error: last"]
    assert [number for number, _ in found] == [filler.count(b"\n") + 1, 2 * filler.count(b"\n") + 2]


READ = """
import sys
import threading
import time
from holdfast._watch.read import read_all
evidence = read_all([sys.argv[1]])
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(len(evidence.ranks), sum(len(rank.operations) for rank in evidence.ranks.values()), int(peak) // 1024, time.process_time())
"""


@pytest.mark.parametrize("megabytes", [48, pytest.param(1024, marks=pytest.mark.soak)])
def test_a_large_log_takes_bounded_memory(megabytes: int, tmp_path: Path) -> None:
    plain = (
        b"  3%|x | 270/9847 [05:50<3:17:42,  1.24s/it] loss 0.123 lr 1e-5 and some more words of a step\n"
        * 9000
    )
    told = "".join(timeout(rank, 7) + "\n" for rank in range(64)).encode()
    with open(tmp_path / "job.log", "wb") as file:
        while file.tell() < megabytes << 20:
            file.write(plain + told)
    done = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "job.log"], capture_output=True, text=True, check=True
    )
    ranks, operations, peak, seconds = map(float, done.stdout.split())
    assert (ranks, operations) == (64, 64)
    assert peak < 120
    assert seconds < 10 + megabytes / 10  # of CPU time


def test_memory_of_a_line_without_end_is_bounded(tmp_path: Path) -> None:
    """And a long word, such as bytes in base64, takes no time by itself."""
    with open(tmp_path / "job.log", "wb") as file:
        for _ in range(10 * BLOCK >> 16):
            file.write(b"Error " + b"x" * (1 << 16))
    tracemalloc.start()
    read_all([str(tmp_path / "job.log")])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * BLOCK


OLD = (
    "[E ProcessGroupNCCL.cpp:{line}] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL({what}, {more}"
    "Timeout(ms)=1800000) ran for 1804615 milliseconds before timing out."
)
"""Without the global rank, and before torch 1.13 without a number: https://github.com/OFA-Sys/OFA/issues/271."""


def old(rank: int, name: str, number: int | None = None, more: str = "") -> str:
    what = f"OpType={name}" if number is None else f"SeqNum={number}, OpType={name}"
    return OLD.format(line=737, rank=rank, what=what, more=more)


def test_operations_without_a_number_are_not_joined(tmp_path: Path) -> None:
    """Each rank's first timeout may be of another call."""
    names = ["ALLREDUCE", "BROADCAST", "ALLREDUCE", "ALLREDUCE"]
    for rank, name in enumerate(names):
        (tmp_path / f"rank-{rank}.log").write_text(
            f"world size 4\n{old(rank, name, more='TensorShape=[1], ')}\n"
        )
    found = diagnose(read_all([str(tmp_path)]))
    assert found.why is None, found.why
    assert found.who is None or found.who.number is None
    assert "rank 1 timed out in BROADCAST" in [one.what for one in found.observations]


def test_lines_that_tell_no_global_rank_decide_nothing(tmp_path: Path) -> None:
    found = of(tmp_path, "world size 4", *(old(rank, "ALLREDUCE", 469508) for rank in range(4)))
    assert found.why is None
    assert len([one for one in found.observations if "timed out on rank" in one.what]) == 4


@pytest.mark.parametrize("odd", ["BROADCAST", "ALLREDUCE"])
def test_where_groups_of_some_ranks_are_in_use_a_rank_alone_tells_no_group(odd: str, tmp_path: Path) -> None:
    """Rank 1 is rank 1 of its tensor group, and rank 0 is rank 0 of its data group: another group has its own
    number 5. Rank 2 shows that there are such groups."""
    lines = [timeout(0, 5), timeout(1, 5, odd), timeout(2, 5, group_rank=0)]
    found = of(tmp_path, "world size 4", *lines)
    assert found.why is None, found.why


def test_the_counts_of_torch_2_4_are_read(tmp_path: Path) -> None:
    """https://github.com/mila-iqia/milabench/pull/269 has such lines."""
    lines = [
        f"[rank{rank}]:[E909 09:55:46.996672294 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) Rank {rank}] Timeout at NCCL "
        f"work: 2070, last enqueued NCCL work: 2082, last completed NCCL work: 2069."
        for rank in range(2)
    ]
    progress = [rank.progress for rank in read(tmp_path, *lines).ranks.values()]
    assert [(one.group, one.enqueued, one.completed) for (one,) in progress] == [
        ("PG 0:default_pg", 2082, 2069)
    ] * 2


def test_a_log_that_grows_is_read_as_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.log"
    path.write_text(f"{timeout(0, 5)}\n")
    read_into = packed._AsFound.readinto
    reads = 0

    def readinto(file: packed._AsFound, into: Any) -> int:
        nonlocal reads
        if reads < 1000:  # else a mistake has no end
            reads += 1
            with open(path, "a") as log:
                log.write(f"{timeout(1, 5)}\n")
        return read_into(file, into)

    monkeypatch.setattr(packed._AsFound, "readinto", readinto)
    found = read_all([str(path)])
    assert list(found.ranks) == [0]
    assert reads < 10


def test_the_last_number_of_a_line_that_is_being_written_does_not_count(tmp_path: Path) -> None:
    whole = f"{status(0, 2070, 2069, 2082)}\n"
    for cut in (whole[:-2], whole[:-1]):
        (tmp_path / "job.log").write_text(whole.replace("rank0", "rank1").replace("Rank 0", "Rank 1") + cut)
        assert list(read_all([str(tmp_path / "job.log")]).ranks) == [1]


def test_a_line_that_healthy_steps_write_too_is_no_cause(tmp_path: Path) -> None:
    line = "1/900 [00:20<5:02:45]Invalidate trace cache @ step 10: expected module 11, but got module 19"
    waits = timeout(1, 1580, "_ALLGATHER_BASE", 4096)
    assert of(tmp_path, line, waits).why is None


def test_who_has_not_come_to_a_monitored_barrier_is_told_and_not_judged(tmp_path: Path) -> None:
    said = "[rank0]:[E1126 16:21:27.229751813 ProcessGroupGloo.cpp:67] [Rank 0]: {} failed to pass monitoredBarrier in 2000 ms"
    found = of(tmp_path, said.format("Rank 2"), said.format("Ranks 2, 3"))
    assert found.why is None
    assert found.who is not None
    assert (found.who.ranks, found.who.basis) == ((2, 3), "log")
    assert of(tmp_path, said.format("Ranks ,"), said.format("Rank " + "9" * 5000)).who is None


def test_what_has_no_end_or_says_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PATIENCE", 0.2)
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2 << 30)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(200 << 30)
    for name, words in (
        (str(tmp_path / "fifo"), "Nobody has written into the pipe"),
        (str(tmp_path / "hole"), "is mostly a hole"),
        (str(tmp_path / "huge"), "has 200 GiB"),
        ("/dev/zero", "is neither a file nor a pipe"),
    ):
        with pytest.raises(BadInput, match=words):
            read_all([name])


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    def write() -> None:
        time.sleep(0.2)
        (tmp_path / "fifo").write_text("[rank2]: RuntimeError: Connection reset by peer\n" * 5000)

    writer = threading.Thread(target=write)
    writer.start()
    evidence = read_all([str(tmp_path / "fifo")])
    writer.join(20)
    assert 2 in evidence.ranks
