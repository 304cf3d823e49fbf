"""A terminal progress bar for blocking saves and loads.

rich renders it, but this module writes it: rich's own live display hides the cursor until it ends, which a
killed process never restores, and blocks on a terminal that nobody reads.
"""

from __future__ import annotations

import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast._core.base.options import may_draw
from holdfast._core.base.values import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

AFTER, EVERY = 2.0, 0.2
"""Seconds before the bar first appears, and between two updates."""
_CLEARED = "\r\x1b[K"
own = True
"""Whether this process may draw the bar; False in commands, which draw their own."""


def progress(console: Console, transient: bool = False) -> Progress:
    """Return the rich progress bar for a program or a command, still without a task. Imports rich."""
    # Imported here, because most saves finish before the bar appears, or have no terminal.
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
    """One line on stderr that is updated as bytes are transferred and erased at the end; nothing without a
    terminal.

    title: the text beside the bar.
    """

    def __init__(self, title: str) -> None:
        self._title = printable(title)
        self._begun = time.monotonic()
        self._next, self._drawn = self._begun + AFTER, False
        self._stream = sys.stderr
        with suppress(AttributeError, ValueError):  # no stderr, or it is closed
            if own and may_draw() and self._stream.isatty():
                return
        self._next = float("inf")

    def draw(self, done: int, total: int) -> None:
        """Update the bar if the last update is long enough ago. Arguments in bytes."""
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
        """Erase the bar for good."""
        self._next = float("inf")
        if self._drawn:
            self._write(_CLEARED)

    def _write(self, text: str) -> None:
        # A closed terminal raises; one that nobody reads (a lost ssh connection) would block.
        with suppress(OSError, ValueError):
            room = select.poll()
            room.register(self._stream, select.POLLOUT)
            if room.poll(0):
                self._stream.write(text)
                self._stream.flush()
