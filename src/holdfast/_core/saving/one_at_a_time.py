"""Wait for commits of this process that are publishing an index.

A Ctrl-C returns to the caller although storage may still be at work. The next save into that folder would
read the old version, and end in a Conflict with its own predecessor; so it waits first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast._core.base.deadline import Deadline
from holdfast.errors import DeadlineExceeded

LOOK = 0.1
"""Seconds between two checks whether the waiting save was cancelled."""
_under_way: dict[str, threading.Event] = {}


@contextmanager
def publishing(place: str) -> Iterator[None]:
    """Record that an index is being published."""
    ended = _under_way[place] = threading.Event()
    try:
        yield
    finally:
        ended.set()
        if _under_way.get(place) is ended:
            del _under_way[place]


def wait_for_publishing(place: str, title: str, deadline: Deadline, check: Callable[[], None]) -> None:
    """Wait until no earlier save of this process puts an index in place. check: raises if this one is given
    up. DeadlineExceeded if the earlier one does not end."""
    ended = _under_way.get(place)
    while ended is not None and not ended.wait(LOOK):
        check()
        if deadline.left() <= 0:
            raise DeadlineExceeded(
                f"{title}: an earlier save of this process, which was interrupted, still puts the index of "
                f"{place} in place: storage does not answer.",
                hint="Save into another folder, or start the process again once storage answers.",
            )
