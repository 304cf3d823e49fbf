"""Lists the supported families of models, and describes the mapping of tensors in words."""

from __future__ import annotations

import os

from holdfast._models.views import family
from holdfast._models.views.mapping import WAYS
from holdfast._models.views.rules import Rule
from holdfast._models.views.tables import by_model_type


def register(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Add a table of a family of models; return its model types.

    A table describes models by the tensors that they publish (docs/model.md). From now on, all calls in this
    process know its model types; it replaces tables of the package with the same ones. In a job, all ranks
    call this. Tables in the folders of HOLDFAST_MODELS, and in packages with an entry point of the group
    `holdfast.models`, are known without a call.

    path: the TOML file.

    Raises BadInput for a file that is no table, with the line and the key.
    """
    return family.register(path)


def families() -> dict[str, str]:
    """Return the supported model types, as in `config.json`, with the models that they cover."""
    return {kind: table.about for kind, table in sorted(by_model_type().items())}


def mapping_of(model_type: str, name: str) -> str:
    """Describe which published tensors a tensor of megatron-core's is made of, and how.

        >>> print(holdfast.huggingface.mapping_of("qwen3_moe", "decoder.layers.0.mlp.router.weight"))
        decoder.layers.0.mlp.router.weight is model.layers.0.mlp.gate.weight

    model_type: as in `config.json`. name: the tensor's name; numbers of layers and experts may be left out.

    Raises BadInput for a model type or a name that no table has.
    """
    entry, numbers, _ = family.family_of(model_type).get(name)
    places = {hole: str(numbers.get(hole, f"{{{hole}}}")) for hole in ("layer", "expert")}
    places["after"] = f"{{num_hidden_layers + {places['layer']}}}"
    places["expert_after"] = f"{{num_experts + {places['expert']}}}"

    def published_names(rule: Rule) -> str:
        return ", ".join((entry.prefix + published).format(**places) for published in rule.names)

    rule, other = entry.rule, entry.rule.otherwise
    text = f"{name} is {published_names(rule)}"
    if rule.layout is not None:
        text += f" (in one of two layouts, {rule.way} or {rule.layout.way}: its shape decides)"
    elif other is not None and rule.flag:
        text += f" (or {published_names(other)}, if {rule.flag} is true in config.json)"
    elif other is not None:
        text += f" (or {published_names(other)}, if the model has no such tensor)"
    for way in dict.fromkeys((rule.way, other.way if other is not None else "same")):
        if way != "same":
            text += f"\n{way}: {' '.join((WAYS[way].__doc__ or '').split())}"
    return text
