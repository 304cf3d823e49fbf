"""Work on several threads, the caller's among them. No torch, no NumPy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
LAST_TASK = 1.0
"""Seconds that an interrupted call waits for its threads. A process must not end while one is in a call into
torch's C++ (`native_calls`)."""


def on_threads(threads: int, name: str, work: Callable[[T], R], tasks: Iterable[T]) -> list[R]:
    """Call `work` with each task, on up to `threads` threads; return the results in the order of the tasks.

    If a task fails, remaining tasks are not started, and one of the errors is raised. If the system refuses
    more threads, the existing ones do all the work. Not an executor of `concurrent.futures`: it refuses work
    after the main thread has ended, so an `atexit` handler could not save.
    """
    numbered, lock = enumerate(tasks), threading.Lock()
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def worker() -> None:
        try:
            while not errors:
                with lock:
                    found = next(numbered, None)
                if found is None:
                    return
                results[found[0]] = work(found[1])
        except BaseException as error:
            errors.append(error)

    def other(ended: threading.Event) -> None:
        worker()
        ended.set()

    ends = [threading.Event() for _ in range(threads - 1)]
    others = [threading.Thread(target=other, args=[end], name=name, daemon=True) for end in ends]
    with suppress(RuntimeError):  # a limit of threads is reached, or the interpreter starts no more of them
        for thread in others:
            thread.start()
    worker()
    begun = [(thread, end) for thread, end in zip(others, ends, strict=True) if thread.ident is not None]
    try:
        for thread, _ in begun:
            thread.join()  # no timeout: the protocol bounds the time of the whole call
    except BaseException as interrupt:  # Ctrl-C
        errors.append(interrupt)  # the others begin no further task
        last = time.monotonic() + LAST_TASK
        for _, end in begun:  # before Python 3.13 an interrupted join can't be repeated
            end.wait(max(0.0, last - time.monotonic()))
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
