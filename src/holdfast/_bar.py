"""A bar on the terminal, for a save or load that the program waits in. It is rich's.

rich draws it, and we write it: rich's own live display hides the cursor until its end, which a process that
is killed does not reach, and waits for a terminal that nobody reads.
"""

from __future__ import annotations

import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast._options import may_draw
from holdfast._values import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

AFTER, EVERY = 2.0, 0.2
"""Seconds before it is drawn first, and between two times."""
_CLEARED = "\r\x1b[K"
own = True
"""Whether this process may draw it: a command draws a bar of its own."""


def progress(console: Console, transient: bool = False) -> Progress:
    """Return the bar of a program, or of a command, whose only task has not begun. Imports rich."""
    # Imported here, because most saves are over before it is drawn, or have no terminal.
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    # The title is a path: it may look like markup, and is what a narrow terminal cuts.
    title = Column(ratio=1, no_wrap=True, overflow="crop")
    return Progress(
        BarColumn(24, table_column=Column(no_wrap=True)),
        TaskProgressColumn(show_speed=False, table_column=Column(no_wrap=True)),
        DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", markup=False, table_column=title),
        console=console,
        transient=transient,
        expand=True,
    )


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
        if not self._drawn:
            self._begin()
        self._next, self._drawn = now + EVERY, True
        self._progress.update(self._task, completed=min(done, total), total=total)
        with self._console.capture() as drawn:
            self._console.print(self._progress.get_renderable())
        self._write(_CLEARED + drawn.get().partition("\n")[0])  # one line, also if the terminal is narrow

    def _begin(self) -> None:
        from rich.console import Console

        self._console = Console(file=self._stream, force_jupyter=False)
        self._progress = progress(self._console)
        self._task = self._progress.add_task(self._title, total=None)
        self._progress.tasks[0].start_time = self._begun

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
