"""msgspec's types, made ready on one thread.

msgspec reads the annotations of a Struct when it first converts or decodes to it, and puts what it has read
so far where other threads find it: two threads that convert to one type for the first time end the process
by SIGSEGV (seen with 0.22). So every type goes through `ready` on its way to msgspec.
"""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_ready: set[object] = set()
_lock = threading.Lock()
# Held over a fork, so that none has a type of which another thread has read a part.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def ready(kind: type[T]) -> type[T]:
    """Return a type to which `msgspec.convert` and decoders can convert on any thread."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)  # reads all annotations, also those of the types in it
            _ready.add(kind)
    return kind
