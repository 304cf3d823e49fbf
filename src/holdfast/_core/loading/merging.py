"""Per-rank values that a merge function (`PerRank(merge=)`, a rule) computes if the set of ranks has changed.

Every rank reads the stored values of all ranks, so no communication is needed. The values are small: random
number generator states, positions in the data. Rules run before the state is filled, so a failing rule has
changed nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast._core.base.values import told
from holdfast._core.format import objects
from holdfast._core.format.limits import bounded_memory
from holdfast._core.io.source import Source
from holdfast._core.layout.box import whole
from holdfast._core.layout.patterns import selector
from holdfast._core.layout.tensor import OBJECT, listed
from holdfast._core.loading.boxes import Wanted, read_boxes
from holdfast._core.loading.request import LoadRequest
from holdfast._core.state.flatten import flatten
from holdfast._core.state.from_names import joined
from holdfast._core.state.leaf import Leaf, MergeRule
from holdfast._core.state.live import ParameterState, Rest, State
from holdfast._core.state.memory import Part
from holdfast._core.state.subclasses import is_one_object
from holdfast._core.state.tensors import PerRank, Shard
from holdfast.errors import BadInput, LoadFailed


@dataclass
class Merged:
    """Results of the rules."""

    values: dict[int, object] = field(default_factory=dict)
    """By index of the leaf: a tensor to copy into the leaf's tensor, or an object."""
    rows: list[int] = field(default_factory=list)
    """Rows of the checkpoint's index that were read for the rules."""
    bytes_read: int = 0

    def fill(self, leaves: Sequence[Leaf]) -> dict[int, object]:
        """Copy the resulting tensors into the tensors of the leaves. Return the objects, by index of leaf."""
        with torch.no_grad():
            for at, value in self.values.items():
                if _is_tensor(leaves[at].value):
                    leaves[at].value.copy_(value)
        return {at: value for at, value in self.values.items() if not _is_tensor(leaves[at].value)}


def merge_ranks(
    index: Source, request: LoadRequest, leaves: Sequence[Leaf], tick: Callable[[], None]
) -> Merged:
    """Compute the values of all rules whose stored value was saved by other ranks. tick: called after each.

    Raises LoadFailed if a rule fails, or its result does not match the value in the state; BadInput for
    a value of a type that rules do not support.
    """
    made, by_rule = Merged(), dict[int, list[int]]()
    for at, leaf in enumerate(leaves):
        if leaf.rule is not None:
            by_rule.setdefault(id(leaf.rule), []).append(at)
    names = index.names() if by_rule else []
    for group in by_rule.values():
        rule = leaves[group[0]].rule
        assert rule is not None
        stored = _stored(names, _base(rule))
        if stored and not _saved_by_these(index, request, stored):
            _merge(index, request, rule, {leaves[at].name: at for at in group}, leaves, stored, made)
            tick()
    return made


def _base(rule: MergeRule) -> str:
    return rule.name.rpartition("@")[0]


def _stored(names: Sequence[str], base: str) -> dict[int, dict[str, str]]:
    """Return the stored names of a per-rank value, by saving rank and by path within the value."""
    found: dict[int, dict[str, str]] = {}
    first, stop = (bisect_left(names, base + end) for end in "@A")  # A: the character after @
    for name in names[first:stop]:
        rank, _, path = name[len(base) + 1 :].partition(".")
        if rank.isdecimal():
            found.setdefault(int(rank), {})[path] = name
    return dict(sorted(found.items()))


def _saved_by_these(index: Source, request: LoadRequest, saved: Iterable[int]) -> bool:
    """Return whether this load and the save have the same ranks. Not all of them need to have the value."""
    here, count = set(request.call.participants), index.about.get("ranks")
    return here.issuperset(saved) and (len(here) == count if isinstance(count, int) else here == set(saved))


