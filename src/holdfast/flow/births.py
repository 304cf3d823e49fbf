"""What a load makes: parts of a state that are not there yet, and that the checkpoint has.

An optimizer's state of a parameter comes into being at its first gradient; until then an `Unborn` stands for it. And a list of dicts
is one object for us, and an object a value for torch DCP, which saves `param_groups` as `param_groups.0.lr` and so on.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from holdfast.adapters.memory import TensorMemory
from holdfast.adapters.state import Leaf, hold, is_selected
from holdfast.adapters.tensors import Unborn
from holdfast.errors import BadInput, MissingTensors
from holdfast.flow.sources import Source
from holdfast.format.columns import Columns
from holdfast.layout.box import Dims
from holdfast.layout.tensor import DTYPES, TENSOR
from holdfast.plan.holding import Holding

Born = tuple[Leaf, dict[str, Any]]
"""A leaf, and the parts of what takes its place."""
Patterns = tuple[Sequence[str] | None, Sequence[str] | None]
"""include, exclude"""


class Births:
    """Adds leaves, their rows and their owners to those of a load."""

    def __init__(
        self, url: str, leaves: list[Leaf], owner: list[int], held: Holding, everyone: tuple[int, ...]
    ) -> None:
        self.url, self.leaves, self.owner, self.held, self.everyone = url, leaves, owner, held, everyone
        self.born: list[Born] = []
        self.missing: list[str] = []
        """States that the checkpoint does not have, either."""
        self._at: dict[tuple[int, Dims], int] | None = None

    def look(self, index: Source, patterns: Patterns, strict: bool) -> None:
        """Leaves and rows for what the checkpoint has where the state has nothing yet."""
        unborn = [leaf for leaf in self.leaves if isinstance(leaf.value, Unborn)]
        lists = [leaf for leaf in self.leaves if isinstance(leaf.value, list)]
        there = index.find([leaf.name for leaf in lists]).tolist()
        lists = [leaf for leaf, row in zip(lists, there, strict=True) if row < 0]
        if not unborn and not lists:
            return
        names, known = index.names(), {leaf.name for leaf in self.leaves}
        parts: list[tuple[Leaf, list[int]]] = []
        for leaf in lists:
            first, stop = _under(names, leaf.name)
            keys = [name[len(leaf.name) + 1 :] for name in names[first:stop]]
            if _are_parts_of_a_list(keys):
                leaf.optional = True  # it is there in parts
                parts.append((leaf, list(range(first, stop))))
        filled = False
        for leaf in unborn:
            first, stop = _under(names, leaf.name)
            keys = [name[len(leaf.name) + 1 :] for name in names[first:stop]]
            other = [
                f"{leaf.name}.{key}" in known or f"{leaf.name}.{key.rpartition('.')[0]}" in known
                for key in keys
            ]
            nested = [key for key, is_other in zip(keys, other, strict=True) if "." in key and not is_other]
            if nested:
                raise BadInput(
                    f"{self.url} has a nested state {nested[0]!r} under {leaf.name!r}, for which the optimizer has nothing yet.",
                    hint="How it is built only the optimizer knows: let it take a step before the load.",
                )
            rows = [
                first + at
                for at, (key, is_other) in enumerate(zip(keys, other, strict=True))
                if not is_other and is_selected(f"{leaf.name}.{key}", *patterns)
            ]
            filled = filled or bool(rows)
            if rows:
                parts.append((leaf, rows))
            else:
                self.missing.append(leaf.name)
        if strict and unborn and not filled:
            self._refuse_strangers(unborn, patterns, names)
        wanted = np.unique(np.asarray([row for _, rows in parts for row in rows], np.int64))
        columns = index.select(wanted)
        for leaf, rows in parts:
            self._bear(leaf, columns, np.searchsorted(wanted, rows).tolist())

    def _bear(self, leaf: Leaf, columns: Columns, rows: list[int]) -> None:
        """Leaves for parts of a leaf, and rows for those."""
        value, born, new = leaf.value, dict[str, Any](), list[Leaf]()
        for at in rows:
            made, key = None, columns.names[at][len(leaf.name) + 1 :]
            if int(columns.kind[at]) == TENSOR:
                dtype, shape = getattr(torch, DTYPES[int(columns.dtype[at])].name), columns.shape_of(at)
                made = born[key] = (
                    value.make(key, dtype, shape)
                    if isinstance(value, Unborn)
                    else torch.zeros(shape, dtype=dtype)
                )
            new.append(Leaf(columns.names[at], made, partial(born.__setitem__, key)))
        self.born.append((leaf, born))
        held, owner = hold(new, self.held.rank, self.everyone, for_load=True)
        if isinstance(value, Unborn):
            self._lie_like(held, value.like)
        self.owner += [len(self.leaves) + at for at in owner]
        self.leaves += new
        self.held.extend(held)

    def _lie_like(self, held: Holding, like: torch.Tensor) -> None:
        """Give uneven shards the box of the parameter's shard, whose place all ranks have settled."""
        late = [row for row, found in enumerate(held.lates) if found is not None and held.boxes[row].volume]
        if not late:
            return
        address = like._local_tensor.data_ptr()  # type: ignore[attr-defined]
        of = self._parameters()
        for row in late:
            parameter = of.get((address, held.boxes[row].shape))
            if parameter is not None:
                held.boxes[row] = self.held.boxes[parameter]
            elif held.lates[row].start == -1:  # type: ignore[union-attr]
                raise BadInput(
                    f"Rank {held.rank} holds a part of {held.specs[row].name!r} whose offset it does not know, and its parameter is "
                    "not in the state.",
                    hint="Load the model together with its optimizer, or let the optimizer take a step before.",
                )

    def _parameters(self) -> dict[tuple[int, Dims], int]:
        """Rows of uneven shards, by what memory they have."""
        if self._at is None:
            self._at = {
                (memory.tensor.data_ptr(), box.shape): row
                for row, (memory, box, late) in enumerate(
                    zip(self.held.memory, self.held.boxes, self.held.lates, strict=True)
                )
                if late is not None and isinstance(memory, TensorMemory)
            }
        return self._at

    def _refuse_strangers(self, unborn: list[Leaf], patterns: Patterns, names: list[str]) -> None:
        """An optimizer of other names: none of its states is there, and others are."""
        found = [re.match(r"(?:.*?\.)?state(?=\.)", leaf.name) for leaf in unborn]
        parents = {match[0] for match in found if match is not None}
        known = {leaf.name for leaf in self.leaves}
        for parent in parents:
            first, stop = _under(names, parent)
            other = next((name for name in names[first:stop] if name not in known), None)
            if other is not None and is_selected(other, *patterns):
                raise MissingTensors(
                    f"{self.url} has nothing of {unborn[0].name!r}, nor of any other state that this optimizer lacks; it has "
                    f"{other!r}.",
                    hint="Build the model and the optimizer as they were saved, or leave the optimizer out with exclude=.",
                    details={"missing": [leaf.name for leaf in unborn[:100]]},
                )


def _under(names: list[str], parent: str) -> tuple[int, int]:
    """Where the names under a name begin and end, among sorted ones."""
    return bisect_left(names, f"{parent}."), bisect_left(names, f"{parent}/")  # the character after the dot


def _are_parts_of_a_list(keys: list[str]) -> bool:
    """`0.lr`, `0.betas`, `1.lr`, ...: dicts, each with a number, none left out."""
    split = [key.split(".") for key in keys]
    if not keys or any(len(part) != 2 or not part[0].isdecimal() or not part[1] for part in split):
        return False
    numbers = {int(part[0]) for part in split}
    return numbers == set(range(len(numbers)))


def as_list(parts: dict[str, Any]) -> list[Any]:
    """A list of dicts from `0.lr`, `0.betas`, `1.lr`: so torch DCP saves an optimizer's `param_groups`."""
    found: dict[int, dict[str, Any]] = {}
    for path, value in parts.items():
        number, _, key = path.partition(".")
        found.setdefault(int(number), {})[key] = value
    return [found[at] for at in sorted(found)]
