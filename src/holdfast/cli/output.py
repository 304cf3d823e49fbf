"""How commands speak: JSON, tables, sizes, times and a progress bar. rich is imported when needed.

Names in a checkpoint are somebody's data: they are printed without markup and without control
characters, so that looking at a file can't do anything to a terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
WIDE = 10_000
"""Columns of a table that goes to a file or pipe: nothing is cut or wrapped there."""


def printable(value: object) -> str:
    """Text without control characters."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def complain(sentence: str) -> None:
    """One line on stderr."""
    click.echo(f"holdfast: {printable(sentence)}", err=True)


def say(sentence: str) -> None:
    click.echo(printable(sentence))


def print_json(value: object) -> None:
    """A library value as one JSON document."""
    import json

    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    # Half of a surrogate pair in a name, say, which only JSON's escapes can write.
    except (ValueError, OverflowError):
        text = json.dumps(msgspec.to_builtins(value), indent=2)
    click.echo(text)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()) -> None:
    """A plain table; the columns in `right` are aligned right."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # A Text, since rich would take `[bold]` in a name for markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    # rich takes 80 columns for what is no terminal, and would wrap names there.
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False).print(table)


def size(nbytes: int) -> str:
    """`1.5 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def when(seconds: float | None) -> str:
    """Local time."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def count(number: int, word: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listed(values: Sequence[object], most: int = 8) -> str:
    """`0, 1, 2, and 5 more`."""
    more = f", and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def box_text(offset: Sequence[int], shape: Sequence[int]) -> str:
    """`0:4,10:20`, as `--box` takes it; a tensor without axes has none."""
    return ",".join(f"{low}:{low + length}" for low, length in zip(offset, shape, strict=True)) or "all"


def spans(ranges: Sequence[tuple[int, int]], most: int = 4) -> str:
    """`0-10, 20-30`."""
    return listed([f"{low}-{high}" for low, high in ranges], most)


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that is told (done, total) bytes; silent where stderr is no terminal."""
    import sys

    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    shown = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
