"""The progress bar of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast._core.base import bar
from holdfast._core.base.values import printable


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr (nothing without a terminal); yield a function that takes (done, total) bytes."""
    bar.own = False
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console

    with bar.progress(Console(stderr=True), transient=True) as shown:
        task = shown.add_task(printable(title), total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
