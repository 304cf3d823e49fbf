"""Calls into torch's C++ on Holdfast's own threads.

A thread that comes back from such a call while the interpreter is finalised aborts the process ("terminate
called without an active exception"): pybind11 takes the GIL in a destructor, and the interpreter ends the
thread there. So the end of the process waits until none is under way, and lets none begin after that. If one
does not return, the interpreter is not finalised: the process ends with the exit code that it would have.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.exits import at_last

LONGEST = 1.0
"""Seconds that the end of the process waits for calls under way."""

_changed = threading.Condition()
_under_way = 0
_closed = False


@contextmanager
def native_call() -> Iterator[None]:
    """Wrap a call into torch's C++ that may be made beside the main thread. Raises RuntimeError once the
    process is at its very end."""
    if threading.current_thread() is threading.main_thread():
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _under_way
    at_last(_wait_for_calls)
    with _changed:
        if _closed:
            raise RuntimeError("this process is at its end")
        _under_way += 1


def _end() -> None:
    global _under_way
    with _changed:
        _under_way -= 1
        _changed.notify_all()


def _wait_for_calls() -> bool:
    """Wait for calls under way; return whether the interpreter can be finalised."""
    global _closed
    ends = time.monotonic() + LONGEST
    with _changed:
        _closed = True
        while _under_way and (left := ends - time.monotonic()) > 0:
            _changed.wait(left)
        return not _under_way


def _forget() -> None:
    """Reset in a fork, which has none of its parent's threads."""
    global _changed, _under_way, _closed
    _changed, _under_way, _closed = threading.Condition(), 0, False


os.register_at_fork(after_in_child=_forget)
