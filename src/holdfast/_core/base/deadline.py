"""Deadlines and their clock. Every wait in Holdfast is bounded by one of them.

A `Deadline` is absolute if the caller gave a timeout; otherwise progress extends it. It reads a `Clock`, so
that a test turns an hour into a microsecond (`holdfast.testing.ManualClock`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from holdfast._core.base.values import given
from holdfast.errors import BadInput

TIMEOUT = 1800.0
"""Seconds without progress after which a call without `timeout` fails."""


class Clock(Protocol):
    """Monotonic seconds, sleeping, and the time of day (for messages to other hosts)."""

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
        raise BadInput(f"{name} must be a positive, finite number of seconds, not {given(value)}.")
    return float(value)


def check_wait(timeout: float | None) -> float | None:
    """Return a number of seconds to wait (0 and less: none), or None; BadInput for anything else."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout < 1e9:
        raise BadInput(f"timeout must be a finite number of seconds, or None, not {given(timeout)}.")
    return float(timeout)


@dataclass(frozen=True)
class Limits:
    """Timeouts of a call."""

    timeout: float | None = None
    """Seconds from the start of the call until it fails. None: it fails after `TIMEOUT` without progress."""
    stall_timeout: float | None = None
    """Seconds without progress after which even a live rank counts as failed; None: never."""
    report_after: float = 30.0
    """Seconds after which a wait is logged: for which ranks, for how long, and their stacks."""
    lost_after: float = 120.0
    """Seconds after which an unresponsive host counts as lost."""
    at_least: float = 0.0
    """Minimum timeout in seconds: the framework's own."""
    while_alive: bool = False
    """Whether the other ranks being alive counts as progress, which extends the deadline."""
    past_end: bool = False
    """Whether a rank whose program has ended, but whose process is alive, may still enter the call."""

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
    """The time by which a call returns. If it `moves`, it is `seconds` after the last progress."""

    def __init__(self, seconds: float, clock: Clock = REAL_CLOCK, moves: bool = False) -> None:
        self.seconds = check_seconds("timeout", seconds)
        self.clock, self.moves = clock, moves
        self.started = clock.now()
        self.at = self.started + self.seconds

    def note_progress(self) -> None:
        if self.moves:
            self.at = self.clock.now() + self.seconds

    def left(self) -> float:
        """Return the remaining seconds, at least 0."""
        return max(0.0, self.at - self.clock.now())

    def passed(self) -> bool:
        return self.clock.now() >= self.at

    def elapsed(self) -> float:
        return self.clock.now() - self.started

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (" without progress" if self.moves else "")
