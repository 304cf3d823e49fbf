"""Waiting for what other threads and processes do, and how long that may take on a busy machine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable

SLACK = 10.0
"""Seconds past its deadline that a call may take."""
AT_ONCE = 15.0
"""Seconds by which what needs no timeout is through. Tests that assert it set timeouts that are longer."""


def wait_until(true: Callable[[], object], seconds: float = 30.0) -> None:
    """Return as soon as a condition holds; fail if it does not within some seconds."""
    ends = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if true():
            return
        now = time.monotonic()
        assert now < ends, f"not within {seconds:g} s"
        # A costly look is not to take a core from those that it waits for. One that only waited itself, as for the
        # GIL, seems costly, too.
        time.sleep(min(max(0.01, 20 * (now - begun)), 0.5))


def wait_for_threads(before: Iterable[threading.Thread]) -> None:
    """Wait for the end of every thread of Holdfast's that was not there before."""
    known = set(before)
    wait_until(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread not in known and thread.name.startswith("holdfast")
            ]
        )
    )


def ended(text: str) -> bool:
    """Does it say that a killed process is gone? Until its parent has reaped it, the kernel tells how."""
    return re.search(r"its process (has ended|was killed by SIGKILL)", text) is not None
