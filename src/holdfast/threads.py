"""Threads of our own: started with an error that can be told, and waited for with a bound."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import DeadlineExceeded, HoldfastError


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises HoldfastError if the system has none left, so that the other ranks can be told."""
    try:
        thread.start()
    except RuntimeError as error:
        raise HoldfastError(
            f"The thread {thread.name!r} could not be started: {error}.",
            hint="The limit on processes of this user or container is reached (ulimit -u, pids.max).",
        ) from error


def within(seconds: float, doing: str, action: Callable[[], None]) -> None:
    """Do what may block for ever, storage mostly, on a thread of its own; DeadlineExceeded if it takes too long."""
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=work, name="holdfast-look", daemon=True)
    start_thread(thread)
    thread.join(seconds)
    if not ended:
        raise DeadlineExceeded(
            f"{doing} took longer than {seconds:g} s: a call into storage does not return.",
            hint="A stack of its thread `holdfast-look` (py-spy, faulthandler) shows where it is.",
        )
    if ended[0] is not None:
        raise ended[0]
