"""Initialise msgspec types on one thread at a time.

msgspec reads the annotations of a Struct at its first conversion or decoding, and caches partial results
where
other threads find them: two threads that first use a type at the same time crash with SIGSEGV (seen with
0.22). So every type is passed through `ready` before msgspec uses it.
"""

from __future__ import annotations

import os
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")
_ready: set[object] = set()
_lock = threading.Lock()
# Held during a fork, so that no child inherits a partly initialised type.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def ready(kind: type[T]) -> type[T]:
    """Return the type, initialised for use by `msgspec.convert` and decoders on any thread."""
    if kind not in _ready:
        with _lock:
            msgspec.json.Decoder(kind)  # reads all annotations, also those of the types in it
            _ready.add(kind)
    return kind
