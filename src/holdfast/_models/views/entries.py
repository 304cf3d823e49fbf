"""The entries of a table: our names, and the rule for each.

A table (`tables`) has a section for each kind of layer. A section's key is the prefix of our names,
`published` the prefix of the published names, and each entry maps one of our names to a rule for its source
(`rules.parse`). "Ours" are megatron-core's names and tensors, or transformers' where a table lists those.
`extends` names one or more tables that are read first; `within` names a section whose entries are copied,
with megatron-core's `transformer_layer` or `mtp_model_layer` before them.
"""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from holdfast._core.layout.tensor import nearest
from holdfast._models.views import tables
from holdfast._models.views.rules import Rule, parse
from holdfast.errors import BadInput

NUMBER = re.compile(r"\.\d+(?=\.|\Z)")
_HOLES = re.compile(r"\.\{(layer|expert)\}")
_INNER = ("transformer_layer.", "mtp_model_layer.")
"""Prefixes of megatron-core for the layer inside a multi-token prediction layer: 0.16, and since 0.19."""


class TableEntry(NamedTuple):
    name: str
    """Our name, with the placeholders `{layer}` and `{expert}`."""
    pattern: re.Pattern[str]
    """Matches the entry's names. If a number is missing, the tensor has an axis for it."""
    holes: tuple[str, ...]
    """The placeholders in the name, in order: `layer`, `expert`."""
    rule: Rule
    prefix: str
    """Prefix of the published names."""
    is_unchanged: bool = False
    """Is it of a part of the model that has no other form, and so no table?"""
    part: str = ""
    """The key of the configuration of the part of the model that it is of; "": the language model."""
    layer_type: str = ""
    """The type, in layer_types of config.json, of the layers that have such a tensor; "": all may have it."""


Found = tuple[TableEntry, dict[str, int], list[str]]
"""An entry, the numbers in a name, and the placeholders that are axes of the tensor."""


class Family:
    """A family of models with the same table."""

    def __init__(self, table: tables.Table) -> None:
        self.name, self.about, self._table = table.name, table.about, table
        self.entries: dict[str, TableEntry] = {}
        """Entries by our name, without numbers of layers and experts."""
        for section, rules in table.sections.items():
            prefix = rules.get("published", "*").removesuffix("*")
            for ours, rule in table.sections.get(rules.get("within", ""), {}).items():
                for inner in _INNER if ours not in tables.LINKS else ():
                    self._add(section.removesuffix("*") + inner + ours, rule, prefix, "")
            for ours, rule in rules.items():  # in the place of copied ones of the same name
                if ours not in tables.LINKS:
                    self._add(section.removesuffix("*") + ours, rule, prefix, rules.get("sizes", ""))

    def _add(self, ours: str, rule: str, prefix: str, part: str) -> None:
        pattern = re.escape(_HOLES.sub(r".<\1>", ours))
        pattern = re.sub(r"\\\.<(\w+)>", r"(?:\\.(?P<\1>\\d+))?", pattern)
        holes = tuple(_HOLES.findall(ours))
        types = self._table.layer_types.items()
        self.entries[_HOLES.sub("", ours)] = TableEntry(
            ours,
            re.compile(pattern),
            holes,
            parse(rule, f"{self._table.file}, {ours!r}"),
            prefix,
            part=part,
            layer_type=next((kind for beginning, kind in types if ours.startswith(beginning)), ""),
        )

    def find(self, name: str) -> Found | None:
        """Return the entry of a name, the numbers in it, and the holes that are axes of the tensor."""
        entry = self.entries.get(NUMBER.sub("", name))
        if entry is None or (match := entry.pattern.fullmatch(name)) is None:
            return None
        numbers = {hole: int(digits) for hole, digits in match.groupdict().items() if digits is not None}
        return entry, numbers, [hole for hole in entry.holes if hole not in numbers]

    def get(self, name: str) -> Found:
        """Do the same as `find`; raise BadInput for a name that the family does not have."""
        found = self.find(name)
        return self.refuse(name) if found is None else found

    def refuse(self, name: str) -> NoReturn:
        near, numbers, hint = nearest(NUMBER.sub("", name), self.entries), iter(NUMBER.findall(name)), ""
        if near:
            # With the numbers of the given name, where a tensor has them.
            like = _HOLES.sub(lambda _: next(numbers, ""), self.entries[near].name)
            hint = f"The nearest of its names is {like!r}."
        raise BadInput(f"The family {self.name!r} has no {name!r}.", hint=hint)

    @property
    def table(self) -> tables.Table:
        return self._table
