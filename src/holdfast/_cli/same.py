"""`holdfast same`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from holdfast._cli import output
from holdfast._values import size_text

if TYPE_CHECKING:
    from holdfast._maintenance.same import Same, Unlike


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
    # Imported here, because it imports torch, and `--help` must not.
    from holdfast._maintenance.same import same

    with output.progress(f"same {a} {b}") as advance:
        done = 0

        def read(moved: int) -> None:
            nonlocal done
            done += moved
            advance(done, done)

        comparison = same(a, b, where=where, include=include or None, exclude=exclude or None, progress=read)
    if as_json:
        output.print_json(comparison)
    else:
        output.say_chosen("A", a, comparison.a)
        output.say_chosen("B", b, comparison.b)
        _show(comparison)
    ctx.exit(0 if comparison.same else 1)


def _show(comparison: Same) -> None:
    read = f"{size_text(comparison.bytes_read)} of weights read"
    if not comparison.bytes_read:
        read = "by fingerprints, nothing read"
    rows: list[tuple[object, ...]] = [(name, "only in A", "") for name in comparison.only_a]
    rows += [(name, "only in B", "") for name in comparison.only_b]
    rows += [(one.name, "different", _detail(one)) for one in comparison.different]
    if rows:
        output.print_table(("name", "is", "how"), rows)
    if comparison.converted:
        output.say(
            f"{output.count(len(comparison.converted), 'tensor')} of another dtype in A, compared in the "
            f"less exact one: {output.listed(comparison.converted, 3)}."
        )
    if comparison.rounded:
        rounded = [f"{name!r} to {dtype}" for name, dtype in comparison.rounded.items()]
        output.say(f"Rounded for this: {output.listed(rounded, 3)}.")
    if comparison.same:
        output.say(f"The same: {output.count(comparison.equal, 'tensor')}, {read}.")
    else:
        output.say(f"Different: {len(rows)}; equal: {comparison.equal}; {read}.")


def _detail(one: Unlike) -> str:
    if not one.boxes:
        return "" if one.a == one.b else f"{one.a} -> {one.b}"
    return "at " + output.listed([output.box_text(offset, shape) for offset, shape in one.boxes], 5)
