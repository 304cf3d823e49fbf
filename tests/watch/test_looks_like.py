"""Each fingerprint has its text, and logs of jobs that are well look like nothing and get no advice."""

from __future__ import annotations

import datetime
import re
from functools import cache
from pathlib import Path

import pytest

from holdfast._watch.advice import advice
from holdfast._watch.evidence import Evidence
from holdfast._watch.looks_like import MOST, KnownCase, looks_like, table
from holdfast._watch.read import read_all
from tests.museum.museum import Exhibit, exhibits, write
from tests.watch.test_logs import read, status, timeout

TEXTS = Path(__file__).parent / "texts"
HEALTHY = sorted((TEXTS / "healthy").glob("*.log"))


@cache
def texts() -> dict[str, str]:
    """The texts of fingerprints, by their titles. `posted` ones are machine output of the thread, `composed` ones
    are written by us from its facts."""
    found: dict[str, str] = {}
    for path in sorted(TEXTS.glob("*.txt")):
        for part in re.split(r"^=== ", path.read_text(), flags=re.MULTILINE)[1:]:
            title, _, text = part.partition("\n")
            head = re.fullmatch(r"(.*) \((posted|composed)\)", title)
            assert head is not None, title
            found[head[1]] = text
    return found


def exhibit_of(entry: KnownCase) -> Exhibit | None:
    """The exhibit of the museum that shows the same thread."""
    return next((one for one in exhibits() if one.url == entry.thread), None)


def evidence_of(entry: KnownCase, folder: Path) -> Evidence:
    exhibit = exhibit_of(entry)
    if entry.title in texts() or exhibit is None:
        return read(folder, texts()[entry.title])
    write(exhibit, "stacks", folder)
    return read_all([str(folder)])


def said(evidence: Evidence) -> list[str]:
    return [one.what for one in advice(evidence)]


@pytest.mark.parametrize("entry", table(), ids=lambda entry: entry.title)
def test_each_fingerprint_matches_its_text(entry: KnownCase, tmp_path: Path) -> None:
    found = {one.title: one for one in looks_like(evidence_of(entry, tmp_path))}
    assert entry.title in found
    assert len(found[entry.title].seen) >= entry.needs
    assert all(one.source is not None and one.source.file for one in found[entry.title].seen)


def test_fingerprints_are_whole() -> None:
    assert len(table()) >= 45
    assert len({entry.title for entry in table()}) == len(table())
    assert texts().keys() <= {entry.title for entry in table()}
    for entry in table():
        assert re.match(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+$", entry.thread), (
            entry.thread
        )
        assert datetime.date.fromisoformat(entry.noted)
        assert entry.cause
        assert entry.cure
        assert 1 <= entry.needs <= len(entry.lines) + len(entry.frames) + len(entry.operations)
        # A text that is short is in many logs.
        assert all(len(max(line.split("*"), key=len)) >= 5 for line in entry.lines)


def test_few_are_told_and_the_most_alike_first(tmp_path: Path) -> None:
    found = looks_like(read(tmp_path, *texts().values()))
    assert len(found) == MOST
    counts = [len(one.seen) for one in found]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_job_that_is_well_looks_like_nothing(path: Path) -> None:
    evidence = read_all([str(path)])
    assert not looks_like(evidence)
    assert not said(evidence)


def test_there_are_healthy_logs() -> None:
    assert len(HEALTHY) >= 12


def test_a_part_alone_is_no_likeness(tmp_path: Path) -> None:
    line = (
        "3%| 270/9847 [05:50<3:17:42]Invalidate trace cache @ step 1: expected module 25, but got module 323"
    )
    assert not looks_like(read(tmp_path, line))
    both = looks_like(read(tmp_path, line, timeout(1, 211067, "_ALLGATHER_BASE", 2359296)))
    assert [one.thread for one in both] == ["https://github.com/deepspeedai/DeepSpeed/pull/5008"]


def test_one_line_is_one_part(tmp_path: Path) -> None:
    """What needs two parts has two of them, and not one line that is told of twice."""
    several = {entry.title for entry in table() if entry.needs > 1}
    logs = [section.text for one in exhibits() for section in one.sections if section.kind == "log"]
    for line in "".join([*texts().values(), *logs]).splitlines():
        if "Epoch 9" not in line:  # a bar and a timeout in one
            assert not several & {one.title for one in looks_like(read(tmp_path, line))}, line


