"""Find out whether a thread is between two calls to an actor of Ray.

A worker of Ray runs a loop that serves calls to its actor. An exception that is raised into this loop ends
the worker before the result of the last call has reached the caller. Nor does the loop end with a session:
the program that has made the actor ends it.
"""

from __future__ import annotations

import sys
from types import FrameType

_LOOP = "ray._private.worker"
"""The module of Ray's loop, which also has its state of this process."""
_CALL = "ray._private.function_manager"
"""The module of Ray's frame around a method of an actor: an exception raised in it reaches the caller."""


def is_between_calls(thread: int) -> bool:
    """Return whether this is a worker of Ray, and the thread with this id is in no call."""
    worker = getattr(sys.modules.get(_LOOP), "global_worker", None)
    if worker is None or worker.mode != sys.modules[_LOOP].WORKER_MODE:
        return False
    entry = _entry(sys._current_frames().get(thread))
    return entry is None or (entry.startswith("ray.") and entry != _CALL)


def _entry(frame: FrameType | None) -> str | None:
    """Return the module of the outermost function that Ray's loop has called, or None."""
    names: list[str] = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    if _LOOP in names:  # the main thread: drop its script and Ray's loop
        outermost = len(names) - 1 - names[::-1].index(_LOOP)
        del names[outermost:]
    return names[-1] if names else None
