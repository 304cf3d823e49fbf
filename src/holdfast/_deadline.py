"""Deadlines, stall timers, and the clock that they read. Every wait elsewhere counts against one of these.

A `Deadline` is absolute if the caller has given it, and otherwise moved by progress. A `StallTimer` is reset
by progress. Both read a `Clock`, so that a test turns an hour into a microsecond
(`holdfast.testing.ManualClock`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from holdfast.errors import BadInput

TIMEOUT = 1800.0
"""Seconds without progress after which a call fails that was given no `timeout`."""


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


@dataclass(frozen=True)
class Limits:
    """How long a call waits for other ranks."""

    timeout: float | None = None
    """Seconds from the begin of the call to its end. None: `TIMEOUT` without any progress."""
    stall_timeout: float | None = None
    """Seconds without progress after which even a rank that lives is given up; None: it is waited for."""
    report_after: float = 30.0
    """Seconds after which a wait is told: for whom, since when, and where that rank is."""
    lost_after: float = 120.0
    """Seconds after which a host that does not answer counts as gone."""
    at_least: float = 0.0
    """Seconds that the framework itself would wait: no deadline passes before."""
    while_alive: bool = False
    """Is it enough for a rank that is waited for to be alive?"""
    past_end: bool = False
    """Does a rank come as long as its process is there, although its program has ended?"""

    def __post_init__(self) -> None:
        for name in ("timeout", "stall_timeout"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))
        for name in ("report_after", "lost_after"):
            check_seconds(name, getattr(self, name))

    def deadline(self, clock: Clock = REAL_CLOCK) -> Deadline:
        """Start the deadline of a call that begins now."""
        seconds = TIMEOUT if self.timeout is None else self.timeout
        return Deadline(max(seconds, self.at_least), clock, moves=self.timeout is None)


class Deadline:
    """A point in time by which a call returns. If it `moves`, it is `seconds` after the last progress."""

    def __init__(self, seconds: float, clock: Clock = REAL_CLOCK, moves: bool = False) -> None:
        self.seconds = check_seconds("timeout", seconds)
        self.clock, self.moves = clock, moves
        self.started = clock.now()
        self.at = self.started + self.seconds

    def note_progress(self) -> None:
        if self.moves:
            self.at = self.clock.now() + self.seconds

    def left(self) -> float:
        """Return the seconds until it passes; never negative."""
        return max(0.0, self.at - self.clock.now())

    def passed(self) -> bool:
        return self.clock.now() >= self.at

    def elapsed(self) -> float:
        return self.clock.now() - self.started

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (" without progress" if self.moves else "")


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

    def forgive(self, seconds: float) -> None:
        """Do not count these seconds: whoever looks was away itself."""
        self.since += seconds

    def quiet_for(self) -> float:
        return self.clock.now() - self.since

    def stalled(self) -> bool:
        return self.quiet_for() >= self.seconds
