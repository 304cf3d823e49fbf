"""`holdfast export`."""

from __future__ import annotations

import click

from holdfast.cli import output


@click.command("export")
@click.argument("kind", type=click.Choice(["torch_dist"]))
@click.argument("source", type=click.Path())
@click.argument("out", type=click.Path())
@output.as_json
def command(kind: str, source: str, out: str, as_json: bool) -> None:
    """Convert a Holdfast checkpoint to one that torch DCP and megatron-core load.

    One process, one chunk in memory at a time. OUT must not exist, or be empty.
    """
    # It imports torch, which takes seconds: not for `--help`, and not where the arguments are wrong.
    from holdfast.integrations.torch_dist import export_torch_dist

    with output.progress(f"export {source}") as advance:
        written = export_torch_dist(source, out, progress=advance)
    if as_json:
        output.print_json({"path": out, "bytes_written": written})
    else:
        output.say(f"{out}: {output.size(written)}.")
