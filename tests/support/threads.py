"""Ranks as threads of this process, for checkpoints of several ranks in no time; a process that can start no
more; and a fork, which may change what belongs to a process."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from holdfast._core.base.threads import start_thread
from holdfast._core.roster.memory import Board, MemoryRoster
from holdfast.errors import HoldfastError

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


def in_a_fork(job: Callable[[], Any], seconds: int = 60) -> None:
    """Call `job` in a fork of this process, which has one thread; fails if it raises, or takes too long."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(seconds)
            job()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
