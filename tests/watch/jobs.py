"""Jobs of real ranks over gloo that hang in one way each; run by `ProcessWorld`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from tests.support.gil import hold_the_gil

TIMEOUT = 8.0
"""Seconds of the group's timeout: a call comes after half of it."""


class Told(logging.Handler):
    """Keeps what the library logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def has(self, words: str) -> bool:
        return any(words in text for text in self.texts)


def job(rank: int, folder: str, kind: str, seconds: float = TIMEOUT) -> dict[str, Any]:
    """Train some steps, then hang in one way; return what was told, and whether the last step came."""
    os.environ["HOLDFAST_ROLL_CALLS"] = folder
    told = Told()
    logging.getLogger("holdfast").addHandler(told)
    groups = [
        dist.new_group(timeout=timedelta(seconds=seconds), group_desc=name) for name in ("train", "other")
    ]
    holdfast.install("torch-dcp", guard=False)
    time.sleep(2)  # a rank that never showed itself can't be looked at by others
    try:
        for group in groups * 3:
            dist.all_reduce(torch.ones(4), group=group)
        came = True
        with events.phase("eval"):
            try:
                KINDS[kind](rank, groups, seconds)
            except RuntimeError:
                came = False
        # A rank that tells is not stopped before it has told, on a busy machine either.
        time.sleep(6)
        ends = time.monotonic() + 30
        while came and told.has("Roll call of") and not told.has("is over") and time.monotonic() < ends:
            time.sleep(0.1)
        return {"told": [text for text in told.texts if "oll call" in text], "came": came}
    finally:
        holdfast.uninstall()
        logging.getLogger("holdfast").removeHandler(told)


def late(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        compute(seconds * 0.85)
    dist.all_reduce(torch.ones(4), group=groups[0])


def compute(seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        step_of_work()
        another_step()


def step_of_work() -> None:
    time.sleep(0.07)


def another_step() -> None:
    time.sleep(0.05)


def asleep(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        time.sleep(seconds * 1.2)
    dist.all_reduce(torch.ones(4), group=groups[0])


def stopped(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4), group=groups[0])


def with_the_gil(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        hold_the_gil(seconds * 1.2)
    dist.all_reduce(torch.ones(4), group=groups[0])


def with_a_lock(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=seconds * 1.2)
    dist.all_reduce(torch.ones(4), group=groups[0])


def in_another_order(rank: int, groups: list[Any], seconds: float) -> None:
    for group in groups if rank == 1 else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group)


def another_operation(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(4), 0, group=groups[0])
        time.sleep(seconds)
    else:
        dist.all_reduce(torch.ones(4), group=groups[0])


def past_it(rank: int, groups: list[Any], seconds: float) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(4), group=groups[0])
    compute(seconds * 1.1)


def gone(rank: int, groups: list[Any], seconds: float) -> None:
    if rank == 1:
        os._exit(3)
    with contextlib.suppress(RuntimeError):  # gloo notices at once
        dist.all_reduce(torch.ones(4), group=groups[0])


def healthy(rank: int, groups: list[Any], seconds: float) -> None:
    ends = time.monotonic() + seconds
    while True:
        dist.all_reduce(torch.ones(4), group=groups[0])
        flag = torch.tensor(float(time.monotonic() < ends))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=groups[1])
        if not flag:
            return


KINDS = {
    kind.__name__: kind
    for kind in (
        late,
        asleep,
        stopped,
        with_the_gil,
        with_a_lock,
        in_another_order,
        another_operation,
        past_it,
        gone,
        healthy,
    )
}
