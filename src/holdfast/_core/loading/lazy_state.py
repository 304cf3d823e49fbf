"""Create optimizer states that are in the checkpoint but not yet in the optimizer.

An optimizer creates a parameter's state at the first step with a gradient for it; until then an empty
`ParameterState` is its placeholder. A state with nested containers or tensor subclasses is rebuilt, reusing
its present tensors, because the checkpoint may have more entries. This module also handles lists of dicts
that are stored in parts: for Holdfast such a list is one object, while torch DCP saves each value separately
(`param_groups` as `param_groups.0.lr` and so on).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch

from holdfast._core.format.columns import Columns
from holdfast._core.io.source import Source
from holdfast._core.layout.patterns import Patterns, is_selected, selector
from holdfast._core.layout.tensor import TENSOR, Dims
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.flatten import build_shard_table, leaves_of
from holdfast._core.state.from_names import are_of_a_list, joined, parents_of
from holdfast._core.state.leaf import Leaf
from holdfast._core.state.live import ParameterState, Rest, zeros
from holdfast._core.state.memory import TensorMemory, torch_dtype
from holdfast._core.state.structure import STRUCTURE, build, join
from holdfast._core.torch_private import local_of
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch


@dataclass
class Made:
    """A leaf, and the parts created by a load to replace its value."""

    leaf: Leaf
    parts: dict[str, object] = field(default_factory=dict)
    """Created parts by full name."""

    def value(self) -> object:
        """Build the replacement for the leaf's value from its parts."""
        name = self.leaf.name
        structure = self.parts.get(join(name, STRUCTURE))
        if structure is not None:
            return build(structure, name, self.parts, self.leaf.value)
        present = self.leaf.value if isinstance(self.leaf.value, list) else {}
        return joined({part[len(name) + 1 :]: value for part, value in self.parts.items()}, present)


