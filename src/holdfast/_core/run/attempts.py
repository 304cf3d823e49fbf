"""The attempts of saves into a run folder, as the owner file lists them: what `prune` may delete where times
of files tell nothing (object stores).

An attempt is under way from before its committer's rank writes until it is known whether it was committed. If
it is known that it never will be, it is void, and what it has left may be deleted. What a job that was killed
had under way is void for the next owner, if that knows that the job's committer has ended: nobody else puts
its index in place. If the next owner does not know, it is doubtful.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

_MOST = 1000
"""Void, and doubtful, attempts that are listed; the newest."""


class Attempts:
    """The attempts that this process knows of, as owner of a run folder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Dicts as ordered sets.
        self._under_way: dict[str, None] = {}
        self._void: dict[str, None] = {}
        self._doubtful: dict[str, None] = {}

    def begin(self, attempt: str) -> bool:
        """Add an attempt; return whether it is new."""
        with self._lock:
            is_new = attempt not in self._under_way
            self._under_way[attempt] = None
            return is_new

    def end(self, attempt: str, committed: bool) -> None:
        with self._lock:
            self._under_way.pop(attempt, None)
            if not committed:
                self._void[attempt] = None

    def inherit(
        self, under_way: Iterable[str], void: Iterable[str], doubtful: Iterable[str], gone: bool
    ) -> None:
        """Take over what the owner before this one lists. gone: whether it is known to have ended."""
        with self._lock:
            left = [attempt for attempt in under_way if attempt not in self._under_way]
            self._void = dict.fromkeys((*void, *self._void, *(left if gone else ())))
            self._doubtful = dict.fromkeys((*doubtful, *self._doubtful, *(() if gone else left)))

    def noted(self) -> dict[str, tuple[str, ...]]:
        """Return the fields of the owner file."""
        with self._lock:
            return {
                "under_way": tuple(self._under_way),
                "void": tuple(self._void)[-_MOST:],
                "doubtful": tuple(self._doubtful)[-_MOST:],
            }

    def __bool__(self) -> bool:
        return any(self.noted().values())
