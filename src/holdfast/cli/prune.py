"""`holdfast prune`."""

from __future__ import annotations

import click

from holdfast.cli import output
from holdfast.maintenance.prune import HOUR, Pruned, prune


@click.command("prune")
@click.argument("run", type=click.Path())
@click.option("--keep", type=click.IntRange(min=1), help="Also remove committed steps but the newest KEEP.")
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
    found = prune(run, keep, older_than, dry_run)
    if as_json:
        output.print_json(found)
    else:
        _show(found)


def _show(found: Pruned) -> None:
    if found.removed:
        rows = [(item.path, output.size(item.bytes), item.why) for item in found.removed]
        output.print_table(
            ("would go" if found.dry_run else "removed", "size", "because"), rows, right=("size",)
        )
    if found.skipped:
        output.print_table(("left alone", "because"), [(item.path, item.why) for item in found.skipped])
    verb = "would be freed" if found.dry_run else "freed"
    output.say(
        f"{output.size(found.bytes_freed)} {verb}; {output.count(len(found.kept), 'committed step')} kept."
    )
