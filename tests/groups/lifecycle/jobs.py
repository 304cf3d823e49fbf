"""What ranks do that open, warm up and close groups; importable by spawned processes."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

import holdfast
from holdfast import events
from holdfast._core.layout.grid import Grid
from holdfast._core.torch_private import known_groups
from holdfast._groups.lifecycle.device import Device
from holdfast._groups.lifecycle.open import open_groups
from holdfast._groups.lifecycle.warm_up import warm_up
from holdfast._groups.session.session import open_sessions
from holdfast.errors import HoldfastError

LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2, "ep": 2}


def open_and_use(rank: int, world: int, layout: dict[str, Any]) -> tuple[dict[str, list[int]], Any, Any]:
    """For each group what an all_gather of ranks finds; the first and second warm-up."""
    grid = Grid(world, **layout)
    groups = open_groups(grid, job=holdfast.Job(timeout=30))
    first = warm_up(groups, operations=("all_reduce", "all_to_all", "pairs"), job=holdfast.Job(timeout=30))
    second = warm_up(job=holdfast.Job(timeout=30))
    found = {}
    for name, group in groups.items():
        told = [torch.zeros(1, dtype=torch.int64) for _ in range(groups.size(name))]
        dist.all_gather(told, torch.tensor([rank]), group=group)
        found[name] = [int(value) for value in told]
        assert tuple(found[name]) == groups.ranks(name)
    return found, first, second


def open_and_close(rank: int, world: int, times: int) -> tuple[list[int], list[int], list[int]]:
    """Groups known to torch, descriptors and threads, after each of some rounds of opening, warming up, using
    and closing."""
    me = psutil.Process()
    known, files, threads = [], [], []
    for _ in range(times):
        groups = open_groups(Grid(world, **LAYOUT), job=holdfast.Job(timeout=30))
        warm_up(groups, job=holdfast.Job(timeout=30))
        for name, group in groups.items():
            told = torch.ones(1)
            dist.all_reduce(told, group=group)
            assert int(told) == groups.size(name)
        groups.close(timeout=30)
        assert groups.distinct() == [dist.group.WORLD]
        del groups, group
        known.append(len(known_groups()))
        files.append(me.num_fds())
        threads.append(me.num_threads())
    return known, files, threads


def closing_without(rank: int, world: int, victim: int) -> tuple[str, float]:
    """One rank does not come to the closing."""
    groups = open_groups(Grid(world, **LAYOUT), job=holdfast.Job(timeout=30))
    begun = time.monotonic()
    if rank == victim:
        return "", 0.0
    try:
        groups.close(timeout=2)
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "closed", 0.0


def other_histories(rank: int, ours: bool) -> tuple[str, float]:
    """Ranks 0 and 1 have made a group that ranks 2 and 3 have not; then ranks 1 and 2 want one."""
    if rank < 2:
        dist.new_group([0, 1], timeout=timedelta(seconds=20), use_local_synchronization=True)
    begun = time.monotonic()
    try:
        if ours:
            groups = open_groups(Grid(4, tp=4, etp=1, ep=2), names=["ep"], job=holdfast.Job(timeout=20))
            dist.all_reduce(torch.ones(1), group=groups["ep"])
        elif rank in (1, 2):
            dist.new_group([1, 2], timeout=timedelta(seconds=1.5), use_local_synchronization=True)
    except Exception as error:
        return type(error).__name__, time.monotonic() - begun
    return "met", time.monotonic() - begun


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
    """Open and warm up, with one rank that does something bad; what was raised, after how long, and who was
    named."""
    groups = open_groups(Grid(world, **LAYOUT), job=holdfast.Job(timeout=30))
    dist.barrier()
    begun = time.monotonic()
    if rank == victim:
        if what == "never comes":
            time.sleep(timeout + 1)
            return "", 0.0, None, []
        if what == "comes late":
            time.sleep(2)
        misbehave(3, what)
    try:
        warm_up(groups, job=holdfast.Job(timeout=timeout, stall_timeout=stall))
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
        open_groups(Grid(world, **layout), job=holdfast.Job(timeout=30))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "open", time.monotonic() - begun


def megatron_groups(
    rank: int, layout: dict[str, int], session: bool
) -> tuple[int, int, list[tuple[int, ...]], list[str]]:
    """Real initialize_model_parallel with the hook: groups that Megatron lists for this rank, those warmed
    up, and hazards."""
    from megatron.core import parallel_state

    reports: list[Any] = []
    stop = events.subscribe(lambda event: reports.append(event) if event.name == "groups.warmed" else None)
    holdfast.install(warm_up=True, session=session, job=holdfast.Job(timeout=60))
    try:
        parallel_state.initialize_model_parallel(**layout)
    finally:
        holdfast.uninstall()
        stop()
    assert [found.failure for found in open_sessions] == ([None] if session else [])
    listed = [group for group in parallel_state._global_process_group_list if group is not None]
    shared = [group for group in listed if group.size() > 1]
    names = {group.group_name for group in shared}
    warmed = {event.fields["group"] for event in reports}
    assert names <= warmed
    assert warmed - names == {dist.group.WORLD.group_name}
    return (
        len(listed),
        len(shared),
        [event.fields["ranks"] for event in reports],
        [found.kind for found in holdfast.audit()],
    )


def wrong_calls(rank: int) -> list[str]:
    """What calls that can't be honoured raise."""
    groups = open_groups(Grid(4, tp=2, cp=2), job=holdfast.Job(timeout=20))
    assert groups.size("dp") == 1
    assert groups.ranks("nothing") == ()
    assert "dp" not in groups
    said = []
    for call in (
        lambda: groups["dp"],
        lambda: groups["nothing"],
        lambda: open_groups(Grid(8, tp=2), job=holdfast.Job(timeout=20)),
        lambda: open_groups(Grid(4), names=["tensor"], job=holdfast.Job(timeout=20)),
        lambda: open_groups(Grid(4), job=holdfast.Job(timeout=0)),
        lambda: warm_up(groups, operations=["reduce"], job=holdfast.Job(timeout=20)),
        lambda: warm_up("some", job=holdfast.Job(timeout=20)),
        lambda: warm_up(groups, memory_budget=0, job=holdfast.Job(timeout=20)),
        lambda: warm_up(["tp"], job=holdfast.Job(timeout=20)),
        lambda: warm_up(groups["tp"], job=holdfast.Job(timeout=20)),
    ):
        dist.barrier()  # a rank that is late for a call must not come to the next one
        try:
            call()
            said.append("nothing")
        except HoldfastError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def other_operations(rank: int) -> str:
    groups = open_groups(Grid(4, tp=2), job=holdfast.Job(timeout=20))
    try:
        warm_up(
            groups, operations=["all_to_all"] if rank == 3 else ["all_reduce"], job=holdfast.Job(timeout=20)
        )
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "warm"


def short_of_memory(rank: int, free: int, budget: int) -> str:
    """Rank 2's GPU is said to have little memory; and every group to take 600 MiB."""
    groups = open_groups(Grid(4, tp=2), job=holdfast.Job(timeout=20))
    left = [free if rank == 2 else 64 << 30]
    real = dist.all_reduce

    def all_reduce(*args: Any, **named: Any) -> Any:
        left[0] -= 600 << 20
        return real(*args, **named)

    dist.all_reduce = all_reduce
    Device.free = lambda device: left[0]  # type: ignore[method-assign, assignment]
    try:
        warm_up(groups, memory_budget=budget, job=holdfast.Job(timeout=20))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "warm"


def listed_on_some(rank: int, lacks: int) -> str:
    groups = open_groups(Grid(4, tp=2), job=holdfast.Job(timeout=20))
    try:
        warm_up([groups["dp"]] if rank == lacks else groups, job=holdfast.Job(timeout=20))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "warm"


def a_grid_that_does_not_fit(rank: int) -> tuple[str, float]:
    begun = time.monotonic()
    try:
        open_groups(Grid(8 if rank == 2 else 4, tp=2), job=holdfast.Job(timeout=30))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "open", 0.0
