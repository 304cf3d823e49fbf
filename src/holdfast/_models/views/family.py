"""Published models as megatron-core names and shapes them, by the tables of their families (`entries`)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from holdfast._core.layout.box import Box
from holdfast._core.layout.tensor import Dims, nearest
from holdfast._models.views import tables
from holdfast._models.views.entries import NUMBER, Family, Found, TableEntry
from holdfast._models.views.mapping import WAYS
from holdfast._models.views.quantized import unpacked_name
from holdfast._models.views.rules import Rule
from holdfast._models.views.segments import Segment, Sizes
from holdfast._models.views.sizes import Numbers, sizes_of
from holdfast.errors import BadInput, ShapeMismatch

OUTPUT, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Published names of the output layer and of the embedding, in a model that no other one contains."""
_ANY_HOLE = re.compile(r"\{\w+\}")
_BEHIND = (("after", "num_hidden_layers", "layer"), ("expert_after", "num_experts", "expert"))
"""Placeholders for numbers behind all others: the size, and the placeholder that counts from there on."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


ShapeOf = Callable[[str], Dims | None]


class Tensors(NamedTuple):
    """Functions that tell about the tensors of a published model, by their names."""

    has: Callable[[str], bool] | None = None
    """Whether there is such a tensor; None: go by the configuration."""
    named: Callable[[str], bool] | None = None
    """Without `has`: the same, asked only to find the language model inside of another one."""
    shape: ShapeOf | None = None
    """The shape of a tensor that is published in two layouts; None: the first in the table applies."""


_UNKNOWN = Tensors()


class View:
    """A published model as megatron-core names and shapes it.

    sizes: numbers of its configuration. is_tied: does its output layer share the embedding?
    outer: the table of the model that contains this one; None: there is none, or it has no table.
    config: the configuration of the language model, for values that are no numbers. whole: that of the model
        around it.
    """

    def __init__(
        self,
        family: Family,
        sizes: Sizes,
        is_tied: bool = False,
        tensors: Tensors = _UNKNOWN,
        outer: tables.Table | None = None,
        config: Mapping[str, object] = MappingProxyType({}),
        whole: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._has, named, self._shape = tensors
        self.family, self.sizes, self._config = family, Numbers(sizes), config
        self.is_tied, self.outer, self._whole = is_tied, outer, whole
        self._parts = Family(outer) if outer is not None else None
        inner = family.table
        self._outside = (outer and outer.outside) or inner.outside
        self._unchanged = (outer or inner).unchanged
        self._further = (outer and outer.further) or inner.further
        self._named = self._has or named or (lambda name: False)
        self._inside = _inside((outer and outer.inside) or inner.inside, self._named)

    def find(self, name: str) -> Found | None:
        """Return the entry of one of our names (`Family.find`), also if the model is part of another one."""
        inner = _replaced(name, self._outside)
        found = self.family.find(inner) or (self._parts.find(name) if self._parts is not None else None)
        if found is None:
            is_part = name.startswith(tuple(self._unchanged))
            published = _replaced(name, self._unchanged) if is_part else self._place(inner)
            # Also a published name of the language model, which begins in another way here.
            if is_part or (published != name and self._named(published)):
                rule = Rule("same", (published,))
                return TableEntry(name, re.compile(re.escape(name)), (), rule, "", True), {}, []
        return found

    @property
    def is_of_no_table(self) -> bool:
        """Return whether the model's type has no table, and so all names stay as they are."""
        return not self.family.table.model_types

    def knows(self, name: str) -> bool:
        return self.find(name) is not None

    def has_layouts(self, name: str) -> bool:
        """Return whether our tensor is published in two layouts, between which its shape decides."""
        match = self.find(name)
        return match is not None and match[0].rule.layout is not None

    def predicts_further(self, published: str) -> bool:
        """Return whether a published tensor is of the layers that predict further tokens."""
        layer = _LAYER.search(published)
        behind = layer is not None and int(layer[1]) >= self.sizes["num_hidden_layers"]
        return behind or published.startswith(self._further)

    def is_unused(self, published: str) -> bool:
        """Return whether nothing of ours is made of a published tensor, by the table."""
        return _numbered(published) in self._unused

    def is_predictor(self, published: str) -> bool:
        """Return whether a published tensor is of a layer that predicts further tokens, and ours has it."""
        return self.predicts_further(published) and not self.is_unused(published)

    def names(self, published: str) -> bool:
        """Return whether the table names a published tensor."""
        if self._is_unchanged(published) or self.is_unused(published):
            return True
        return _numbered(unpacked_name(published)) in self._possible

    def is_of_language_model(self, published: str) -> bool:
        """Return whether a published name begins as those of the language model do."""
        return published.startswith((self._place("model."), self._place("lm_head."), *self._further))

    @cached_property
    def _possible(self) -> frozenset[str]:
        entries = [*self.family.entries.values(), *(self._parts.entries.values() if self._parts else ())]
        return frozenset(_ANY_HOLE.sub("#", name) for entry in entries for name in self.possible(entry))

    @cached_property
    def _unused(self) -> frozenset[str]:
        return frozenset(_ANY_HOLE.sub("#", self._place(name)) for name in self.family.table.unused)

    def _is_unchanged(self, published: str) -> bool:
        return published.startswith((*self._unchanged, *self._unchanged.values()))

    def is_padded(self, name: str) -> bool:
        """Return whether our tensor may have more rows than the published one."""
        match = self.find(name)
        return match is not None and match[0].rule.way == "padded"

    def segments(self, name: str, shape: Dims, box: Box) -> Iterator[Segment]:
        """Yield the segments that make up a box of the tensor `name`, of global `shape`. The rest of the box
        is padding."""
        entry, numbers, axes = self.find(name) or self.family.refuse(name)
        layers = self._layers_of_type(name, entry, numbers) if entry.layer_type else None
        lead, tail = shape[: len(axes)], shape[len(axes) :]
        if not tail and not entry.is_unchanged:  # a part of the model that has no table may hold numbers
            raise BadInput(f"{name!r} has shape {list(shape)}, which has too few axes for what it is.")
        for axis, many in zip(axes, lead, strict=True):
            self._check_number(name, entry, axis, many, layers)
        ahead = [range(low, stop) for low, stop in zip(box.offset, box.stop, strict=True)][: len(axes)]
        for place in product(*ahead):
            these = {**numbers, **dict(zip(axes, place, strict=True))}
            if layers is not None and "layer" in axes:  # one axis for the layers of a type alone
                these["layer"] = layers[these["layer"]]
            for segment in self._of_one(entry, these, tail):
                whole = Box((*place, *segment.box.offset), (*(1,) * len(place), *segment.box.shape))
                part = whole.intersect(box)
                if part is not None:
                    yield _with_lead(segment, len(place), part)

    def has_layer(self, entry: TableEntry, layer: int) -> bool:
        """Return whether a layer is of the type whose layers have an entry's tensor."""
        types = self._config.get("layer_types")
        if not entry.layer_type or not isinstance(types, list):
            return True
        return layer < len(types) and types[layer] == entry.layer_type

    def _layers_of_type(self, name: str, entry: TableEntry, numbers: Mapping[str, int]) -> list[int]:
        """Return the layers that have an entry's tensor. BadInput if there are none, or if the name has the
        number of another layer."""
        if not isinstance(types := self._config.get("layer_types"), list):
            raise BadInput(
                f"{name!r} is a tensor of some layers only, and config.json has no layer_types to say which.",
                hint="Give the whole config.json of the published model.",
            )
        layers = [layer for layer in range(len(types)) if self.has_layer(entry, layer)]
        if numbers.get("layer", layers[0] if layers else -1) not in layers:
            raise BadInput(
                f"{name!r} is a tensor of layers of type {entry.layer_type!r}, and by layer_types in "
                f"config.json these are {layers}.",
                hint="Build the model with the layer_types of config.json.",
                details={"tensor": name},
            )
        return layers

    def _check_number(
        self, name: str, entry: TableEntry, axis: str, count: int, layers: Sequence[int] | None
    ) -> None:
        """Raise ShapeMismatch if the number of layers or experts differs from the published model: with
        fewer, some would silently be left out. layers: those that have such a tensor; None: all."""
        published = self._sizes(entry).get(
            {"layer": "num_hidden_layers", "expert": "num_experts"}[axis], count
        )
        if layers is not None and axis == "layer":
            published = len(layers)
        if published != count and not _replaced(name, self._outside).startswith(self._further):
            raise ShapeMismatch(
                f"{name!r} has {count} {axis}s, and the published model {published}.",
                hint="Build the model with the sizes of config.json.",
                details={"tensor": name},
            )

    def possible(self, entry: TableEntry) -> list[str]:
        """List the possible published names of an entry in any model, with `{layer}` and `{expert}`."""
        return [
            entry.prefix + name if entry.part else self._place(entry.prefix + name)
            for name in self._sources(entry)
        ]

    def _sources(self, entry: TableEntry) -> tuple[str, ...]:
        rule, other = entry.rule, entry.rule.otherwise
        return (*rule.names, *(other.names if other else ()))

    def _place(self, name: str) -> str:
        return _replaced(name, self._inside)

    def rule(self, entry: TableEntry, numbers: dict[str, int]) -> tuple[Rule, list[str]]:
        """Return the rule of an entry that applies to this model, and the names of the published tensors.

        numbers: the layer and the expert.
        """
        behind = {
            hole: self.sizes[count] + numbers.get(of, 0)
            for hole, count, of in _BEHIND
            if any(f"{{{hole}}}" in entry.prefix + name for name in self._sources(entry))
        }

        def published(name: str) -> str:
            if entry.is_unchanged:
                return name
            name = (entry.prefix + name).format(**numbers, **behind)
            return name if entry.part else self._place(name)

        rule, other = entry.rule, entry.rule.otherwise
        if (
            other is not None
            and rule.layout is None
            and self._has_other(published(rule.names[0]), published(other.names[0]), rule)
        ):
            rule = other
        return rule, [published(name) for name in rule.names]

    def _of_one(self, entry: TableEntry, numbers: dict[str, int], shape: Dims) -> list[Segment]:
        rule, names = self.rule(entry, numbers)
        sizes = Numbers({**self._sizes(entry), **numbers})
        segments = WAYS[rule.way](names, shape, sizes)
        if rule.layout is not None and self._shape is not None:
            stored = self._shape(names[0])
            if stored is not None and stored != segments[0].published:
                return WAYS[rule.layout.way](names, shape, sizes)
        return segments

    def _sizes(self, entry: TableEntry) -> Sizes:
        """Return the numbers of the part of the model that an entry is of."""
        if not entry.part:
            return self.sizes
        part = self._whole.get(entry.part)
        return Numbers(sizes_of(part if isinstance(part, dict) else {}, entry.part))

    def _has_other(self, name: str, other: str, rule: Rule) -> bool:
        """Return whether the alternative rule applies. name, other: the first names of the two rules."""
        if rule.flag:
            return self._config.get(rule.flag) is True
        if self._has is None:
            return rule.if_tied and self.is_tied
        return not self._has(name) and (self.is_tied if rule.if_tied else self._has(other))


