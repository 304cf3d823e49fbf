"""A clock that only a test advances: an hour takes a microsecond, and every run is the same."""

from __future__ import annotations

import threading


class ManualClock:
    """A `holdfast._core.base.deadline.Clock`. `sleep` advances it at once; tests call `advance`.

    >>> clock = ManualClock()
    >>> deadline = Deadline(3600, clock)
    >>> clock.advance(3600)
    >>> deadline.passed()
    True
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._lock = threading.Lock()
        self.slept: list[float] = []
        """The arguments of all `sleep` calls, in seconds, in order."""

    def now(self) -> float:
        # The code under test may read the clock on another thread while the test moves it.
        with self._lock:
            return self._now

    def wall(self) -> float:
        return self.now()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass; it never goes back."""
        if seconds < 0:
            raise ValueError(f"Time does not go back: advance({seconds}).")
        with self._lock:
            self._now += seconds
