"""`holdfast diff`."""

from __future__ import annotations

import os

import click

from holdfast.cli import output
from holdfast.maintenance.diff import Compared, Content, compare


@click.command("diff")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--values", is_flag=True, help="Count the elements that differ, and by how much at most.")
@output.as_json
@click.pass_context
def command(ctx: click.Context, a: str, b: str, values: bool, as_json: bool) -> None:
    """Compare two checkpoints.

    Digests answer where both are cut alike; where they are not, data is read. Of a run folder the newest
    committed step is compared. Exit code 0: same, 1: different, 2: trouble, such as a data file that is
    missing.
    """
    found = compare(a, b, values)
    if as_json:
        output.print_json(found)
    else:
        # Of a run folder a step was chosen: said only where it is not the path that was given.
        for letter, given, path in (("A", a, found.a), ("B", b, found.b)):
            if os.path.abspath(given) != path:
                output.say(f"{letter} is {path}.")
        _show(found)
    ctx.exit(0 if found.same else 1)


def _show(found: Compared) -> None:
    read = f"{output.size(found.bytes_read)} of data read"
    if found.same:
        output.say(f"The same: {output.count(found.equal, 'name')}, {read}.")
        return
    rows: list[tuple[object, ...]] = [(name, "only in A", "") for name in found.only_a]
    rows += [(name, "only in B", "") for name in found.only_b]
    rows += [(item.name, "shape or dtype", f"{item.a} -> {item.b}") for item in found.changed]
    rows += [
        (item.name, "value" if item.kind == "object" else "content", _detail(item)) for item in found.content
    ]
    if rows:
        output.print_table(("name", "differs in", "how"), rows)
    for item in found.misplaced:
        output.say(
            f"{item.path} is a folder of step {item.folder_step}; its index is of step {item.index_step}."
        )
    output.say(f"Different: {output.count(len(rows), 'name')}; equal: {found.equal}; {read}.")


def _detail(item: Content) -> str:
    if item.kind == "object":
        return f"{item.a} -> {item.b}"
    text = f"{item.parts} of {output.count(item.of, 'part')}, the first at {list(item.first or ())}"
    if item.elements is not None:
        text += f"; {output.count(item.elements, 'element')}"
    if item.largest is not None:
        text += f", by up to {item.largest:.6g}"
    return text
