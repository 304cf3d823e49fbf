"""A registry of background work. The exit handlers wait for everything in it without knowing what it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Work(Protocol):
    """A piece of work that has a deadline of its own."""

    seen: bool
    """Whether the result or the error has been read."""

    def done(self) -> bool:
        """Return whether it has finished, with or without an error."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds; return whether it has."""

    def cancel(self) -> bool:
        """Cancel it on all ranks; return False if it had already finished."""

    def cancelled(self) -> bool:
        """Return whether it failed because some rank cancelled it."""

    def failure(self) -> BaseException | None:
        """Return its error, if it has ended with one."""


_lists: list[Callable[[], list[Work]]] = []


def lists_work(list_work: Callable[[], list[Work]]) -> None:
    """Register a function that lists pieces of work; `last_works` calls it."""
    _lists.append(list_work)


def last_works() -> list[Work]:
    """Return the most recent pieces of work of every registered source, running or finished."""
    return [work for list_work in _lists for work in list_work()]


def wait_for_works(timeout: float | None) -> list[Work]:
    """Wait up to `timeout` seconds (None: no limit) for all running work; return the pieces still running."""
    ends = None if timeout is None else time.monotonic() + timeout
    last = last_works()
    for work in last:
        # The result is ignored: whoever holds the work reads its error.
        work.wait(None if ends is None else max(0.0, ends - time.monotonic()))
    return [work for work in last if not work.done()]
