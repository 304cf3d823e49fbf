"""What the ranks of the group tests do; importable by spawned processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from holdfast.errors import HoldfastError
from holdfast.groups.open import open_groups
from holdfast.groups.warm_up import warm_up
from holdfast.layout.grid import Grid

LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2}


def open_and_use(rank: int, world: int, layout: dict[str, Any]) -> tuple[dict[str, list[int]], Any, Any]:
    """For each group what an all_gather of ranks finds; the first and second warm-up."""
    grid = Grid(world, **layout)
    groups = open_groups(grid, timeout=30)
    first = warm_up(groups, operations=("all_reduce", "all_to_all", "pairs"), timeout=30)
    second = warm_up(timeout=30)
    found = {}
    for name, group in groups.items():
        told = [torch.zeros(1, dtype=torch.int64) for _ in range(groups.size(name))]
        dist.all_gather(told, torch.tensor([rank]), group=group)
        found[name] = [int(value) for value in told]
        assert tuple(found[name]) == groups.ranks(name)
    return found, first, second


def misbehave(number: int, what: str) -> None:
    """This rank's `number`-th all_reduce is not what it should be."""
    real, calls = dist.all_reduce, 0

    def all_reduce(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if what == "hangs":
                time.sleep(3600)
            if what == "has no memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")
        return real(*args, **named)

    dist.all_reduce = all_reduce


def warm_with(
    rank: int, world: int, victim: int, what: str, timeout: float, stall: float
) -> tuple[str, float, int | None, list[int]]:
    """Open and warm up, with one rank that does something bad; what was raised, after how long, and who was named."""
    groups = open_groups(Grid(world, **LAYOUT), timeout=30)
    dist.barrier()
    begun = time.monotonic()
    if rank == victim:
        if what == "never comes":
            time.sleep(timeout + 1)
            return "", 0.0, None, []
        if what == "comes late":
            time.sleep(10)
        misbehave(3, what)
    try:
        warm_up(groups, timeout=timeout, stall_timeout=stall)
    except HoldfastError as error:
        took = time.monotonic() - begun
        return f"{type(error).__name__}: {error}", took, error.rank, [info.rank for info in error.missing]
    return "warm", time.monotonic() - begun, None, []


def another_layout(rank: int, world: int, victim: int, how: str) -> tuple[str, float]:
    layout = dict(LAYOUT)
    if rank == victim:
        if how == "grid":
            layout["ep"] = 1
        else:
            dist.new_group([rank])
    begun = time.monotonic()
    try:
        open_groups(Grid(world, **layout), timeout=10)
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "open", time.monotonic() - begun
