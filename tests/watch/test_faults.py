"""What the roll call says of injected faults over eight real ranks: see `faults`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import reason_not
from tests.support.wide import wide
from tests.watch.faults import FAULTS, HEALTHY, RANKS, SILENT, Fault, run, table

BY_NAME = {fault.job: fault for fault in FAULTS}


def injected(fault: Fault) -> Fault:
    if fault.network and (why := reason_not()):
        pytest.skip(why)
    return fault


@pytest.mark.wide
def test_a_late_rank_is_told_and_comes(tmp_path: Path) -> None:
    """Once, on one rank, before the timeout; the job goes on, and that is told, too."""
    found = run(BY_NAME["late"], tmp_path)
    assert found.judged == "right", found.told
    assert found.found is not None
    who = found.found.who
    assert who is not None
    assert (who.ranks, who.waiting) == ((3,), (0, 1, 2, 4, 5, 6, 7))
    assert (who.group, who.operation) == ("1:train", "all_reduce")
    assert who.call is not None
    assert "and moves: later at" in who.known[0].text
    calls = [text for text in found.told if text.startswith("Roll call of 8 of 8 ranks")]
    assert len(calls) == 1
    assert "rank 3 has not come to it" in calls[0]
    assert sum("is over, after" in text for text in found.told) == 1
    assert len(list(tmp_path.glob("done-*"))) == RANKS
    (folder,) = (tmp_path / "roll-calls").iterdir()
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    assert names == ["job-0", *(f"rank-{rank}.json" for rank in range(RANKS))]


@pytest.mark.parametrize("name", ["leaves_one_out", *wide(["in_another_order", "late_and_slow_to_answer"])])
def test_some_faults_are_named(name: str, tmp_path: Path) -> None:
    found = run(BY_NAME[name], tmp_path)
    assert found.judged == "right", (found.told, found.found)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=[fault.job for fault in FAULTS])
def test_no_fault_is_judged_wrongly(fault: Fault, tmp_path: Path) -> None:
    """Silent is allowed for those that docs/diagnose.md lists so."""
    found = run(injected(fault), tmp_path)
    print(table([found]))
    assert found.judged == ("silent" if fault.job in SILENT else "right"), (found.told, found.found)
    assert sum(text.startswith("Roll call of") for text in found.told) == 1
    if fault.asked:
        assert "rank 3" in (tmp_path / "doctor").read_text()


@pytest.mark.soak
def test_a_healthy_job_is_not_called(tmp_path: Path) -> None:
    found = run(HEALTHY, tmp_path)
    assert found.told == []
    assert len(list(tmp_path.glob("done-*"))) == RANKS
    assert not (tmp_path / "roll-calls").exists()


KILLED_AT_ITS_TIMEOUT = """
import datetime, os, sys, threading, time
import torch
import torch.distributed as dist
import holdfast

LIMIT, rank = 24.0, int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2 * LIMIT))
group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
holdfast.install(checkpoints=False, guard=False)
dist.all_reduce(torch.ones(1), group=group)

def watchdog():
    time.sleep(LIMIT)
    os.write(2, b"watchdog aborts")
    os.abort()

threading.Thread(target=watchdog, daemon=True).start()
if rank:
    time.sleep(1000)
dist.all_reduce(torch.ones(1), group=group)
"""


@pytest.mark.soak
def test_the_result_is_on_disk_and_on_stderr_before_a_watchdog_aborts(tmp_path: Path) -> None:
    """As NCCL's does, without an exception, on all ranks."""
    environment = os.environ | {"HOLDFAST_ROLL_CALLS": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", KILLED_AT_ITS_TIMEOUT]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [-signal.SIGABRT] * 2
    assert 0 <= told[0].find("rank 1 has not come to it") < told[0].find("watchdog aborts")
    (folder,) = (tmp_path / "roll-calls").iterdir()
    assert {"rank-0.json", "rank-1.json"} <= set(os.listdir(folder))
