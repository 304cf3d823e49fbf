"""Work of this process in the background, which its end waits for: known here to those who end it, and not
know what it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Work(Protocol):
    """A piece of work that has a deadline of its own."""

    seen: bool
    """Has anybody seen how it ended?"""

    def done(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds; return whether it has."""

    def cancel(self) -> bool:
        """Give it up, on all ranks; return whether it had not ended yet."""

    def cancelled(self) -> bool:
        """Return whether it has failed, and was given up on some rank."""

    def failure(self) -> BaseException | None:
        """Return its error, if it has ended with one."""


_lists: list[Callable[[], list[Work]]] = []


def lists_work(list_work: Callable[[], list[Work]]) -> None:
    """Have `last_works` call `list_work`, too."""
    _lists.append(list_work)


def last_works() -> list[Work]:
    """Return the last pieces of work of this process, under way or not."""
    return [work for list_work in _lists for work in list_work()]


def wait_for_works(timeout: float | None) -> list[Work]:
    """Wait for the work under way in this process, by default to its end; return what is not done by then."""
    ends = None if timeout is None else time.monotonic() + timeout
    last = last_works()
    for work in last:
        # Its holder learns how it ended.
        work.wait(None if ends is None else max(0.0, ends - time.monotonic()))
    return [work for work in last if not work.done()]
