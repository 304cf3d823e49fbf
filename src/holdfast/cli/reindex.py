"""`holdfast reindex`."""

from __future__ import annotations

import click

from holdfast.cli import output
from holdfast.maintenance.reindex import Reindexed, reindex


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
    found = reindex(path, dry_run, force, only)
    if as_json:
        output.print_json(found)
    else:
        _show(found)


def _show(found: Reindexed) -> None:
    held = f"{output.count(found.tensors, 'name')} in {output.count(len(found.files), 'file')}"
    if found.action == "none":
        output.say(f"{found.path} has a good index ({held}); nothing was done. --force rebuilds it.")
        return
    verb = "An index would be written" if found.action == "would write" else "An index was written"
    output.say(f"{verb} to {found.path}: {held}, {output.size(found.bytes)}.")
    if found.left_out:
        output.print_table(("left out", "because"), [(item.name, item.why) for item in found.left_out])
