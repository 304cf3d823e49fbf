"""Run an action on all ranks in the same iteration of their loop, without a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast._core.protocol.call import Call
from holdfast._core.protocol.operation import agree
from holdfast.errors import HoldfastError


class StepConsensus:
    """Agree on one call index of `reached` on all ranks.

    Each rank learns at its own time that there is something to do, and calls `propose` on a background
    thread. It proposes the index of its next call of `reached`. The highest proposal is chosen, so no rank
    has passed it. A rank that waits in `reached` for the choice delays nobody: the other ranks propose from
    background threads.
    """

    def __init__(self, title: str, place: str, begin: Callable[[], Call]) -> None:
        """begin: creates the call in which the ranks agree; called when there is something to do."""
        self._title, self._place, self._begin = title, place, begin
        self._lock = threading.Lock()
        self._calls = 0
        self._announced = False
        self._decided = threading.Event()
        self._chosen = 0
        self._error: HoldfastError | None = None

    def propose(self) -> None:
        """Announce on a background thread that there is something to do. Returns when the call index is
        chosen."""
        # `reached` counts on another thread: it must see the announcement and the proposal together.
        with self._lock:
            self._announced, following = True, self._calls + 1
        try:
            chosen = agree(
                self._title, self._place, lambda indices: max(indices.values()), self._begin(), following
            )
            if not isinstance(chosen, int):
                raise HoldfastError(f"{self._title}: the ranks agreed on {chosen!r}, which is no number.")
            self._chosen = chosen
        # An exception on a background thread would get lost, so `reached` raises it.
        except Exception as error:
            self.fail(error)
        self._decided.set()

    def fail(self, error: Exception) -> None:
        """Make `reached` raise an error, because this rank can't receive announcements any more."""
        if not isinstance(error, HoldfastError):
            cause, error = error, HoldfastError(f"{self._title}: {type(error).__name__}: {error}")
            error.__cause__ = cause
        with self._lock:
            self._announced = True
        self._error = error
        self._decided.set()

    def reached(self) -> bool:
        """Return whether this call is the chosen one or a later one. Raises on all ranks if they could not
        agree."""
        with self._lock:
            self._calls += 1
            if not self._announced:
                return False
        # From the proposal on, each call waits here, so this rank can't pass the index that it has proposed.
        self._decided.wait()  # `propose` has a deadline
        if self._error is not None:
            raise self._error
        return self._calls >= self._chosen