class LazyStates:
    """Adds leaves for optimizer states, with their rows and owners, to the leaves of a load."""

    def __init__(
        self, url: str, leaves: list[Leaf], owner: list[int], table: ShardTable, participants: tuple[int, ...]
    ) -> None:
        self.url, self.leaves, self.owner = url, leaves, owner
        self.table, self.participants = table, participants
        self.made: list[Made] = []
        self._given = len(leaves)
        self.missing: list[str] = []
        """Names of states that the checkpoint lacks, too."""
        self.skipped: list[str] = []
        """Names of states that are skipped because their parameters are."""

    def leave_out(self, parameters: Iterable[tuple[torch.Tensor, Dims]]) -> None:
        """Skip the states of parameters. A parameter is given as a tensor with its memory, and its global
        shape."""
        places = {(_address(tensor), tuple(shape)) for tensor, shape in parameters}
        for leaf in self.leaves:
            parameter = getattr(leaf.value, "parameter", None)
            if parameter is not None and (_address(parameter), tuple(parameter.shape)) in places:
                self.skipped.append(leaf.name)

    def look(self, index: Source, patterns: Patterns, strict: bool, cast: bool) -> None:
        """Add leaves and rows for stored values for which the state has only a placeholder.

        cast: if a parameter is stored in another dtype than it has, its states are created in the parameter's
            dtype, as by `Optimizer.load_state_dict`.
        """
        awaited = ParameterState | Rest
        lazy = [leaf for leaf in self.leaves if isinstance(leaf.value, awaited)]
        if self.skipped:
            lazy = [leaf for leaf in lazy if leaf.name not in self.skipped]
        lists = [leaf for leaf in self.leaves if isinstance(leaf.value, list)]
        # A list that is stored as one object is read as one. Only lists stored in parts are built here.
        if lists:
            there = index.find([leaf.name for leaf in lists]).tolist()
            lists = [leaf for leaf, row in zip(lists, there, strict=True) if row < 0]
        if not lazy and not lists:
            return
        # All names, sorted: only the names show which values each optimizer state has.
        names = index.names()
        parts: list[tuple[Leaf, list[int]]] = []
        for leaf in lists:
            first, stop = under(names, leaf.name)
            keys = [name[len(leaf.name) + 1 :] for name in names[first:stop]]
            if are_of_a_list(keys, leaf.value):
                leaf.optional = True  # it is stored in parts
                parts.append((leaf, list(range(first, stop))))
        stored = self._states(lazy, names, patterns, strict)
        states = [leaf for leaf in lazy if isinstance(leaf.value, ParameterState) and leaf.value.is_awaited]
        if strict and states and not any(isinstance(leaf.value, ParameterState) for leaf, _ in stored):
            self._refuse_strangers(states, patterns, names)
        parts += stored
        # One selection for all states: each selection reads and verifies pages of the index.
        wanted = np.unique(np.asarray([row for _, rows in parts for row in rows], np.int64))
        columns = index.select(wanted)
        selected = [(leaf, np.searchsorted(wanted, rows).tolist()) for leaf, rows in parts]
        self._check_shapes(selected, columns, index, names)
        alike = self._stored_as_they_are(index) if cast else frozenset()
        for leaf, rows in selected:
            parameter = getattr(leaf.value, "parameter", None)
            follows = cast and parameter is not None and _address(parameter) not in alike
            self._make(leaf, columns, rows, follows)

    def build(self, objects: Mapping[int, object]) -> list[tuple[Leaf, object]]:
        """Build the replacement values of leaves, after all parts are read. objects: the decoded objects, by
        index of the leaf."""
        for index in range(self._given, len(self.leaves)):
            part = self.leaves[index]
            # Tensors are in their `Made` already. Since then objects were read, and meta tensors got memory.
            if index in objects or part.made:
                part.put(objects.get(index, part.value))
        return [(made.leaf, made.value()) for made in self.made]

    def _states(
        self, lazy: list[Leaf], names: list[str], patterns: Patterns, strict: bool
    ) -> list[tuple[Leaf, list[int]]]:
        """Find the rows of the checkpoint's index that belong to each state."""
        known = {leaf.name for leaf in self.leaves}
        states, selected = [], selector(patterns)
        for leaf in lazy:
            first, stop = under(names, leaf.name)
            start, takes = len(leaf.name) + 1, getattr(leaf.value, "takes", None)
            rows = [
                row
                for row in range(first, stop)
                # A name that is, or is under, another leaf of the state belongs to that leaf.
                if known.isdisjoint(parents_of(names[row], start))
                and selected(names[row])
                and (takes is None or takes(names[row][start:]))
            ]
            if rows:
                # The structure is read regardless of the patterns: it describes how to join the parts.
                structure = join(leaf.name, STRUCTURE)
                position = bisect_left(names, structure, first, stop)
                if names[position : position + 1] == [structure]:
                    rows = sorted({*rows, position})
                states.append((leaf, rows))
                continue
            if isinstance(leaf.value, Rest) or not leaf.value.is_awaited:
                continue
            if not selected(leaf.name):
                continue
            self.missing.append(leaf.name)
            if leaf.value and strict:
                raise MissingTensors(
                    f"{self.url} holds nothing of {leaf.name!r}, a state that the optimizer has.",
                    hint="Leave it out of the load.",
                    details={"missing": [leaf.name]},
                )
        return states

    def _stored_as_they_are(self, index: Source) -> frozenset[int]:
        """Return the addresses of the state's tensors whose stored dtype equals their own."""
        tensors = [
            (spec, memory.tensor)
            for spec, memory in zip(self.table.specs, self.table.memory, strict=True)
            if isinstance(memory, TensorMemory) and spec.kind == TENSOR
        ]
        rows = index.find([spec.name for spec, _ in tensors])
        there = (rows >= 0).nonzero()[0]
        found, position = np.unique(rows[there], return_inverse=True)
        dtypes = index.select(found).dtype[position].tolist()
        known = zip((tensors[at] for at in there.tolist()), dtypes, strict=True)
        return frozenset(_address(tensor) for (spec, tensor), dtype in known if spec.dtype == dtype)

    def _make(self, leaf: Leaf, columns: Columns, rows: list[int], follows: bool) -> None:
        """Add leaves and rows for the parts of a leaf. follows: create them in the dtype of the parameter."""
        value, made, new = leaf.value, Made(leaf), list[Leaf]()
        parameter = getattr(value, "parameter", None)
        # A leaf with a source is from get_state_dict; its states may be used without the optimizer.
        if parameter is not None and parameter.is_meta and leaf.source is None:
            raise BadInput(
                f"{leaf.name!r} is the state of a parameter on the meta device, in whose place a load puts "
                "another one: the optimizer would not change the model.",
                hint="Load the model first, or give it memory (to_empty); then make its optimizer.",
                rank=self.table.rank,
            )
        present: dict[str, object] = {}
        if isinstance(value, ParameterState) and value:
            present = {part.name: part.value for part in leaves_of(leaf, self.table.rank)}
        for row in rows:
            name, tensor = columns.names[row], None
            if int(columns.kind[row]) == TENSOR:
                dtype = torch_dtype(int(columns.dtype[row]))
                shape = columns.shape_of(row)
                # Not for counters (shape ()): bfloat16 represents consecutive integers only up to 256.
                if parameter is not None and follows and shape and dtype.is_floating_point:
                    dtype = parameter.dtype if parameter.is_floating_point() else dtype
                # A present tensor that fits is filled in place.
                tensor = present.get(name)
                if (
                    not isinstance(tensor, torch.Tensor)
                    or tensor.dtype != dtype
                    or tuple(tensor.shape) != shape
                ):
                    key = name[len(leaf.name) + 1 :]
                    make = zeros if isinstance(value, list) else value.make
                    tensor = make(key, dtype, shape)
                made.parts[name] = tensor
            new.append(Leaf(name, tensor, partial(made.parts.__setitem__, name), source=leaf.source))
        self.made.append(made)
        table, owner = build_shard_table(new, self.table.rank, self.participants, for_load=True)
        if parameter is not None:
            self._copy_boxes(table, parameter)
        # From here on these are leaves like others: found, read and verified together with them.
        self.owner += [len(self.leaves) + index for index in owner]
        self.leaves += new
        self.table.extend(table)

    def _copy_boxes(self, table: ShardTable, parameter: torch.Tensor) -> None:
        """Copy the box of the parameter's shard to uneven shards; its offset is already agreed."""
        uneven = [
            row
            for row, deferred in enumerate(table.deferred)
            if deferred is not None and table.boxes[row].volume
        ]
        if not uneven:
            return
        # The parameter is also a leaf of the model's state, under another name, with the same memory.
        address = _address(parameter)
        for row in uneven:
            parameter_row = self._parameters.get((address, table.boxes[row].shape))
            if parameter_row is not None:
                table.boxes[row] = self.table.boxes[parameter_row]
            elif table.deferred[row].start == -1:  # type: ignore[union-attr]
                raise BadInput(
                    f"Rank {table.rank} holds a part of {table.specs[row].name!r} whose offset it does not "
                    "know, and its parameter is not in the state.",
                    hint="Load the model together with its optimizer, or let the optimizer take a step "
                    "before.",
                )

    @cached_property
    def _parameters(self) -> dict[tuple[int, Dims], int]:
        """Map the address and shape of each uneven shard to its row."""
        return {
            (memory.tensor.data_ptr(), box.shape): row
            for row, (memory, box, deferred) in enumerate(
                zip(self.table.memory, self.table.boxes, self.table.deferred, strict=True)
            )
            if deferred is not None and isinstance(memory, TensorMemory)
        }

    def _check_shapes(
        self, parts: list[tuple[Leaf, list[int]]], columns: Columns, index: Source, names: list[str]
    ) -> None:
        """Raise ShapeMismatch for states whose parameter was saved with another shape: they would be created
        in that shape."""
        odd = [
            (leaf, row)
            for leaf, rows in parts
            if getattr(leaf.value, "parameter", None) is not None
            for row in rows
            if int(columns.kind[row]) == TENSOR
            and len(shape := columns.shape_of(row)) == leaf.value.parameter.dim() > 0
            and shape != tuple(leaf.value.parameter.shape)
        ]
        if not odd:
            return
        # Sort reversed names: the model's prefix is not known, so the end of a name must be enough.
        reversed_names = sorted((name[::-1], position) for position, name in enumerate(names))
        ends = [end for end, _ in reversed_names]
        candidates: list[tuple[Leaf, int, list[int]]] = []
        for leaf, row in odd:
            name = _PARAMETER.sub("", leaf.name)[::-1] + "."
            first, stop = bisect_left(ends, name), bisect_left(ends, name[:-1] + "/")
            positions = [position for _, position in reversed_names[first:stop]]
            # An optimizer without its model numbers its parameters, and many unrelated names end in numbers.
            if not name[:-1].isdecimal():
                candidates.append((leaf, row, positions[:8]))
        wanted = np.unique(
            np.asarray([position for _, _, positions in candidates for position in positions], np.int64)
        )
        saved = index.select(wanted)
        for leaf, row, positions in candidates:
            shape = columns.shape_of(row)
            for match in np.searchsorted(wanted, positions).tolist():
                if int(saved.kind[match]) == TENSOR and saved.shape_of(match) == shape:
                    raise ShapeMismatch(
                        f"The checkpoint has an optimizer state {columns.names[row][len(leaf.name) + 1 :]!r} "
                        f"of shape {shape} for a parameter of shape {tuple(leaf.value.parameter.shape)}: "
                        f"{saved.names[match]!r} was saved with another shape.",
                        hint="Build the model as it was saved, or leave the optimizer out of the load.",
                        details={"tensor": columns.names[row]},
                    )

    def _refuse_strangers(self, lazy: list[Leaf], patterns: Patterns, names: list[str]) -> None:
        """Raise MissingTensors if none of an optimizer's states is stored, but others are: its parameters
        have other names."""
        matches = [_PARAMETER.match(leaf.name) for leaf in lazy]
        parents = {match[0][:-1] for match in matches if match is not None}
        known = {leaf.name for leaf in self.leaves}
        for parent in parents:
            first, stop = under(names, parent)
            other = next((name for name in names[first:stop] if name not in known), None)
            if other is not None and is_selected(other, patterns):
                raise MissingTensors(
                    f"{self.url} has nothing of {lazy[0].name!r}, nor of any other state that this optimizer "
                    f"lacks; it has {other!r}.",
                    hint="Build the model and the optimizer as they were saved, or leave the optimizer out "
                    "of the load.",
                    details={"missing": [leaf.name for leaf in lazy[:100]]},
                )


