"""Storage that fails at any call of a save, for a moment or for good: nothing that is committed is lost, and
no save is called failed that is committed."""

from __future__ import annotations

import errno
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast._core.protocol import core as protocol
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast._core.saving import cleanup, commit
from holdfast._core.store import filesystem
from holdfast._tools.checkpoints.verify import Verified, verify
from holdfast.errors import CommitUnconfirmed, HoldfastError, NotCommitted
from tests.store.faults import CALLS, CHANGES, FOREVER, READS, Faults

ERRNOS = (
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENOSPC,
    errno.EACCES,
    errno.EINTR,
    errno.ENOENT,
    errno.EEXIST,
)


class Case(NamedTuple):
    """`length` calls fail with an errno from number `first` on (see Faults), in a new save or in an
    overwrite."""

    ranks: int
    overwrite: bool
    error: int
    first: int
    length: int
    after: bool = False
    only: tuple[str, ...] = CALLS


def whole_of(world: int, step: int) -> torch.Tensor:
    return torch.arange(float(6 * world)).reshape(2 * world, 3) + 1000 * step


def state_of(rank: int, world: int, step: int) -> dict[str, Any]:
    mine = whole_of(world, step)[2 * rank : 2 * rank + 2].clone()
    return {"w": holdfast.Shard(mine, (2 * world, 3), (2 * rank, 0)), "step": step}


def step_in(place: Path, world: int) -> int | None:
    """Whose step's checkpoint is in a folder, None if there is none; every byte of it must be that step's."""
    state = {"w": torch.zeros(2 * world, 3), "step": 0}
    try:
        holdfast.load(state, place, job=holdfast.Job(no_dist=True))
    except NotCommitted:
        return None
    assert torch.equal(state["w"], whole_of(world, state["step"]))
    found = verify(place)
    assert isinstance(found, Verified)
    assert found.whole, found.damage
    return int(state["step"])


def on_ranks(world: int, job: Callable[[MemoryRoster], object]) -> list[str]:
    """How each rank's call ended: `saved`, `failed` or `unconfirmed`."""
    board, ends = Board(), ["never"] * world

    def one(rank: int) -> None:
        try:
            job(MemoryRoster(rank, world, board))
            ends[rank] = "saved"
        except CommitUnconfirmed:
            ends[rank] = "unconfirmed"
        except HoldfastError as error:
            ends[rank] = "failed"
            # Shown where the test fails.
            logging.getLogger("holdfast").info("rank %d failed: %r", rank, error)
        except BaseException as error:
            ends[rank] = repr(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def let_sweeps_end() -> None:
    for thread in threading.enumerate():
        if thread.name == "holdfast-sweep":
            thread.join(60)
            assert not thread.is_alive()


class Runner:
    def __init__(self, faults: Faults, folder: Path) -> None:
        self.faults, self.folder = faults, folder
        self.seen: Counter[str] = Counter()

    def run(self, case: Case, again: bool = True) -> int:
        """Save step 2, over step 1 or not, while storage fails; how many calls that took. Checks what there
        is afterwards."""
        world, place = case.ranks, self.folder / "step"

        def save(roster: MemoryRoster, step: int) -> None:
            state = state_of(roster.rank, world, step)
            holdfast.save(
                state, place, step=step, job=holdfast.Job(roster=roster, timeout=30.0, stall_timeout=20.0)
            )

        shutil.rmtree(place, ignore_errors=True)
        if case.overwrite:
            assert on_ranks(world, lambda roster: save(roster, 1)) == ["saved"] * world
        self.faults.arm(case.error, case.first, case.length, case.after, case.only)
        ends = on_ranks(world, lambda roster: save(roster, 2))
        let_sweeps_end()
        self.faults.disarm()
        assert self.faults.left_open() == [], case
        old = 1 if case.overwrite else None
        there = step_in(place, world)
        allowed = {"saved": {2}, "failed": {old}, "unconfirmed": {old, 2}}
        assert all(there in allowed.get(end, ()) for end in ends), (case, ends, there)
        self.seen.update(ends)
        if again:  # nothing that failed is in the way of the next save
            assert on_ranks(world, lambda roster: save(roster, 2)) == ["saved"] * world, case
        return self.faults.count

    def every_call(self, case: Case, every: int = 1) -> None:
        """Fail at every so many-th call that a save makes which goes well."""
        for first in range(1, self.run(case._replace(length=0)) + 1, every):
            self.run(case._replace(first=first), again=first % 8 == 1)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    """Storage that can be told to fail, and a store that does not wait long for it."""
    monkeypatch.setattr(filesystem, "PATIENCE", 0.02)
    monkeypatch.setattr(filesystem, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(commit, "LOOK_AGAIN", 0.02)
    monkeypatch.setattr(cleanup, "OTHERS_LEAVE", 0.05)
    for module in (protocol, commit):
        monkeypatch.setattr(module, "VISIBLE_WITHIN", 0.2)
    return Runner(Faults(monkeypatch, tmp_path), tmp_path)


BOTH = pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])


@BOTH
@pytest.mark.parametrize(
    ("length", "every"), [(1, 3), (2, 7), (FOREVER, 5)], ids=["once", "twice", "for ever"]
)
def test_storage_that_fails_at_any_call(runner: Runner, overwrite: bool, length: int, every: int) -> None:
    runner.every_call(Case(1, overwrite, errno.EIO, 1, length), every)
    assert runner.seen["saved"] > 0
    assert runner.seen["failed"] > 0


@BOTH
@pytest.mark.parametrize("error", [errno.EIO, errno.EEXIST, errno.ENOENT], ids=errno.errorcode.get)
def test_the_answer_to_a_change_of_names_is_lost(runner: Runner, overwrite: bool, error: int) -> None:
    """The server has done it, and says that it has not."""
    for length in (1, 2):
        runner.every_call(Case(1, overwrite, error, 1, length, after=True, only=CHANGES))


@BOTH
def test_storage_that_fails_under_several_ranks(runner: Runner, overwrite: bool) -> None:
    for length in (1, FOREVER):
        runner.every_call(Case(3, overwrite, errno.EIO, 1, length), every=29)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@BOTH
@pytest.mark.parametrize("error", ERRNOS, ids=errno.errorcode.get)
def test_storage_that_fails_at_any_call_for_long(runner: Runner, overwrite: bool, error: int) -> None:
    for length in (*range(1, 7), FOREVER):
        runner.every_call(Case(1, overwrite, error, 1, length))
        runner.every_call(Case(1, overwrite, error, 1, length, after=True, only=CHANGES))
        runner.every_call(Case(1, overwrite, error, 1, length, only=READS), every=3)
        runner.every_call(Case(3, overwrite, error, 1, length), every=5)
        runner.every_call(Case(3, overwrite, error, 1, length, after=True, only=CHANGES))
