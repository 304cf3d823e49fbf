"""Output of commands: JSON, tables, sizes and times.

Names in a checkpoint are untrusted data. They are printed without markup and control characters, so that
they can't manipulate the terminal.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from holdfast._core.base.values import printable
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast._models.equality.verdict import Same
    from holdfast._tools.checkpoints.diff import Compared

Report = TypeVar("Report")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def complain(sentence: str) -> None:
    click.echo(f"holdfast: {printable(sentence)}", err=True)


def is_told(error: Exception) -> bool:
    """Print an error as one sentence, if it is the library's, or about an output that can't be written."""
    if isinstance(error, HoldfastError):
        complain(str(error))
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        complain(f"The output could not be written: {error}")
        return True
    return False


def say(sentence: str) -> None:
    click.echo(printable(sentence))


def report(value: Report, as_json: bool, show: Callable[[Report], None], passed: bool = True) -> None:
    """Print the result of a command, as JSON or with `show`. Exit with code 1 if `passed` is false."""
    if as_json:
        print_json(value)
    else:
        show(value)
    if not passed:
        click.get_current_context().exit(1)


def print_json(value: object) -> None:
    import json

    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    # For example a lone surrogate in a name: only the standard library's encoder can escape it.
    except (ValueError, OverflowError):
        text = json.dumps(msgspec.to_builtins(value), indent=2)
    click.echo(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> None:
    """Print a plain table, or nothing if it has no rows; the columns in `right` are aligned right."""
    for line in table_lines(columns, rows, right):
        click.echo(line)


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a plain table; none if it has no rows."""
    if not rows:
        return []
    # By hand: importing rich for it takes as long as half of NumPy.
    cells = [[printable(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def print_comparison(
    given: tuple[str, str],
    found: Compared | Same,
    differ: Sequence[tuple[str, str, str]],
    word: str,
    read: str,
    untold: int = 0,
) -> None:
    """Print the result of a comparison. differ: table rows of names that are in both places and differ; word:
    the noun for a name; read: text about the amount of data read; untold: how many of the rows are of names
    of which it can't be told whether they differ."""
    for letter, place, path in zip("AB", given, (found.a, found.b), strict=True):
        # For a run folder, name the chosen step.
        if os.path.abspath(place) != path:
            say(f"{letter} is {path}.")
    rows = [(name, "only in A", "") for name in found.only_a]
    rows += [(name, "only in B", "") for name in found.only_b]
    rows += differ
    print_table(("name", "differs in", "how"), rows)
    if found.same:
        say(f"The same: {count(found.equal, word)}, {read}.")
    else:
        different = len(rows) - untold
        parts = [f"different: {count(different, word)}"] if different else []
        parts += [f"can't be told: {count(untold, word)}"] if untold else []
        say(f"{'; '.join(parts).capitalize()}; equal: {found.equal}; {read}.")


def count(number: int, word: str) -> str:
    """Format a number of things as `1 file` or `2 files`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listed(values: Sequence[object], most: int = 8) -> str:
    """Format values as `0, 1, 2, and 5 more`."""
    more = f", and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more


def box_text(offset: Sequence[int], shape: Sequence[int]) -> str:
    """Format a box as `0:4,10:20`, as `--box` takes it; `all` for a tensor without axes."""
    return ",".join(f"{low}:{low + length}" for low, length in zip(offset, shape, strict=True)) or "all"
