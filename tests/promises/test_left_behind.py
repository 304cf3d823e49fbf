"""The rank that commits, and serves the message store, ends at once: the others say what they have heard."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import torch

import holdfast
from holdfast._core.roster.torch_store import TorchRoster
from holdfast.errors import CommitUnconfirmed, HoldfastError
from tests.support.processes import ProcessWorld

JOB = holdfast.Job(timeout=60.0)


def end_at_once(rank: int, folder: str, killed: int) -> str:
    """Two saves. `killed` ends before it enters the second; rank 0 ends by `os._exit` on its error."""
    state = {f"w{rank}": torch.ones(4)}
    holdfast.save(state, Path(folder, "one"), job=JOB)
    if rank == killed:
        time.sleep(5.0)  # the others have entered by then
        os.kill(os.getpid(), signal.SIGKILL)
    if rank > 0:  # a busy host reads late
        get = TorchRoster.get
        TorchRoster.get = lambda self, keys: time.sleep(0.3) or get(self, keys)  # type: ignore[method-assign]
    try:
        holdfast.save(state, Path(folder, "two"), job=JOB)
    except HoldfastError as error:
        if rank == 0:
            os._exit(1)
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_rank_that_ends_on_its_error_has_told_it_to_all(tmp_path: Path) -> None:
    with ProcessWorld(16, store_host="rank 0") as world:
        world.start(end_at_once, str(tmp_path), 5)
        ends = {one.rank: one for one in world.collect_some(60, set(range(16)) - {0, 5})}
    for rank, one in ends.items():
        said = one.get()
        assert said.startswith("RankFailed"), (rank, said)
        assert "rank 5 " in said


def die_after_the_decision(rank: int, folder: str) -> tuple[str, list[tuple[int, int]]]:
    from holdfast._core.protocol import core

    def die(*_: object) -> object:
        time.sleep(2.0)  # the others have looked at this rank by then
        os.kill(os.getpid(), signal.SIGKILL)
        yield

    if rank == 0:
        core._publish = die  # type: ignore[assignment]
    try:
        holdfast.save({f"w{rank}": torch.ones(4)}, Path(folder, "one"), job=JOB)
    except CommitUnconfirmed as error:
        return str(error), [(info.rank, info.pid) for info in error.missing]
    return "saved", []


def test_who_can_not_learn_of_a_commit_names_the_rank_that_decides_it(tmp_path: Path) -> None:
    with ProcessWorld(3, store_host="rank 0") as world:
        world.start(die_after_the_decision, str(tmp_path))
        ends = [one.get() for one in world.collect_some(60, {1, 2})]
    for said, missing in ends:
        ((named, pid),) = missing
        assert named == 0
        assert "it could not learn whether the index was put in place" in said
        assert f"Rank 0 (host {socket.gethostname()}, pid {pid}) decides that; its process " in said
