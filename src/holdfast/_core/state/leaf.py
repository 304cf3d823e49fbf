"""A state taken apart: its leaves, each with a name and a way to replace its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast._core.layout.patterns import Patterns
from holdfast._core.state.live import LiveSource, Rest
from holdfast._core.state.tensors import Merge, Shard
from holdfast.errors import BadInput


class MergeRule(NamedTuple):
    """A merge rule (`PerRank(merge=)`): computes the value of this rank from other ranks' values."""

    name: str
    """Name of the value, including this rank (`name@rank`)."""
    merge: Merge
    value: object
    """The present value."""
    states: Mapping[int, object]
    """The states of stateful values within `value`, by the `id` of each."""


Put = Callable[[Any], None]
"""Replaces a value of a state."""


@dataclass(slots=True)
class Leaf:
    """One value of the state: its name, and a function that replaces it."""

    name: str
    value: Any
    put: Put
    optional: bool = False
    private: bool = False
    """Whether it belongs to this rank (PerRank): no other rank holds the name."""
    rule: MergeRule | None = None
    """The rule that computes this leaf, together with the rule's other leaves, if other ranks saved it."""
    converts: bool = False
    """Whether a load converts another dtype to this tensor's, as torch DCP and Megatron do."""
    fits: bool = False
    """Whether a load fills the overlap of the stored shape and this tensor's, and zeroes the rest: for a
    vocabulary that is padded differently."""
    source: LiveSource | None = None
    """The source of its container, if that is live; notified after a load has filled the leaf."""
    outer: torch.Tensor | None = None
    """The wrapper tensor that this one is a part of."""
    patterns: Patterns = (None, None)
    """For an optimizer state: the patterns that select its parts."""
    made: bool = False
    """Whether a load has created its tensor, to replace one on the meta device."""

    def is_empty(self) -> bool:
        return type(self.value) is dict and not self.value


@dataclass
class Flat:
    """A state as leaves."""

    leaves: list[Leaf] = field(default_factory=list)
    containers: dict[str, type[str] | type[int]] = field(default_factory=dict)
    """The dicts and lists that were walked, by name: whether their parts have names or numbers."""
    states: dict[int, object] = field(default_factory=dict)
    """The states that stateful values have returned, by the `id` of each value."""
    after: list[tuple[list[Leaf], Callable[[], None]]] = field(default_factory=list)
    """Functions to call after everything is loaded: load_state_dict of stateful values, innermost first, each
    with the leaves of its value."""

    def path(self, name: str) -> tuple[str | int, ...]:
        """Return the path of keys to a name; a single key if its container was not walked here."""
        end = len(name)
        while (end := name.rfind(".", 0, end)) >= 0:
            if (kind := self.containers.get(name[:end])) is not None:
                return (*self.path(name[:end]), kind(name[end + 1 :]))
        return (name,)


def check_names(leaves: Sequence[Leaf]) -> None:
    """Raise BadInput if two leaves have the same name."""
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        if isinstance(leaf.value, Rest):
            continue
        # Several Shards of one tensor share its name; anything else would overwrite the other.
        if leaf.name in seen and not (
            isinstance(leaf.value, Shard) and isinstance(seen[leaf.name].value, Shard)
        ):
            raise BadInput(
                f"Two values of the state have the name {leaf.name!r} (path elements are joined by dots); "
                "rename one."
            )
        seen[leaf.name] = leaf
