"""Work on several threads, the caller's among them. No torch, no NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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

    others = [threading.Thread(target=worker, name=name, daemon=True) for _ in range(threads - 1)]
    with suppress(RuntimeError):  # a limit of threads is reached, or the interpreter starts no more of them
        for other in others:
            other.start()
    worker()
    for other in others:
        if other.ident is not None:
            other.join()  # no timeout: the protocol bounds the time of the whole call
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