def _inside(places: Sequence[Mapping[str, str]], has: Callable[[str], bool]) -> Mapping[str, str]:
    """Return what beginnings of published names become where the language model is inside of another one."""
    if has(EMBEDDING):
        return {}
    return next((one for one in places if has(_replaced(EMBEDDING, one))), {})


def output_and_embedding(config: Mapping[str, object], has: Callable[[str], bool]) -> tuple[str, str]:
    """Return the published names of the output layer and of the embedding, also of a model without a
    table."""
    known = tables.by_model_type()
    names = [str(part.get("model_type")) for part in (config, language_model(config))]
    places = next((known[name].inside for name in names if name in known and known[name].inside), None)
    inside = _inside(tables.decoder().inside if places is None else places, has)
    return _replaced(OUTPUT, inside), _replaced(EMBEDDING, inside)


def _numbered(published: str) -> str:
    """Write # for the numbers in a name."""
    return NUMBER.sub(".#", published)


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    """Replace the first of these beginnings that a name has."""
    for beginning, other in beginnings.items():
        if name.startswith(beginning):
            return other + name[len(beginning) :]
    return name


def _with_lead(segment: Segment, lead: int, part: Box) -> Segment:
    """Cut a segment to a part, and add our leading axes, which no published axis corresponds to."""
    inner = Box(part.offset[lead:], part.shape[lead:])
    start = segment.theirs(inner).offset
    return segment._replace(box=part, start=start, axes=(*(-1,) * lead, *segment.axes))


