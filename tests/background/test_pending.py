"""What the holders of a save in the background hear, on the rank that gives it up and on the others."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

import holdfast
from holdfast import events
from holdfast.roster.memory import MemoryRoster
from tests.support.threads import on_ranks


def test_a_save_that_one_rank_cancels_is_given_up_on_all(tmp_path: Path) -> None:
    """The others neither try it again nor count it as a failure that somebody should have seen."""
    entered: list[int] = []
    cancelled = threading.Event()

    def watch(event: events.Event) -> None:
        if event.name == "save.entered":
            entered.append(event.rank)
        if event.name == "save.writing" and event.rank == 1:
            cancelled.wait(60)  # it can't be committed before

    def job(roster: MemoryRoster) -> tuple[bool, str]:
        state = {f"own{roster.rank}": torch.ones(3)}
        pending = holdfast.async_save(
            state, tmp_path / "a", roster=roster, retries=2, timeout=60, stall_timeout=30
        )
        if roster.rank == 0:
            assert pending.cancel()
            cancelled.set()
        pending.wait()
        return pending.failed_unseen(), str(pending.exception())

    stop = events.subscribe(watch)
    try:
        found = on_ranks(2, job)
    finally:
        stop()
    for unseen, said in found:
        assert "was cancelled on rank 0" in said
        assert not unseen
    assert sorted(entered) == [0, 1]
