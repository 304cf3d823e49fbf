"""Python's cyclic garbage collector, kept off for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic garbage collection while much is built and nothing let go: ten thousand rows of a plan set it
    off again and again, and with torch loaded each pass walks a million objects, which costs more than the
    planning."""
    # Off already, by the user or by a pause around this one: whoever turned it off turns it on.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