_PARAMETER = re.compile(r"^(?:.*?\.)?state\.")
"""The prefix of a state's name, before the parameter's name or number."""


def _address(parameter: torch.Tensor) -> int:
    """Return the address of a parameter, or of this rank's shard of it."""
    local = local_of(parameter)
    # An empty shard has no address, but with FSDP2 its storage has: shards are padded.
    return local.data_ptr() if local.numel() else local.untyped_storage().data_ptr()


def under(names: list[str], parent: str) -> tuple[int, int]:
    """Return where the names under `parent` begin and end in a sorted list."""
    return bisect_left(names, f"{parent}."), bisect_left(names, f"{parent}/")  # the character after the dot


def refuse_empty(url: str, empty: list[str], index: Source) -> None:
    """Raise MissingTensors for empty dicts of the state if the checkpoint has values under their names:
    skipping the dicts would silently lose these values."""
    have = index.names() if empty else []
    for name in empty:
        first, stop = under(have, name)
        if first == stop:
            continue
        groups = f"{name.rpartition('.')[0]}.param_groups"
        begin, end = under(have, groups)
        optimizer = index.find_one(groups) >= 0 or begin < end
        raise MissingTensors(
            f"{name!r} is empty in the state, but {url} holds {have[first]!r} and more under it.",
            hint="An optimizer has no state before its first step. Put the optimizer itself into the state, "
            "or what holdfast.get_state_dict gives for it: a load makes its states then. Or leave it out "
            "of the load."
            if optimizer
            else "Give the values that are to be filled there, as the module's own state_dict() has them, or "
            f"as holdfast.load(path, include=[{name!r}]) returns them; or leave it out of the load.",
            details={"missing": [name]},
        )
