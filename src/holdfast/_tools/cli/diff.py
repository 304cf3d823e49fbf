"""`holdfast diff`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial

import click

import holdfast
from holdfast._core.base.values import size_text
from holdfast._tools.checkpoints.diff import Compared, Content, compare
from holdfast._tools.cli import output


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--values", is_flag=True, help="Count the elements that differ, and by how much at most.")
@output.as_json
def command(a: str, b: str, values: bool, as_json: bool) -> None:
    """Compare two checkpoints.

    Digests answer where both are cut alike; where they are not, data is read. Of a run folder the newest
    committed step is compared. Exit code 0: same, 1: different, 2: trouble, such as a data file that is
    missing, or if nothing differs but of some objects it can't be told.
    """
    with ExitStack() as stack:
        # It imports torch, so it is opened only if an object needs it.
        opened = cache(lambda url: stack.enter_context(holdfast.open(url)))
        comparison = compare(a, b, values, lambda store, name, data: opened(store.url).decoded(name, data))
    show = partial(_show, a, b)
    output.report(comparison, as_json, show, comparison.same or comparison.is_untold)
    if comparison.is_untold:
        click.get_current_context().exit(2)


def _show(a: str, b: str, comparison: Compared) -> None:
    rows = [(item.name, "shape or dtype", f"{item.a} -> {item.b}") for item in comparison.changed]
    rows += [
        (item.name, "value" if item.kind == "object" else "content", _detail(item))
        for item in comparison.content
    ]
    rows += [(item.name, "can't be told", f"{item.a} -> {item.b}") for item in comparison.untold]
    for moved in comparison.misplaced:
        output.say(
            f"{moved.path} is a folder of step {moved.folder_step}; its index is of step {moved.index_step}."
        )
    read = f"{size_text(comparison.bytes_read)} of data read"
    output.print_comparison((a, b), comparison, rows, "name", read, len(comparison.untold))


def _detail(item: Content) -> str:
    if item.kind == "object":
        return f"{item.a} -> {item.b}"
    text = f"{item.parts} of {output.count(item.of, 'part')}, the first at {list(item.first or ())}"
    if item.elements is not None:
        text += f"; {output.count(item.elements, 'element')}"
    if item.largest is not None:
        text += f", by up to {item.largest:.6g}"
    return text
