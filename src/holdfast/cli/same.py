"""`holdfast same`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from holdfast.cli import output

if TYPE_CHECKING:
    from holdfast.maintenance.same import Same, Unlike


@click.command("same")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--where", is_flag=True, help="Find the boxes that differ.")
@click.option("--include", multiple=True, help="Compare names that match this pattern only. Repeatable.")
@click.option("--exclude", multiple=True, help="Do not compare names that match this pattern. Repeatable.")
@output.as_json
@click.pass_context
def command(
    ctx: click.Context,
    a: str,
    b: str,
    where: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say whether two places hold the same weights.

    A place is a checkpoint of Holdfast, torch DCP or megatron-core in any layout, or the folder of a model
    that Hugging Face publishes. Where saves have noted fingerprints no data is read. Exit code 0: same, 1:
    different, 2: trouble.
    """
    # It imports torch: see `import`.
    from holdfast.maintenance.same import same

    with output.progress(f"same {a} {b}") as advance:
        done = 0

        def read(moved: int) -> None:
            nonlocal done
            done += moved
            advance(done, done)

        found = same(a, b, where=where, include=include or None, exclude=exclude or None, progress=read)
    if as_json:
        output.print_json(found)
    else:
        # Of a run folder a step was chosen: said only where it is not the path that was given.
        for letter, given, path in (("A", a, found.a), ("B", b, found.b)):
            if os.path.abspath(given) != path:
                output.say(f"{letter} is {path}.")
        _show(found)
    ctx.exit(0 if found.same else 1)


def _show(found: Same) -> None:
    read = f"{output.size(found.bytes_read)} of weights read"
    if not found.bytes_read:
        read = "by fingerprints, nothing read"
    rows: list[tuple[object, ...]] = [(name, "only in A", "") for name in found.only_a]
    rows += [(name, "only in B", "") for name in found.only_b]
    rows += [(one.name, "different", _detail(one)) for one in found.different]
    if rows:
        output.print_table(("name", "is", "how"), rows)
    if found.converted:
        output.say(
            f"{output.count(len(found.converted), 'tensor')} of another dtype in A, compared in the "
            f"less exact one: {output.listed(found.converted, 3)}."
        )
    if found.same:
        output.say(f"The same: {output.count(found.equal, 'tensor')}, {read}.")
    else:
        output.say(f"Different: {len(rows)}; equal: {found.equal}; {read}.")


def _detail(one: Unlike) -> str:
    if not one.boxes:
        return "" if one.a == one.b else f"{one.a} -> {one.b}"
    return "at " + output.listed([output.box_text(offset, shape) for offset, shape in one.boxes], 5)
