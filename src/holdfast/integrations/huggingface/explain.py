"""What a tensor of megatron-core's is made of, in words."""

from __future__ import annotations

from holdfast.errors import BadInput
from holdfast.layout.tensor import nearest
from holdfast.views import family as tables
from holdfast.views.mapping import WAYS


def families() -> dict[str, str]:
    """The model types that Holdfast knows, as `config.json` has them, and which models those are."""
    return {kind: found.about for kind, found in sorted(tables.families().items())}


def explain(model_type: str, name: str) -> str:
    """Say which published tensors a tensor of megatron-core's is made of, and how.

        >>> print(holdfast.huggingface.explain("qwen3_moe", "decoder.layers.0.mlp.router.weight"))
        decoder.layers.0.mlp.router.weight is model.layers.0.mlp.gate.weight

    model_type: as in `config.json`. name: the tensor's name; numbers of layers and experts may be left out.

    Raises BadInput for a model type or a name that no table has.
    """
    family = tables.family_of(model_type)
    found = family.find(name)
    if found is None:
        near = nearest(name, family.names())
        raise BadInput(
            f"The family {family.name!r} has no {name!r}.", hint=f"The nearest is {near!r}." if near else ""
        )
    entry, numbers, _ = found
    places = {hole: str(numbers.get(hole, f"{{{hole}}}")) for hole in ("layer", "expert")}
    places["after"] = f"{{num_hidden_layers + {places['layer']}}}"
    names = [(entry.prefix + published).format(**places) for published in entry.rule.names]
    text = f"{name} is {', '.join(names)}"
    if entry.rule.otherwise:
        text += f" (or {entry.rule.otherwise}, if the model has no such tensor)"
    if entry.rule.way != "same":
        about = " ".join((WAYS[entry.rule.way].__doc__ or "").split())
        text += f"\n{entry.rule.way}: {about}"
    return text
