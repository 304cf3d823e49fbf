"""`holdfast same`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

import holdfast
from holdfast._core.base.values import size_text
from holdfast._tools.cli import output
from holdfast._tools.cli.progress import progress

if TYPE_CHECKING:
    from holdfast._models.equality.verdict import Same, Unlike


@click.command("same")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--where", is_flag=True, help="Count the elements that differ, and find the first.")
@click.option("--include", multiple=True, help="Compare names that match this pattern only. Repeatable.")
@click.option("--exclude", multiple=True, help="Do not compare names that match this pattern. Repeatable.")
@click.option("--adapter", type=click.Path(), help="Merge the adapter (LoRA) in this folder into B.")
@output.as_json
def command(
    a: str,
    b: str,
    where: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    adapter: str | None,
    as_json: bool,
) -> None:
    """Say whether two places hold the same weights.

    A place is a checkpoint of Holdfast, torch DCP or megatron-core in any layout, or the folder of a model
    that Hugging Face publishes. Where saves have noted fingerprints no data is read. Exit code 0: same, 1:
    different, 2: trouble. With --adapter, B is a published model, and a merge that was left out of A, or made
    twice, is told.
    """
    with progress(f"same {a} {b}") as advance:
        # By its public name, which is imported at its first use: it imports torch, and `--help` must not.
        comparison = holdfast.same(
            a,
            holdfast.huggingface.merged(b, adapter) if adapter else b,
            where=where,
            include=include or None,
            exclude=exclude or None,
            progress=lambda done: advance(done, done),
        )
    output.report(comparison, as_json, partial(_show, a, b), comparison.same)


def _show(a: str, b: str, comparison: Same) -> None:
    for place, prefix in comparison.prefixes():
        output.say(f"Names in {place} begin with {prefix!r}; they are compared and listed without it.")
    for dtype, number in comparison.compared_as().items():
        names = [name for name, other in comparison.converted.items() if other == dtype]
        output.say(f"Compared as {dtype}: {output.count(number, 'tensor')}, {output.listed(names, 3)}.")
    if comparison.rounded:
        rounded = [f"{name!r} to {dtype}" for name, dtype in comparison.rounded.items()]
        output.say(f"Rounded for this: {output.listed(rounded, 3)}.")
    if comparison.merge:
        output.say(f"{comparison.merge}.")
    if comparison.objects:
        output.say(
            f"Not compared: {output.count(len(comparison.objects), 'object')}, "
            f"{output.listed(comparison.objects, 3)}; holdfast diff compares them."
        )
    rows = [(one.name, "weights", _detail(one)) for one in comparison.different]
    read = f"{size_text(comparison.bytes_read)} of weights read"
    if not comparison.bytes_read:
        read = "by fingerprints, nothing read" if comparison.by_fingerprints else "no weights read"
    output.print_comparison((a, b), comparison, rows, "tensor", read)


def _detail(one: Unlike) -> str:
    how = [f"{one.a} -> {one.b}"] if one.a != one.b else []
    if one.elements is None and not how:
        how.append(f"elements of {one.a}")
    if one.elements is not None:
        how.append(f"{output.count(one.elements, 'element')}, the first at {list(one.first or ())}")
    return "; ".join(how)
