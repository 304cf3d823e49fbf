"""What the ranks do in the tests of run folders; importable by spawned processes."""

from __future__ import annotations

import logging
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import BadInput
from tests.support.collectives import counted

JOB = holdfast.Job(timeout=30)
LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 1.5, 6: 4.0}


def state_of(step: int, rank: int) -> dict[str, Any]:
    part = holdfast.Shard(torch.full((2, 3), float(step)), (2 * dist.get_world_size(), 3), (2 * rank, 0))
    return {"w": part, "lr": 0.1}


def train_with_metrics(rank: int, run: str) -> tuple[list[int], int | None, int | None, float, list[str]]:
    """Six steps, of which the newest, those divisible by 3 and the best stay; the losses are rank 0's alone."""
    found: list[Any] = []

    def work() -> None:
        with holdfast.Checkpoints(
            run, keep=1, keep_every=3, best="loss", best_mode="min", asynchronous=False, job=JOB
        ) as checkpoints:
            for step, loss in LOSSES.items():
                metrics = {"loss": torch.tensor(loss)} if rank == 0 else None
                checkpoints.save(step, state_of(step, rank), metrics=metrics)
            best = checkpoints.best_step()
            state = state_of(0, rank)
            restored = checkpoints.restore(state, best)
            found.extend([checkpoints.steps(), best, restored, float(state["w"].tensor[0, 0])])

    collectives = counted(work)
    return (*found, collectives)  # type: ignore[return-value]


def train_by_the_clock(rank: int, run: str, seconds: float) -> tuple[list[int], list[int], list[float]]:
    """A loop without any collective, in which ranks are up to a step apart: the steps that were due, those that
    were committed, and the times between them."""
    due, times = [], []
    with holdfast.Checkpoints(run, save_every=timedelta(seconds=seconds), job=JOB) as checkpoints:
        dice, begun = random.Random(rank), time.monotonic()
        for step in range(300):
            time.sleep(0.005 + 0.01 * dice.random())
            if step % 10 == 0:
                dist.barrier()  # as training would
            if step % 2:  # asked before, or by `save` itself
                assert checkpoints.should_save(step) == checkpoints.should_save(step)
            asked = time.monotonic()
            if checkpoints.save(step, state_of(step, rank)) is not None:
                due.append(step)
                times.append(asked - begun)
                begun = asked
    with holdfast.Checkpoints(run, job=JOB) as checkpoints:
        return due, checkpoints.steps(), times


def close_early(rank: int, run: str) -> tuple[int, list[str]]:
    """Rank 1 closes its run after ten steps, and the others go on: the saves after that, and what is said."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    saves = 0
    try:
        with holdfast.Checkpoints(run, save_every=timedelta(seconds=1.5), job=JOB) as checkpoints:
            for step in range(500):
                if (rank == 1 and step == 10) or any("has closed" in line for line in said):
                    break
                time.sleep(0.02)
                if step < 10:
                    dist.barrier()
                saves += checkpoints.should_save(step)
    finally:
        logging.getLogger("holdfast").removeHandler(handler)
    return saves, [line for line in said if "has closed" in line]


def two_loops_by_the_clock(rank: int, run: str) -> list[list[int]]:
    """A second `Checkpoints` of the same run begins its time anew."""
    return [train_by_the_clock(rank, f"{run}", 1.0)[0] for _ in range(2)]


def save_by_number(rank: int, run: str) -> tuple[list[bool], list[int], list[int]]:
    with holdfast.Checkpoints(run, save_every=4, asynchronous=False, job=JOB) as checkpoints:
        asked = [checkpoints.should_save(step) for step in range(9)]
        saved = [step for step in range(9) if checkpoints.save(step, state_of(step, rank)) is not None]
        last = checkpoints.save(9, state_of(9, rank), force=True)
        assert last is not None
        return asked, saved, checkpoints.steps()


def late_rank(rank: int, run: str) -> tuple[str, float]:
    """A save with a timeout of its own, to which rank 1 does not come."""
    begun = time.monotonic()
    with holdfast.Checkpoints(run, asynchronous=False, job=JOB) as checkpoints:
        if rank == 1:
            return "", 0.0
        try:
            checkpoints.save(1, state_of(1, rank), timeout=2.0)
        except holdfast.errors.HoldfastError as error:
            return type(error).__name__, time.monotonic() - begun
    return "saved", 0.0


def go_back(rank: int, run: str) -> tuple[list[int], int | None]:
    """Restore step 1500, and save 1600, 1700 and 1800, two at once."""
    with holdfast.Checkpoints(run, in_flight=2, job=JOB) as checkpoints:
        state = {"w": torch.zeros(4)}
        checkpoints.restore(state, 1500)
        for step in (1600, 1700, 1800):
            state["w"].fill_(-step)
            checkpoints.save(step, state)
    return checkpoints.steps(), checkpoints.latest()


def start(
    rank: int, run: str, source: str | None, steps: list[int]
) -> tuple[int | None, str | None, float, list[int]]:
    """Restore, and save these steps; return what was restored, from where, and the steps of the run."""
    with holdfast.Checkpoints(run, start_from=source, asynchronous=False, job=JOB) as checkpoints:
        state = state_of(0, rank)
        report = checkpoints.restore_report(state)
        value = float(state["w"].tensor[0, 0])
        for step in steps:
            checkpoints.save(step, state_of(step, rank))
        if report is None:
            return None, None, value, checkpoints.steps()
        return report.step, report.path, value, checkpoints.steps()


def start_apart(rank: int, run: str, source: str) -> str:
    """Rank 0 does not know what the run starts from; return the error."""
    with holdfast.Checkpoints(run, start_from=source if rank else None, asynchronous=False, job=JOB) as made:
        try:
            return f"restored {made.restore(state_of(0, rank))}"
        except BadInput as error:
            return str(error)
