"""The right side of a table's entry: a way, and the names of the published tensors that it takes."""

from __future__ import annotations

import re
from typing import NamedTuple

from holdfast._models.views.mapping import WAYS
from holdfast.errors import BadInput

_ENTRY = re.compile(r"(?:(?P<way>[a-z_]+)\()?(?P<names>[^()]+?)\)?")


class Rule(NamedTuple):
    """The right side of a table's entry: a way, and its names, with `{layer}` and `{expert}` in them."""

    way: str
    names: tuple[str, ...]
    otherwise: Rule | None = None
    """The rule to use if the folder has no tensor of the first name."""
    if_tied: bool = False
    """Does `otherwise` apply only if the model's output layer shares its embedding?"""
    flag: str = ""
    """A key of config.json: `otherwise` applies if, and only if, its value is true. "": there is none."""

    @property
    def layout(self) -> Rule | None:
        """The rule for the same tensors in another layout: it applies if the shape is not this one's."""
        return self.otherwise if self.otherwise is not None and self.otherwise.names == self.names else None


def parse(entry: str, where: str) -> Rule:
    """Parse `name` or `way(name, name)`, optionally followed by ` or `, ` or tied ` or ` or if KEY ` and
    another one."""
    text, more, other = entry.partition(" or ")
    flag = ""
    if other.startswith("if "):
        flag, _, other = other.removeprefix("if ").partition(" ")
    match = _ENTRY.fullmatch(text.strip())
    way = match["way"] or "same" if match else ""
    if match is None or way not in WAYS:
        raise BadInput(
            f"{where}: {entry!r} is no entry of a table.", hint=f"Write a name, or one of {', '.join(WAYS)}."
        )
    otherwise = parse(other.removeprefix("tied "), where) if more else None
    names = tuple(name.strip() for name in match["names"].split(","))
    least, most = _NAMES.get(way, (1, 1))
    if not least <= len(names) <= most:
        wants = f"{least} names" if least == most > 1 else "several names" if most > 1 else "one name"
        raise BadInput(f"{where}: {way} takes {wants}, not {len(names)}.", hint="Separate names by commas.")
    return Rule(way, names, otherwise, other.startswith("tied "), flag)


_NAMES = {
    "concat": (2, 1 << 20),
    **dict.fromkeys(("grouped", "grouped_sized", "gated"), (3, 3)),
    "grouped_tied": (2, 2),
}
"""How many names a way takes, at least and at most, if not one."""
