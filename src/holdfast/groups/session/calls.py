"""Is the body of a session between two calls? A worker of Ray serves the calls of whoever has made its actor.

Ray's loop is no code of the program: what is raised into it ends the worker before the answer of the last
call has reached anybody. Nor does it end because a session has; whoever has made the actor ends it.
"""

from __future__ import annotations

import sys
from types import FrameType

_LOOP = "ray._private.worker"
"""The module of Ray's loop, and of what it knows of this process."""
_CALL = "ray._private.function_manager"
"""Ray's own frame around a method of an actor: what is raised in it reaches the caller."""


def is_between_calls(thread: int) -> bool:
    """Is this a worker of Ray, and the thread of that number in no call of it now?"""
    worker = getattr(sys.modules.get(_LOOP), "global_worker", None)
    if worker is None or worker.mode != sys.modules[_LOOP].WORKER_MODE:
        return False
    entry = _entry(sys._current_frames().get(thread))
    return entry is None or (entry.startswith("ray.") and entry != _CALL)


def is_in_collective(thread: int) -> bool:
    """Is the thread of that number in a call of torch.distributed?"""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.distributed."):
            return True
        frame = frame.f_back
    return False


def _entry(frame: FrameType | None) -> str | None:
    """The module of the outermost code that Ray's loop has called; None if it has called nothing."""
    names: list[str] = []
    while frame is not None:
        names.append(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    if _LOOP in names:  # the main thread: its script and the loop are outside of every call
        outermost = len(names) - 1 - names[::-1].index(_LOOP)
        del names[outermost:]
    return names[-1] if names else None
