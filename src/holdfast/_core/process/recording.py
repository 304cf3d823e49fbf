"""The event log of one rank: a bounded file in the run folder, one JSON object a line.

Training never waits for it: events are queued in memory, and once a second the heart starts a thread that
writes them and exits, because storage may hang. A file above `LIMIT` is rotated; one older file is kept.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from holdfast._core.base.shared_folder import SharedFolder
from holdfast._core.base.threads import start_thread
from holdfast._core.base.values import Json, printable
from holdfast._core.process.exits import Stage, at_exit, not_at_exit
from holdfast._core.process.heart import heart
from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast")
EVENTS = "events"
"""The subfolder of a run folder with the event logs of all ranks."""
BEGUN, ENDED, LOST = "record.begun", "record.ended", "record.lost"
"""Names of the events that mark the start and the end of a recording, and lost events."""
LIMIT = 1 << 20
"""Maximum bytes of one file; a rank has two."""
QUEUED = 4096
"""Maximum number of queued events; later ones are dropped and counted."""
SHORT = 0.1
"""Phases shorter than this many seconds are not recorded, because a run has thousands of steps."""
LAST = 1.0
"""Seconds that `end` waits for the last lines to be written."""


class EventLine(msgspec.Struct, omit_defaults=True):
    """One line of the file."""

    name: str
    at: float
    step: int | None = None
    path: str = ""
    fields: dict[str, Json] = {}


class Recorder:
    """Records the events of this process. It is a duty of the heart."""

    interval = 1.0

    def __init__(self, folder: str, rank: int, world_size: int) -> None:
        self._run, self._folder = folder, os.path.join(folder, EVENTS)
        self._rank = rank
        self._queue: deque[EventLine] = deque()
        self._moved: EventLine | None = None
        """The latest progress event; it supersedes earlier ones."""
        self._lost = 0
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._has_failed = False
        who = {"world": world_size, "host": socket.gethostname(), "pid": os.getpid()}
        self._queue.append(EventLine(BEGUN, time.time(), fields=who))

    def begin(self, end: Callable[[], None]) -> None:
        """Start writing. end: the function that stops the recording; also called at process exit."""
        self._at_exit = end
        at_exit(Stage.THREADS, end)
        heart.begin(self)

    def note(self, name: str, at: float, step: int | None, path: str, fields: Mapping[str, object]) -> None:
        """Queue an event for writing."""
        line = EventLine(name, at, step, printable(path))
        if "bytes_done" in fields and name != "save.staged":
            line.fields = dict(fields)
            self._moved = line
            return
        line.fields = {key: _plain(value) for key, value in fields.items()}
        with self._lock:
            if name == "phase.left":
                last = self._queue[-1] if self._queue else None
                if (
                    last is not None
                    and last.name == "phase.entered"
                    and last.fields["phase"] == line.fields["phase"]
                ):
                    self._queue.pop()  # `phase.left` contains the duration
                    if line.fields["seconds"] < SHORT:
                        return
            if len(self._queue) >= QUEUED:
                self._lost += 1
            else:
                self._queue.append(line)

    def beat(self) -> None:
        if self._writer is None or not self._writer.is_alive():
            self._write()

    def end(self) -> None:
        """Write the remaining events, if storage answers within `LAST` seconds."""
        not_at_exit(self._at_exit)
        heart.end(self)
        with self._lock:
            self._queue.append(EventLine(ENDED, time.time()))
        ends = time.monotonic() + LAST
        with suppress(HoldfastError):  # no thread for it
            if self._writer is not None:
                self._writer.join(LAST)
            self.beat()
            if self._writer is not None:
                self._writer.join(max(ends - time.monotonic(), 0.0))

    def close(self) -> None:
        """Nothing to release: the file is closed after each write."""

    def _write(self) -> None:
        with self._lock:
            lines, self._queue = self._queue, deque()
            moved, self._moved = self._moved, None
            lost, self._lost = self._lost, 0
        if moved is not None:
            lines.append(moved)
        if lost:
            lines.append(EventLine(LOST, time.time(), fields={"events": lost}))
        if lines:
            data = msgspec.json.Encoder().encode_lines(sorted(lines, key=lambda line: line.at))
            self._writer = start_thread(lambda: self._append(data), "holdfast-events")

    def _append(self, data: bytes) -> None:
        name = f"rank-{self._rank}.jsonl"
        try:
            with SharedFolder(self._run, EVENTS, make=True, private=False) as folder:
                if folder.append(name, data) > LIMIT:
                    folder.rename(name, f"rank-{self._rank}.old.jsonl")
        except OSError as error:
            if not self._has_failed:
                log.warning("Events can't be recorded in %s: %s: %s.", self._folder, name, error.strerror)
            self._has_failed = True


def _plain(value: object) -> Json:
    """Convert a field of an event to short JSON."""
    if isinstance(value, float):
        return float(value)  # also of one of NumPy
    if isinstance(value, int) and abs(value) < 1 << 62:
        return int(value)
    if isinstance(value, list | tuple) and len(value) <= 64:
        return [_plain(one) for one in value if isinstance(one, int)]
    return printable(value)[:300]
