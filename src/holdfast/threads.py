"""Threads of Holdfast's own: daemons with a name, waited for with a bound; one sentence where the system
allows no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import DeadlineExceeded, HoldfastError


def start_thread(work: Callable[[], object], name: str, rank: int | None = None) -> threading.Thread:
    """Start a daemon thread. HoldfastError if there can't be one more: the limit of processes is reached,
    memory is short, or the interpreter is about to end."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise HoldfastError(
            f"The thread {name!r} could not be started in this process, which has "
            f"{threading.active_count()}: {error}.",
            rank=rank,
            hint="Raise the limit of processes and threads (ulimit -u, pids.max of the container), or run "
            "fewer of them.",
        ) from error
    return thread


def within(seconds: float, doing: str, action: Callable[[], None]) -> None:
    """Do what may block for ever, storage mostly, on a thread of its own; DeadlineExceeded if it takes too
    long."""
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    start_thread(work, "holdfast-look").join(seconds)
    if not ended:
        raise DeadlineExceeded(
            f"{doing} took longer than {seconds:g} s: a call into storage does not return.",
            hint="A stack of its thread `holdfast-look` (py-spy, faulthandler) shows where it is.",
        )
    if ended[0] is not None:
        raise ended[0]
