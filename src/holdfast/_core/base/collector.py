"""Pause Python's cyclic garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable cyclic garbage collection while many objects are created and none freed. The ten thousand rows
    of a plan would trigger it repeatedly, and with torch loaded each pass visits a million objects, which
    costs more than the planning."""
    # Already disabled by the user or an enclosing pause, which also enables it again.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
