"""A bar on the terminal, for a save or load that the program waits in."""

from __future__ import annotations

import select
import shutil
import sys
import time
from contextlib import suppress

from holdfast._options import may_draw
from holdfast._values import printable, size_text

AFTER, EVERY, CELLS = 2.0, 0.2, 24
"""Seconds before it is drawn first, and between two times; its length."""
_CLEARED = "\r\x1b[K"
own = True
"""Whether this process may draw it: a command draws a bar of its own."""


class Bar:
    """A line of stderr that is written over as bytes move, and gone at the end; nothing without a terminal.

    title: what it is drawn for.
    """

    def __init__(self, title: str) -> None:
        self._title = printable(title)
        self._begun = time.monotonic()
        self._next, self._drawn = self._begun + AFTER, False
        self._stream = sys.stderr
        with suppress(AttributeError, ValueError):  # there is none, or it is closed
            if own and may_draw() and self._stream.isatty():
                return
        self._next = float("inf")

    def draw(self, done: int, total: int) -> None:
        """Draw it, if it is time for that."""
        now = time.monotonic()
        if now < self._next or not total:
            return
        self._next, self._drawn = now + EVERY, True
        share, speed = min(done / total, 1), done / max(now - self._begun, 1e-6)
        cells = round(share * CELLS)
        figures = f"{size_text(done)} of {size_text(total)}, {size_text(speed)}/s"
        line = f"[{'#' * cells}{'-' * (CELLS - cells)}] {share:4.0%}  {figures}  {self._title}"
        self._write(_CLEARED + line[: shutil.get_terminal_size().columns - 1])

    def clear(self) -> None:
        """Take it away for good."""
        self._next = float("inf")
        if self._drawn:
            self._write(_CLEARED)

    def _write(self, text: str) -> None:
        # A terminal that has gone raises; one that nobody reads, of a lost connection, would hold us up.
        with suppress(OSError, ValueError):
            room = select.poll()
            room.register(self._stream, select.POLLOUT)
            if room.poll(0):
                self._stream.write(text)
                self._stream.flush()
