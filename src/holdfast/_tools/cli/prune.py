"""`holdfast prune`."""

from __future__ import annotations

import click

from holdfast._core.base.values import size_text
from holdfast._tools.checkpoints.prune import HOUR, Pruned, prune
from holdfast._tools.cli import output


@click.command("prune")
@click.argument("run", type=click.Path())
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help="Also remove committed steps but the newest KEEP, and the newest KEEP whole ones.",
)
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    default=HOUR,
    show_default=True,
    metavar="SECONDS",
    help="Leave a folder's left-overs alone if any of them is younger: a save may be running.",
)
@click.option("--dry-run", is_flag=True, help="List what would go; remove nothing.")
@output.as_json
def command(run: str, keep: int | None, older_than: float, dry_run: bool, as_json: bool) -> None:
    """Remove what failed saves left behind, and old steps.

    Left-overs are files that no index names. The newest committed step always stays.
    """
    output.report(prune(run, keep, older_than, dry_run), as_json, _show)


def _show(report: Pruned) -> None:
    rows = [(item.path, size_text(item.bytes), item.why) for item in report.removed]
    head = "would go" if report.dry_run else "removed"
    output.print_table((head, "size", "because"), rows, right=("size",))
    output.print_table(("left alone", "because"), [(item.path, item.why) for item in report.skipped])
    verb = "would be freed" if report.dry_run else "freed"
    output.say(
        f"{size_text(report.bytes_freed)} {verb}; {output.count(len(report.kept), 'committed step')} kept."
    )
    if report.note:
        output.say(report.note)
