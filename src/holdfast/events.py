"""What happens, as it happens: one hook for logs, progress bars, timelines and tests.

A callback of `subscribe(callback)` gets every event of this process. It runs on the thread that emits; what
it raises is logged and otherwise ignored, because watching must not break a save.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

_log = logging.getLogger("holdfast")


class Event(msgspec.Struct, frozen=True):
    """One thing that happened. `at` is wall-clock seconds, for people; order is per thread."""

    name: str
    """`save.`, `load.` or `choice.`, then a phase from the protocol table (`save.writing`), or `raised` when
    the call raises. Also `load.rejected`, when a load passes over a damaged step; `save.staged`, when an
    asynchronous save has copied the state; `save.stale`, when no tensor of it has changed."""
    rank: int
    step: int | None
    path: str
    at: float
    fields: dict[str, Any]


Callback = Callable[[Event], None]
_callbacks: list[Callback] = []
_lock = threading.Lock()


_phases: list[str] = []


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what the program does inside, such as `"eval"`: roll calls tell it of each rank. Phases may be
    nested; the innermost is told."""
    _phases.append(name)
    try:
        yield
    finally:
        _phases.pop()


def phase_now() -> str:
    """Return the phase that the program is in; "" without one."""
    return _phases[-1] if _phases else ""


def subscribe(callback: Callback) -> Callable[[], None]:
    """Call `callback(event)` for every event; returns a function that ends it."""
    with _lock:
        _callbacks.append(callback)

    def unsubscribe() -> None:
        with _lock:
            if callback in _callbacks:
                _callbacks.remove(callback)

    return unsubscribe


def emit(name: str, *, rank: int = 0, step: int | None = None, path: str = "", **fields: object) -> None:
    """Send an event to all subscribers. Costs almost nothing when there is none."""
    # Checked before the event is made: each batch of bytes that moves emits one.
    if not _callbacks and not _log.isEnabledFor(logging.DEBUG):
        return
    event = Event(name, rank, step, path, time.time(), fields)
    _log.debug("%s rank=%d step=%s %s %s", name, rank, step, path, fields)
    for callback in tuple(_callbacks):  # one may unsubscribe itself
        try:
            callback(event)
        except Exception:
            _log.exception("An event callback raised on %s; the save or load goes on.", name)
