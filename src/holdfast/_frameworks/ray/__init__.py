"""Detects whether a thread is between two calls to a Ray actor.

A Ray worker runs a loop that serves calls to its actor. An exception raised into this loop ends the worker
before the result of the last call has reached the caller. The loop does not end with a session either: the
program that created the actor ends it.
"""

from __future__ import annotations

import sys
from types import FrameType

_LOOP = "ray._private.worker"
"""The module of Ray's loop, which also has Ray's state in this process."""
_CALL = "ray._private.function_manager"
"""The module of Ray's frame around a method of an actor: an exception raised in it reaches the caller."""


def is_between_calls(thread: int) -> bool:
    """Return whether this process is a Ray worker, and the thread with this ID is not in a call."""
    worker = getattr(sys.modules.get(_LOOP), "global_worker", None)
    if worker is None or worker.mode != sys.modules[_LOOP].WORKER_MODE:
        return False
    entry = _entry(sys._current_frames().get(thread))
    return entry is None or (entry.startswith("ray.") and entry != _CALL)


def _entry(frame: FrameType | None) -> str | None:
    """Return the module of the outermost function called by Ray's loop, or None."""
    names: list[str] = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    if _LOOP in names:  # the main thread: drop its script and Ray's loop
        outermost = len(names) - 1 - names[::-1].index(_LOOP)
        del names[outermost:]
    return names[-1] if names else None
