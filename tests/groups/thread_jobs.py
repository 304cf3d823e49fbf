"""What ranks do of which one can start no more threads; importable by spawned processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast._groups.lifecycle.open import open_groups
from holdfast.errors import HoldfastError
from tests.support.threads import TOO_LARGE

STALL = 20.0


def _timed(work: Callable[[], object]) -> tuple[str, float]:
    """What was raised, and after how many seconds."""
    begun = time.monotonic()
    try:
        work()
    except (HoldfastError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    finally:
        threading.stack_size(0)
    return "nothing", time.monotonic() - begun


def _no_threads_from(phase: str) -> Callable[[], None]:
    """None from an event of this process on."""
    return events.subscribe(
        lambda event: threading.stack_size(TOO_LARGE) if event.name == f"groups.{phase}" else None
    )


def its_part(rank: int, victim: int) -> tuple[str, float]:
    """The thread on which it does its part of an opening can't be started."""
    stop = _no_threads_from("acting") if rank == victim else lambda: None
    try:
        return _timed(
            lambda: open_groups(holdfast.Grid(3, tp=3), job=holdfast.Job(timeout=60, stall_timeout=STALL))
        )
    finally:
        stop()


def its_watch(rank: int, victim: int) -> tuple[str, float]:
    """The threads of its session can't be started."""

    def body() -> None:
        with holdfast.session(job=holdfast.Job(timeout=60, stall_timeout=STALL), grace=3):
            _train_until_it_ends()

    stop = _no_threads_from("done") if rank == victim else lambda: None
    try:
        return _timed(body)
    finally:
        stop()


def its_end(rank: int, victim: int) -> tuple[str, float]:
    """It fails when it can start no thread any more."""

    def body() -> None:
        with holdfast.session(job=holdfast.Job(timeout=60, stall_timeout=STALL), grace=3):
            dist.all_reduce(torch.ones(1))
            if rank == victim:
                threading.stack_size(TOO_LARGE)
                raise ValueError("the loss of rank 1 is not a number")
            _train_until_it_ends()

    return _timed(body)


def _train_until_it_ends() -> None:
    for _ in range(round(3 * STALL / 0.05)):
        time.sleep(0.05)


HOW = {"its part": its_part, "its watch": its_watch, "its end": its_end}
SAID = {
    "its part": "'holdfast-groups' could not be started",
    "its watch": "'holdfast-heart' could not be started",
    "its end": "the loss of rank 1 is not a number",
}
