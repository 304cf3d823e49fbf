"""Progress of conversions, and warnings that are logged once in a process."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("holdfast")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes of the whole."""
_warned: set[str] = set()


def quiet(done: int, total: int) -> None:
    """Report no progress: the default."""


def warn_once(text: str) -> None:
    """Log a warning, unless the same one was logged before."""
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
