"""Promises of the README that no other test keeps."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpoint, DeadlineExceeded, HoldfastError, RankFailed, SaveFailed
from holdfast.flow import commit
from holdfast.roster.memory import MemoryRoster
from holdfast.store.base import NotFound
from tests.docs.threads import on_ranks


def ours() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")}


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {target for target in found if target.startswith("/") and not target.startswith("/proc")}


def test_a_call_leaves_nothing_behind(tmp_path: Path) -> None:
    before = descriptors()

    def job(roster: MemoryRoster) -> None:
        run = holdfast.Checkpoints(
            tmp_path / "run", roster=roster, options=holdfast.Options(writer_threads=2)
        )
        state = {"w": torch.randn(100, 100, generator=torch.Generator().manual_seed(0)), "step": 1}
        run.save(1, state)
        run.restore(state)
        with pytest.raises(HoldfastError):
            holdfast.load(state, tmp_path / "nothing", roster=roster)

    on_ranks(3, job)
    assert ours() == set()
    assert descriptors() <= before


def test_a_stuck_disk_does_not_hold_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, end = os.fsync, threading.Event()

    def hangs(fd: int) -> None:
        end.wait(30)
        real(fd)

    monkeypatch.setattr(os, "fsync", hangs)
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="stuck in a system call"):
        holdfast.save({"w": torch.ones(3)}, tmp_path / "s", timeout=1.0, no_dist=True)
    assert time.monotonic() - begun < 1.0 + 3.5
    end.set()
    ends = time.monotonic() + 5
    while ours() and time.monotonic() < ends:
        time.sleep(0.01)
    assert ours() == set()  # it ends once the system call comes back, and nothing became visible
    assert not (tmp_path / "s" / "index.safetensors").exists()


def test_the_others_are_told_of_a_stuck_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank hangs in a write; the others name it after stall_timeout, long before the deadline."""
    end, real = threading.Event(), os.pwritev
    victim: list[int] = []

    def hangs(*args: object) -> int:
        if threading.get_ident() in victim or not victim:
            victim.append(threading.get_ident())
            end.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", hangs)
    told: dict[int, tuple[HoldfastError, float]] = {}

    def job(roster: MemoryRoster) -> None:
        part = holdfast.Shard(torch.ones(1, 4), (3, 4), (roster.rank, 0))
        begun = time.monotonic()
        with pytest.raises(RankFailed) as raised:
            holdfast.save({"w": part}, tmp_path / "s", roster=roster, timeout=20.0, stall_timeout=1.0)
        told[roster.rank] = (raised.value, time.monotonic() - begun)

    on_ranks(3, job)
    end.set()
    assert len({error.message for error, _ in told.values()}) == 1
    assert "no progress" in told[0][0].message
    assert max(seconds for _, seconds in told.values()) < 1.0 + 5.0
    assert not (tmp_path / "s" / "index.safetensors").exists()


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    run = holdfast.Checkpoints(tmp_path, no_dist=True)
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


def test_a_file_that_does_not_show_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose file systems are not the same one."""
    real = commit.embedded_index

    def hidden(store: Any, file: Any) -> Any:
        if "-r00001" in file.name:
            raise NotFound(f"{file.name} is not there")
        return real(store, file)

    monkeypatch.setattr(commit, "embedded_index", hidden)
    monkeypatch.setattr(commit, "VISIBLE_WITHIN", 0.3)
    found: list[HoldfastError] = []

    def job(roster: MemoryRoster) -> None:
        part = holdfast.Shard(torch.ones(1, 4), (3, 4), (roster.rank, 0))
        with pytest.raises(SaveFailed, match=r"rank 1 wrote data/.*, but it is not to be seen") as raised:
            holdfast.save({"w": part}, tmp_path / "s", roster=roster, timeout=20.0)
        found.append(raised.value)

    on_ranks(3, job)
    assert {(error.rank, error.message) for error in found} == {(1, found[0].message)}
    assert not (tmp_path / "s" / "index.safetensors").exists()
