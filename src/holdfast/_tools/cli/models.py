"""`holdfast models`."""

from __future__ import annotations

import click

from holdfast._core.layout.tensor import by_pattern
from holdfast._core.store.local import open_store
from holdfast._models.views.hugging_face import HuggingFaceFolder
from holdfast._models.views.tables import by_model_type
from holdfast._tools.cli import output
from holdfast.errors import BadInput


@click.command("models")
@click.option(
    "--unnamed", "folder", type=click.Path(), help="List what the table of this model does not name."
)
@output.as_json
def command(folder: str | None, as_json: bool) -> None:
    """List the types of published models that there are tables for.

    A table comes with Holdfast, from a folder in HOLDFAST_MODELS, or from an installed package with an entry
    point of the group holdfast.models.

    --unnamed takes the folder of a published model, and lists the weights that its table does not name, by
    pattern and number. Exit code 1 if there are any.
    """
    if folder is not None:
        _check(folder, as_json)
        return
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


def _check(folder: str, as_json: bool) -> None:
    source = HuggingFaceFolder.at(open_store(folder))
    if source is None:
        raise BadInput(f"{folder} is no folder of a published model that can be read.")
    family = source.view.family  # BadInput for a model without a table
    unnamed = {pattern: len(names) for pattern, names in by_pattern(source.unnamed(source.names())).items()}
    if as_json:
        output.print_json({"family": family.name, "tensors": source.tensors, "unnamed": unnamed})
    else:
        output.print_table(("not named", "tensors"), list(unnamed.items()), right=("tensors",))
        left = sum(unnamed.values())
        named = f"does not name {left} of" if left else "names all"
        output.say(f"The table {family.name!r} {named} {output.count(source.tensors, 'tensor')}.")
    if unnamed:
        click.get_current_context().exit(1)
