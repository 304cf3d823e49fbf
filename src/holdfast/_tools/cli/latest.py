"""`holdfast latest`."""

from __future__ import annotations

import click

from holdfast._core.store.run_folder import latest
from holdfast._tools.cli import output


@click.command("latest")
@click.argument("run", type=click.Path())
@output.as_json
@click.pass_context
def command(ctx: click.Context, run: str, as_json: bool) -> None:
    """Print the newest committed step of a run.

    Exit code 1 if there is none.
    """
    path = latest(run)
    if as_json:
        output.print_json({"run": run, "path": path})
    elif path is not None:
        click.echo(path)
    # On stderr: a script reads stdout as the path.
    if path is None:
        output.complain(f"{run} has no committed step.")
        ctx.exit(1)
