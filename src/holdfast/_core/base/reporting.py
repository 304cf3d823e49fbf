"""Progress of conversions, and warnings that are logged once in a process."""

from __future__ import annotations

import logging
from functools import cache
from threading import Lock

from holdfast._core.base.values import ReportProgress

log = logging.getLogger("holdfast")


def quiet(done: int, total: int) -> None:
    """Report no progress: the default."""


class Meter:
    """Counts the bytes that are done, from several threads."""

    def __init__(self, progress: ReportProgress, total: int = 0) -> None:
        self._progress, self._lock = progress, Lock()
        self.done, self.total = 0, total

    def moved(self, size: int) -> None:
        with self._lock:
            self.done += size
            self._progress(self.done, self.total)


@cache
def warn_once(text: str) -> None:
    """Log a warning, unless the same one was logged before."""
    log.warning("%s", text)
