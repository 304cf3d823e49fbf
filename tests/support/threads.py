"""Ranks as threads of this process, for checkpoints of several ranks in no time; and a process that can start
no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.roster.memory import Board, MemoryRoster
from holdfast.threads import start_thread

TOO_LARGE = 1 << 47
"""Bytes of stack that no thread can have: the system refuses to start one."""


def on_ranks(world: int, job: Callable[[MemoryRoster], Any], board: Board | None = None) -> list[Any]:
    """What `job(roster)` returns on each rank; the first error is raised."""
    shared = board or Board()
    with ThreadPoolExecutor(world) as pool:
        runs = [pool.submit(job, MemoryRoster(rank, world, shared)) for rank in range(world)]
    return [run.result() for run in runs]


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Python starts no thread in this process, as at a limit of processes; threads that Holdfast has kept for
    then are at work."""
    before = threading.stack_size(TOO_LARGE)
    over = threading.Event()
    spares: list[threading.Thread] = []
    try:
        with suppress(HoldfastError):
            while True:
                spares.append(start_thread(over.wait, "spare"))
        yield
    finally:
        threading.stack_size(before)
        over.set()
        for spare in spares:
            spare.join()
