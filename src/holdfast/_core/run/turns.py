"""Threads that share a run folder's object take turns: a call of one waits for that of another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from holdfast._core.background.queue import SaveQueue


class Shared(Protocol):
    """An object whose calls take turns."""

    _calls: threading.RLock
    """Held by a call."""
    _queue: SaveQueue


T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound=Shared)


def one_at_a_time(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method wait for other threads that are in such methods of the same object. Each of them ends by
    its own deadline."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        # The thread that holds the lock may be one of the parent's; and a callback, which runs on a thread of
        # Holdfast's, may be called by the very call that holds it.
        ours = threading.current_thread().name.startswith("holdfast-")
        if ours or self._queue.is_of_another_process():
            return method(self, *args, **kwargs)
        with self._calls:
            return method(self, *args, **kwargs)

    return call
