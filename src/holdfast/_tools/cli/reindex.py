"""`holdfast reindex`."""

from __future__ import annotations

import click

from holdfast._core.base.values import size_text
from holdfast._core.existing.reindex import Reindexed, reindex
from holdfast._tools.cli import output


@click.command("reindex")
@click.argument("path", type=click.Path())
@click.option("--dry-run", is_flag=True, help="Check whether it can be done; write nothing.")
@click.option("--force", is_flag=True, help="Rebuild although the present index is good.")
@click.option("--only", metavar="FILE", multiple=True, help="Use just these data files (may be repeated).")
@output.as_json
def command(path: str, dry_run: bool, force: bool, only: tuple[str, ...], as_json: bool) -> None:
    """Rebuild a lost index from the data files.

    Refuses if files of several attempts lie there and it can't be told which belong together.
    `holdfast verify` afterwards reads the data as well.
    """
    output.report(reindex(path, dry_run, force, only), as_json, _show)


def _show(report: Reindexed) -> None:
    contents = f"{output.count(report.tensors, 'name')} in {output.count(len(report.files), 'file')}"
    if report.action == "none":
        output.say(f"{report.path} has a good index ({contents}); nothing was done. --force rebuilds it.")
        return
    verb = "An index would be written" if report.action == "would write" else "An index was written"
    output.say(f"{verb} to {report.path}: {contents}, {size_text(report.bytes)}.")
    output.print_table(("left out", "because"), [(item.name, item.why) for item in report.left_out])
