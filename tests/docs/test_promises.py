"""Promises of the README that no other test keeps."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpoint, HoldfastError
from holdfast.roster.memory import MemoryRoster
from tests.support.threads import on_ranks


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("holdfast")}


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {target for target in found if target.startswith("/") and not target.startswith("/proc")}


def test_a_call_leaves_nothing_behind(tmp_path: Path) -> None:
    before, others = descriptors(), ours()

    def job(roster: MemoryRoster) -> None:
        run = holdfast.Checkpoints(
            tmp_path / "run", asynchronous=False, roster=roster, options=holdfast.Options(writer_threads=2)
        )
        closed.append(run)
        state = {"w": torch.randn(100, 100, generator=torch.Generator().manual_seed(0)), "step": 1}
        run.save(1, state)
        run.restore(state)
        with pytest.raises(HoldfastError):
            holdfast.load(state, tmp_path / "nothing", roster=roster)

    closed: list[holdfast.Checkpoints] = []
    on_ranks(3, job)
    assert {thread.name for thread in ours() - others} <= {"holdfast-owner"}, (
        "until close() the run folder is shown to be in use"
    )
    for run in closed:
        run.close()
    assert ours() <= others
    assert descriptors() <= before


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    run = holdfast.Checkpoints(tmp_path, asynchronous=False, no_dist=True)
    for step in (1, 2):
        run.save(step, {"w": torch.full((1000,), float(step))})
    (data,) = (tmp_path / "step-00000002" / "data").iterdir()
    content = bytearray(data.read_bytes())
    at = content.index(torch.full((2,), 2.0).numpy().tobytes())
    content[at + 1] ^= 1
    data.write_bytes(content)
    state = {"w": torch.zeros(1000)}
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        run.restore(state, 2)
    assert run.restore(state) == 1
    assert torch.equal(state["w"], torch.full((1000,), 1.0))
    with pytest.raises(CorruptCheckpoint):
        run.restore(state, fallback=False)


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the wall clock is years away from the last one."""
    rng = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: rng.uniform(0, 4e9))

    def job(roster: MemoryRoster) -> None:
        part = holdfast.Shard(torch.full((1, 4), float(roster.rank)), (3, 4), (roster.rank, 0))
        time.sleep(0.5 * roster.rank)  # the others wait, and look
        holdfast.save({"w": part}, tmp_path / "s", roster=roster, timeout=20.0, stall_timeout=3.0)
        whole = {"w": torch.zeros(3, 4)}
        holdfast.load(whole, tmp_path / "s", roster=roster, timeout=20.0, stall_timeout=3.0)
        assert whole["w"][:, 0].tolist() == [0.0, 1.0, 2.0]

    on_ranks(3, job)