def test_parts_are_noted_once_and_in_bounded_number(tmp_path: Path) -> None:
    lines = [timeout(rank, number) for rank in range(64) for number in range(30)]
    evidence = read(tmp_path, *lines)
    assert len(evidence.of("looks like")) <= 8
    assert not looks_like(evidence)


# -- what lines show ------------------------------------------------------------------------------------------


def test_who_never_appears_is_named(tmp_path: Path) -> None:
    lines = [line for rank in range(1, 8) for line in (timeout(rank, 167), status(rank, 167, 166, 167))]
    assert said(read(tmp_path, *lines)) == [
        "ranks 1-7 timed out in ALLREDUCE, number 167 of group default_pg; the log has no line of rank 0 that tells anything: "
        "look at rank 0"
    ]
    assert (
        "the log has lines of rank 0, but no timeout: look at rank 0"
        in said(read(tmp_path, *lines, "[rank0]: Exception x"))[0]
    )


def test_who_does_not_appear_where_lines_are_hidden_is_not_named(tmp_path: Path) -> None:
    lines = [timeout(rank, 167) for rank in range(1, 8)]
    (hidden,) = said(read(tmp_path, *lines, timeout(7, 167) + " [repeated 14x across cluster]"))
    assert hidden.endswith("the log has no timeout of rank 0, and Ray has left out 14 lines")
    assert "look at" not in hidden


def test_one_rank_of_many_accuses_nobody(tmp_path: Path) -> None:
    (one,) = said(read(tmp_path, timeout(5, 29)))
    assert one.endswith("the log has no timeout of ranks 0-4")


def test_all_ranks_in_one_operation(tmp_path: Path) -> None:
    lines = [timeout(rank, 18) for rank in range(4)]
    assert said(read(tmp_path, "WORLD_SIZE=4", *lines)) == [
        "ranks 0-3 timed out in ALLREDUCE, number 18 of group default_pg; these are all of its ranks, and none is "
        "missing"
    ]
    assert "none is missing" not in said(read(tmp_path, *lines))[0]


def test_the_first_collective_of_a_group(tmp_path: Path) -> None:
    lines = [line for rank in range(2) for line in (timeout(rank, 1), status(rank, 1, 0, 1))]
    (first, opening) = said(read(tmp_path, *lines))
    assert "number 1" in first
    assert opening.startswith("that is the first collective of the group: its communicator did not open")


def test_different_operations_under_one_number(tmp_path: Path) -> None:
    lines = [timeout(rank, 7, "BROADCAST", 24 if rank == 2 else 64) for rank in range(4)]
    (sizes,) = said(read(tmp_path, *lines))
    assert "ranks 0-1, 3 in BROADCAST of 64 elements; rank 2 in BROADCAST of 24 elements" in sizes
    lines[1] = timeout(1, 7, "ALLREDUCE")
    assert "rank 1 in ALLREDUCE" in said(read(tmp_path, *lines))[0]


def test_the_size_of_a_group_is_that_of_its_gather(tmp_path: Path) -> None:
    line = timeout(5, 26523, "ALLGATHER", group_rank=0).replace("NumelOut=1,", "NumelOut=4,")
    assert said(read(tmp_path, line))[0].endswith("the group has 4 ranks, 3 without a timeout")


def test_a_rank_that_has_issued_fewer_is_told(tmp_path: Path) -> None:
    lines = [status(rank, 7, 6, 3 if rank == 3 else 7, group="5(DATA)") for rank in range(4)]
    assert said(read(tmp_path, *lines)) == ["rank 3 issued 3 collectives of group 5:DATA, others up to 7"]
    old = [line.replace("PG ID 0 PG GUID 5(DATA)", "PG 5 (DATA)") for line in lines]
    assert not said(read(tmp_path, *old))  # each rank counts groups by itself


