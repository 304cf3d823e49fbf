"""Deadlines, stall timers, and the clock that they read. Every wait elsewhere counts against one of these.

A `Deadline` is absolute. A `StallTimer` is reset by progress: slow is not dead. Both read a
`Clock`, so that a test turns an hour into a microsecond (`holdfast.testing.ManualClock`).
"""

from __future__ import annotations

import time
from typing import Protocol

from holdfast.errors import BadInput


class Clock(Protocol):
    """Monotonic seconds, a way to sleep, and the time of day, to tell other hosts."""

    def now(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


REAL_CLOCK = RealClock()


def check_seconds(name: str, value: float) -> float:
    """Return a positive, finite number of seconds; BadInput for anything else."""
    # NaN compares as false with everything, so this form refuses it, too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise BadInput(f"{name} must be a positive, finite number of seconds, not {value!r}.")
    return float(value)


class Deadline:
    """A point in time by which a call returns."""

    def __init__(self, seconds: float, clock: Clock = REAL_CLOCK) -> None:
        self.seconds = check_seconds("timeout", seconds)
        self.clock = clock
        self.started = clock.now()
        self.at = self.started + self.seconds

    def left(self) -> float:
        """Return the seconds until it passes; never negative."""
        return max(0.0, self.at - self.clock.now())

    def passed(self) -> bool:
        return self.clock.now() >= self.at

    def elapsed(self) -> float:
        return self.clock.now() - self.started


class StallTimer:
    """Tells whether something has made progress within `seconds`. Any change of its mark is progress."""

    def __init__(self, seconds: float, clock: Clock = REAL_CLOCK) -> None:
        self.seconds = check_seconds("stall_timeout", seconds)
        self.clock = clock
        self.mark: object = None
        self.since = clock.now()

    def see(self, mark: object) -> None:
        """Note the present mark; one that differs from the last resets the timer."""
        # Different, not greater: a rank that begins its next call counts its bytes from 0 again.
        if mark != self.mark:
            self.mark = mark
            self.since = self.clock.now()

    def quiet_for(self) -> float:
        return self.clock.now() - self.since

    def stalled(self) -> bool:
        return self.quiet_for() >= self.seconds
