"""`holdfast explain`."""

from __future__ import annotations

import click

from holdfast._tools.checkpoints.explain import Explained, explain
from holdfast._tools.cli import output


@click.command("explain")
@click.argument("path", type=click.Path())
@click.argument("name")
@click.option("--box", metavar="0:4,10:20", help="What a reader of this part reads; one range an axis.")
@output.as_json
def command(path: str, name: str, box: str | None, as_json: bool) -> None:
    """Show where a tensor is stored, and what a reader of a part reads.

    PATH may be a run folder: then its newest committed step is looked at.
    """
    output.report(explain(path, name, box), as_json, _show)


def _show(report: Explained) -> None:
    output.say(f"{report.name}: {report.dtype or report.kind} {list(report.shape)}, in {report.path}")
    wanted = f"{output.box_text(report.offset, report.size)} is {report.bytes_wanted} bytes"
    output.say(f"  {wanted}; a reader reads {report.bytes_read} bytes, whole digest blocks.")
    rows = [
        (
            output.box_text(part.offset, part.shape),
            part.rank,
            part.file,
            output.listed([f"{low}-{high}" for low, high in part.ranges], 4),
            part.block,
            output.listed(part.digests, 2),
        )
        for part in report.parts
    ]
    output.print_table(("box", "rank", "file", "bytes", "block", "digests"), rows, right=("rank", "block"))