def test_collectives_on_two_threads(tmp_path: Path) -> None:
    stack = "    broadcast (torch/distributed/distributed_c10d.py:2900)\n    f (train.py:1)\n"
    (tmp_path / "rank-3.txt").write_text(
        f'Process 7: python\nThread 7 (idle): "MainThread"\n{stack}\nThread 8 (idle): "sync"\n{stack}'
    )
    evidence = read_all([str(tmp_path / "rank-3.txt")])
    assert said(evidence) == [
        "rank 3 is in collectives on 2 threads: MainThread in broadcast, sync in broadcast"
    ]


def test_what_a_heartbeat_means(tmp_path: Path) -> None:
    line = "[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=103"
    (told,) = said(read(tmp_path, line))
    assert told.startswith("the watchdog of rank 1 stood still, which is no timeout of a collective")


def test_a_rank_that_waits_in_another_operation_is_not_to_look_at(tmp_path: Path) -> None:
    """As in https://github.com/vllm-project/vllm/issues/8978, where the line of one rank's counts is missing."""
    lines = [timeout(rank, 1) for rank in (0, 1, 2)] + [status(0, 1, 0, 1), status(2, 1, 0, 1)]
    assert said(read(tmp_path, *lines))[0] == "ranks 0-2 timed out in ALLREDUCE, number 1 of group default_pg"
    lines[1] = timeout(1, 1, group_rank=0)  # of a group that is not told
    assert not any("look at" in one for one in said(read(tmp_path, *lines)))


def test_a_rank_that_completed_the_number_of_the_others_is_told(tmp_path: Path) -> None:
    """https://github.com/huggingface/accelerate/issues/3250."""
    lines = [timeout(0, 122, "_REDUCE_SCATTER_BASE"), status(0, 122, 121, 127)]
    lines += [timeout(1, 126, "_ALLGATHER_BASE"), status(1, 126, 125, 128)]
    assert said(read(tmp_path, *lines)) == [
        "rank 0 timed out in _REDUCE_SCATTER_BASE, number 122 of group default_pg; other ranks in another one: "
        "rank 1 in _ALLGATHER_BASE #126",
        "rank 1 completed number 122, in which others wait",
        "rank 0 issued 127 collectives of group default_pg, others up to 128",
    ]


def test_an_error_before_the_timeouts_is_told(tmp_path: Path) -> None:
    line = "[rank7]: RuntimeError: Invalid mt19937 state"
    assert said(read(tmp_path, line, timeout(7, 5)))[0] == (
        "rank 7 raised RuntimeError: Invalid mt19937 state, before the first timeout"
    )
    assert len(said(read(tmp_path, timeout(7, 5), line, timeout(6, 5)))) == 1


def test_memory_that_ended_before_the_timeouts(tmp_path: Path) -> None:
    line = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 336.00 MiB."
    assert (
        said(read(tmp_path, line, timeout(0, 5)))[0] == "rank 2 ran out of memory, before the first timeout"
    )
    assert said(read(tmp_path, timeout(0, 5), line))[0] == "rank 2 ran out of memory"


@pytest.mark.parametrize(
    "how", ["Connection closed by peer [10.0.0.1]:4", "Read error [10.0.0.1]:7061: Connection reset by peer."]
)
def test_a_peer_that_has_closed_the_connection(how: str, tmp_path: Path) -> None:
    line = f"[rank2]: RuntimeError: [../gloo/transport/tcp/pair.cc:534] {how}"
    assert said(read(tmp_path, line)) == [
        "rank 2 lost the connection to 10.0.0.1: a process there has closed it, at its end, or with its process group"
    ]


REPORTS = {
    "megatron-lm-4910": "https://github.com/NVIDIA/Megatron-LM/issues/4910",
    "ms-swift-8385": "https://github.com/modelscope/ms-swift/pull/8385",
    "ms-swift-9486": "https://github.com/modelscope/ms-swift/pull/9486",
    "nemo-rl-2226": "https://github.com/NVIDIA-NeMo/RL/pull/2226",
    "verl-2238": "https://github.com/verl-project/verl/issues/2238",
}
"""The texts of the founding reports, as they are posted, are in no repository: here is what of them is machine
output, or names of it."""


@pytest.mark.parametrize("name", REPORTS)
def test_the_texts_of_the_founding_reports_look_like_themselves(name: str) -> None:
    evidence = read_all([str(TEXTS / "reports" / f"{name}.log")])
    found = looks_like(evidence)
    assert found
    assert found[0].thread == REPORTS[name]
