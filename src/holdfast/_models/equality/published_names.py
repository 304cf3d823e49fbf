"""The shards of a trainer's state as shards of the published tensors that they are made of."""

from __future__ import annotations

import os
from collections.abc import Mapping

from holdfast._core.format.names import is_weight
from holdfast._core.layout.tensor import OBJECT, TensorSpec
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.memory import TensorMemory, ViewMemory
from holdfast._core.store.local import open_store
from holdfast._models.views import hub_format as hf
from holdfast._models.views.family import EMBEDDING, View, language_model, view_of
from holdfast._models.views.prefixes import prefix_of
from holdfast._models.views.published_model import read_config
from holdfast._models.views.reordered import as_published
from holdfast.errors import BadInput

Published = Mapping[str, object] | str | os.PathLike[str]
"""The content of a model's `config.json`, or the folder that has it."""
_INSIDE = f"model.language_{EMBEDDING}"
"""The embedding in a model that contains a language model, as transformers 5 names it."""


def view_by(published: Published) -> View:
    """Return the view of a published model, by its configuration alone."""
    if isinstance(published, Mapping):
        config, where = published, "The configuration"
    else:
        if hasattr(published, "to_dict"):
            raise BadInput(
                f"published= is of type {type(published).__name__}.",
                hint="Give the model's folder, or the content of its config.json as a dict: to_dict() of it.",
            )
        store = open_store(published)
        read = read_config(store)
        where = f"{store.url}/{hf.CONFIG}"
        if read is None:
            raise BadInput(f"There is no {where}.", hint="Give the folder of a published model.")
        config = read
    inside = language_model(config) is not config
    return view_of(config, where, named=lambda name: inside and name == _INSIDE)


def under_published_names(table: ShardTable, view: View) -> tuple[ShardTable, bool]:
    """Return a table of the same memory as shards of published tensors, and whether any weight has a name of
    the model. Names that the view does not have stay.

    A prefix that the names of the model have in the state, such as `model.`, is left out.
    """
    seen = ShardTable(table.rank)

    def fits(name: str) -> bool:
        return view.knows(name) or view.names(name)

    weights = {spec.name for spec in table.specs if spec.kind != OBJECT and is_weight(spec.name)}
    prefix = prefix_of(weights, fits, "The state", 'Choose one, such as include=["model"].')
    for row, stored in enumerate(table.specs):
        spec, memory = stored._replace(name=stored.name.removeprefix(prefix)), table.memory[row]
        if isinstance(memory, ViewMemory):
            memory = TensorMemory(memory.tensor[(None,) * memory.lead])
        box = table.boxes[row]
        if spec.kind == OBJECT or not isinstance(memory, TensorMemory) or not view.knows(spec.name):
            seen.add(spec, box, table.replicas[row], table.unsharded[row], table.memory[row])
            continue
        for segment in view.segments(spec.name, spec.shape, box):
            if segment.is_copy:
                continue
            if segment.change or segment.split:
                raise BadInput(
                    f"{spec.name!r} is not {segment.name!r} in another order only: it has no fingerprint "
                    "under that name.",
                    hint="Save the state, export it, and compare the folder.",
                    details={"tensor": spec.name},
                )
            part = memory.tensor.detach()[segment.box.relative_to(box.offset).slices()]
            mine = as_published(part, segment.axes, len(segment.whole))
            published = TensorSpec(segment.name, spec.dtype, segment.whole)
            seen.add(published, segment.theirs(segment.box), table.replicas[row], False, TensorMemory(mine))
    seen.check()
    return seen, any(fits(name.removeprefix(prefix)) for name in weights)