def view_of(
    config: Mapping[str, object],
    where: str,
    has: Callable[[str], bool] | None = None,
    inner: bool = True,
    named: Callable[[str], bool] | None = None,
    shape: ShapeOf | None = None,
) -> View:
    """Make the view of a published model from its `config.json`. BadInput if its family is not known.

    where: the file, for errors.
    inner: for a multimodal model without a table, take the language model inside.
    has, named, shape: as in `Tensors`.
    """
    tied, outer = is_tied(config), tables.by_model_type().get(str(config.get("model_type")))
    outer = outer if outer is not None and outer.contains else None
    whole, config = config, language_model(config) if inner or outer else config
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise BadInput(
            f"{where} does not say which model_type it is of.", hint="Give the folder of a published model."
        )
    tensors = Tensors(has, named, shape)
    return View(family_of(kind), sizes_of(config, where), tied, tensors, outer, config, whole)


def as_published(config: Mapping[str, object], where: str, has: Callable[[str], bool]) -> View:
    """Make the view of a published model whose type has no table: all names stay as they are."""
    return View(Family(tables.as_published()), sizes_of(config, where), is_tied(config), Tensors(has))


def language_model(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the configuration of the language model; in a multimodal model, of the inner language model."""
    known = tables.by_model_type()
    table = known.get(str(config.get("model_type")))
    text = config.get(table.contains if table is not None and table.contains else "text_config")
    if table is not None and table.language_model and isinstance(text, dict):
        text = text if text.get("model_type") in known else {**text, "model_type": table.language_model}
    is_language_model = table is not None and not table.contains
    return language_model(text) if isinstance(text, dict) and not is_language_model else config


def is_known(config: Mapping[str, object]) -> bool:
    """Return whether there is a table for the language model of this configuration."""
    table = tables.by_model_type().get(str(config.get("model_type")))
    return table is not None and not table.contains


def is_tied(config: Mapping[str, object]) -> bool:
    """Return whether a model's output layer is its embedding. In a multimodal model, the outer or the inner
    configuration may set it; the default in these families is False."""
    return any(
        isinstance(part, dict) and part.get("tie_word_embeddings") is True
        for part in (config, config.get("text_config"))
    )


def register(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read a table, check it, and use it for its model types from now on; return these."""
    types = tables.register(path)
    family_of.cache_clear()
    return types


def families() -> dict[str, Family]:
    """Return all families of language models, by the `model_type` of Hugging Face's configurations."""
    return {kind: family_of(kind) for kind, table in tables.by_model_type().items() if not table.contains}


@cache
def family_of(model_type: str) -> Family:
    """Return the family of a model type. BadInput, with the nearest one, if it is not known."""
    known = tables.by_model_type()
    if model_type not in known:
        near = nearest(model_type, list(known))
        raise BadInput(
            f"Holdfast has no table for the model type {model_type!r}."
            + (f" The nearest that it has is {near!r}." if near else ""),
            hint="docs/model.md shows how to add one.",
        )
    table = known[model_type]
    if table.contains:
        raise BadInput(
            f"{model_type!r} contains a language model, which has a table of its own.",
            hint=f"Give the model_type of its {table.contains}.",
        )
    return Family(table)
