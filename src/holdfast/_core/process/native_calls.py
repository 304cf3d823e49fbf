"""Calls into torch's C++ on Holdfast's own threads.

A thread that comes back from such a call while the interpreter is finalised aborts the process ("terminate
called without an active exception"): pybind11 takes the GIL in a destructor, and the interpreter ends the
thread there. So an exit handler waits for running calls, and for threads that are at their end and may still
free tensors, and refuses new calls. A call that is still running after `LONGEST` seconds is abandoned: it
usually waits for another host, and returns only after the process has ended.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast._core.base.threads import join_leaving

LONGEST = 1.0
"""Seconds that the end of a process waits for running calls, and then for threads that are at their end."""

_changed = threading.Condition()
_under_way = 0
_closed = False


@contextmanager
def native_call() -> Iterator[None]:
    """Wrap a call into torch's C++ that may run on another thread than the main thread. Raises RuntimeError
    once the exit handler has run."""
    global _under_way
    if threading.current_thread() is threading.main_thread():
        yield
        return
    with _changed:
        if _closed:
            raise RuntimeError("this process is at its end")
        _under_way += 1
    try:
        yield
    finally:
        with _changed:
            _under_way -= 1
            _changed.notify_all()


def _wait_for_calls() -> None:
    """Wait for running calls and for threads at their end, and refuse later calls. An `atexit` handler; it
    runs after all handlers that were registered after the import of this module."""
    global _closed
    with _changed:
        _closed = True
        _changed.wait_for(lambda: not _under_way, LONGEST)
    join_leaving(LONGEST)


def _forget() -> None:
    """Reset in a fork, which has none of its parent's threads."""
    global _changed, _under_way, _closed
    _changed, _under_way, _closed = threading.Condition(), 0, False


atexit.register(_wait_for_calls)
os.register_at_fork(after_in_child=_forget)
