"""`holdfast import`."""

from __future__ import annotations

import click

from holdfast.cli import output


@click.command("import")
@click.argument("kind", type=click.Choice(["torch_dist"]))
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--step", type=click.IntRange(min=0), help="The step to note in the new checkpoint.")
@output.as_json
def command(kind: str, source: str, out: str, step: int | None, as_json: bool) -> None:
    """Convert a torch DCP or megatron-core checkpoint to Holdfast.

    SOURCE is the folder that has its .metadata; OUT must not exist, or be empty. One process, one chunk in
    memory at a time. Nothing in it is executed; its CRCs are checked.
    """
    # It imports torch, as in `export`.
    from holdfast.integrations.torch_dist import import_torch_dist

    with output.progress(f"import {source}") as advance:
        report = import_torch_dist(source, out, step=step, progress=advance)
    if as_json:
        output.print_json(report)
    else:
        output.say(
            f"{report.path}: {output.count(report.tensors, 'name')}, {output.size(report.bytes_written)} "
            f"in {report.seconds:.1f} s."
        )
