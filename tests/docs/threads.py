"""Ranks as threads of this process, for checkpoints of several ranks in no time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from holdfast.roster.memory import Board, MemoryRoster


def on_ranks(world: int, job: Callable[[MemoryRoster], Any], board: Board | None = None) -> list[Any]:
    """What `job(roster)` returns on each rank; the first error is raised."""
    shared = board or Board()
    with ThreadPoolExecutor(world) as pool:
        runs = [pool.submit(job, MemoryRoster(rank, world, shared)) for rank in range(world)]
    return [run.result() for run in runs]
