"""Serialize the calls of threads that share a run folder's object."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from holdfast._core.background.queue import SaveQueue


class Shared(Protocol):
    """An object whose calls are serialized."""

    _calls: threading.RLock
    """Held during a call."""
    _queue: SaveQueue


T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound=Shared)


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method wait for other threads in such methods of the same object; each of these calls is bounded
    by its own deadline."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # Without the lock in a fork, where it may be held by a thread of the parent; and in callbacks, which
        # run on Holdfast's threads, possibly on behalf of the call that holds it.
        ours = threading.current_thread().name.startswith("holdfast-")
        if ours or self._queue.is_of_another_process():
            return method(self, *args, **kwargs)
        with self._calls:
            return method(self, *args, **kwargs)

    return call
