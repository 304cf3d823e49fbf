"""`holdfast models`."""

from __future__ import annotations

import click

from holdfast._models.views.tables import by_model_type
from holdfast._tools.cli import output


@click.command("models")
@output.as_json
def command(as_json: bool) -> None:
    """List the types of published models that there are tables for.

    A table comes with Holdfast, from a folder in HOLDFAST_MODELS, or from an installed package with an entry
    point of the group holdfast.models.
    """
    found = sorted(by_model_type().items())
    if as_json:
        output.print_json(
            [
                {"model_type": kind, "models": table.about, "from": table.source, "file": table.file}
                for kind, table in found
            ]
        )
        return
    rows = [(kind, table.about, table.source) for kind, table in found]
    output.print_table(("model_type", "models", "from"), rows)
