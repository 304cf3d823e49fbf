"""The same call on all ranks, without a collective: ranks do a thing at one and the same turn of their
loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.errors import HoldfastError
from holdfast.protocol.call import Call
from holdfast.protocol.operation import agree


class StepConsensus:
    """Choose one call index of `reached` that all ranks share.

    Each rank hears at its own moment that there is something to do (`propose`, on a background thread) and
    says which of its calls comes next; the latest of these is the one. No rank has passed it, and a rank that
    waits in `reached` to be told which it is holds nobody up, because the others answer from their background
    threads.
    """

    def __init__(self, title: str, place: str, begin: Callable[[], Call]) -> None:
        """begin: makes the call in which the ranks agree, once there is something to do."""
        self._title, self._place, self._begin = title, place, begin
        self._lock = threading.Lock()
        self._calls = 0
        self._announced = False
        self._told = threading.Event()
        self._chosen = 0
        self._error: HoldfastError | None = None

    def propose(self) -> None:
        """On a background thread: there is something to do. Returns once the call is chosen."""
        # `reached` counts on another thread: the number must be of before or after, not between.
        with self._lock:
            self._announced, following = True, self._calls + 1
        try:
            self._chosen = agree(
                self._title, self._place, lambda said: max(said.values()), self._begin(), following
            )
        # `reached` raises it: nobody hears of an exception on this background thread.
        except HoldfastError as error:
            self._error = error
        finally:
            self._told.set()

    def reached(self) -> bool:
        """Is this the call, or a later one? Raises if the ranks could not agree; then all of them do."""
        with self._lock:
            self._calls += 1
            if not self._announced:
                return False
        # After `propose` has fixed this rank's number, each call waits here. So the rank can't pass that
        # number.
        self._told.wait()  # as long as `propose` takes, which has a deadline
        if self._error is not None:
            raise self._error
        return self._calls >= self._chosen