def _merge(
    index: Source,
    request: LoadRequest,
    rule: MergeRule,
    own: Mapping[str, int],
    leaves: Sequence[Leaf],
    stored: Mapping[int, Mapping[str, str]],
    made: Merged,
) -> None:
    rank, base, selected = request.call.rank, _base(rule), selector(request.patterns)
    wanted = [name for paths in stored.values() for name in paths.values()]
    if not all(map(selected, wanted)):
        raise BadInput(
            f"include and exclude select a part of {base!r}, whose rule (PerRank, merge) takes whole values.",
            hint=f"Select all of it: {base}@*.",
            rank=rank,
        )
    for name, at in own.items():
        value = leaves[at].value
        if isinstance(value, torch.Tensor | Shard | Part | ParameterState | Rest) and type(value) not in (
            torch.Tensor,
            torch.nn.Parameter,
        ):
            raise BadInput(
                f"{name!r} is a {type(value).__name__}, and a rule (PerRank, merge) makes plain values only.",
                hint="Give a plain tensor of this rank.",
                rank=rank,
            )
    present = {name[len(rule.name) :].removeprefix("."): leaves[at].value for name, at in own.items()}
    parts = _read(index, request, wanted, {name: present.get(path) for _, name, path in _each(stored)}, made)
    like = _plain(rule.value, rule.states)
    values = {
        saver: parts[paths[""]] if "" in paths else joined({path: parts[paths[path]] for path in paths}, like)
        for saver, paths in stored.items()
    }
    try:
        result = rule.merge(values)
        if result is None and rule.value is not None:
            raise TypeError("it returned None")  # usually a forgotten `return`
        new = {leaf.name: leaf.value for leaf in flatten({base: PerRank(result)}, rank).leaves}
        _check(new, {name: leaves[at].value for name, at in own.items()}, request.cast)
    except Exception as error:
        raise LoadFailed(
            f"The rule (PerRank, merge) of {base!r} failed on rank {rank}, with the values of ranks "
            f"{listed([*map(str, stored)], str)}: {told(error)}",
            rank=rank,
            hint="Nothing was put into the state of this rank. Mend the rule, and load again.",
        ) from error
    made.values.update({at: new[name] for name, at in own.items()})


def _each(stored: Mapping[int, Mapping[str, str]]) -> Iterable[tuple[int, str, str]]:
    return ((saver, name, path) for saver, paths in stored.items() for path, name in paths.items())


def _read(
    index: Source, request: LoadRequest, names: Sequence[str], like: Mapping[str, object], made: Merged
) -> dict[str, object]:
    """Read values by name. like: the present values that decoded objects will replace, by name."""
    rows = np.unique(index.find(names))
    specs = index.select(rows).specs()
    with bounded_memory(f"Values of all ranks in {request.store.url}"):
        tensors, _ = read_boxes(
            request.store, index, [Wanted(spec, whole(spec.shape), spec.dtype) for spec in specs]
        )
        made.rows += rows.tolist()
        made.bytes_read += sum(tensor.nbytes for tensor in tensors)
        return {
            spec.name: objects.decode(
                index.object_prefix + tensor.numpy().tobytes(), spec.name, like.get(spec.name)
            )
            if spec.kind == OBJECT
            else tensor
            for spec, tensor in zip(specs, tensors, strict=True)
        }


def _plain(value: object, states: Mapping[int, object]) -> object:
    """Return a value in which stateful values are replaced by their states."""
    value = states.get(id(value), value)
    if isinstance(value, Mapping):
        return {key: _plain(value[key], states) for key in value}
    return [_plain(part, states) for part in value] if isinstance(value, list) else value


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not is_one_object(value)


def _check(new: State, present: State, cast: bool) -> None:
    """Raise TypeError for values that can't replace the present ones."""
    lacking, more = sorted(present.keys() - new.keys()), sorted(new.keys() - present.keys())
    if lacking or more:
        raise TypeError(
            "it returned a value"
            + (f" without {listed(lacking)}" if lacking else "")
            + (f" with {listed(more)}, which the state has not" if more else "")
        )
    for name, value in new.items():
        here = present[name]
        if _is_tensor(value) != _is_tensor(here):
            raise TypeError(
                f"it returned a {type(value).__name__} for {name!r}, the state has a {type(here).__name__}"
            )
        if _is_tensor(value) and (value.shape != here.shape or (value.dtype != here.dtype and not cast)):
            raise TypeError(
                f"it returned {str(value.dtype)[6:]}{list(value.shape)} for {name!r}, the state has "
                f"{str(here.dtype)[6:]}{list(here.shape)}"
            )
