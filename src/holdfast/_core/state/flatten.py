"""Convert a user's nested state to named leaves, and put loaded values back into it.

Dicts are always walked, lists, tuples and dataclasses only if they contain tensors. The path, joined by
dots, is the name. A value with `state_dict` and `load_state_dict` is walked as its state; a load gives that
back. Everything that is not a tensor is an object.

These methods are user code and may issue collectives. So they are called in the order of names, which is the
same on all ranks even if the order of their dicts is not; torch DCP does so, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from itertools import groupby
from operator import setitem

import torch

from holdfast._core.format import objects
from holdfast._core.format.names import name_of_rank
from holdfast._core.format.records import fields_of
from holdfast._core.layout.box import Box, whole
from holdfast._core.layout.patterns import head_of, is_selected, refuse_text, selector, unmatched
from holdfast._core.layout.tensor import OBJECT
from holdfast._core.plan.shard_table import ShardTable
from holdfast._core.state.dtensor import add_dtensor
from holdfast._core.state.leaf import Flat, Leaf, MergeRule, check_names
from holdfast._core.state.live import LiveDict, LiveList, OpenDict, ParameterState, Rest, StateDict
from holdfast._core.state.memory import Part, TensorMemory, add_plain, plain_address, spec_of
from holdfast._core.state.meta import is_meta, materialize
from holdfast._core.state.modules import load_module
from holdfast._core.state.optimizer_state import load_optimizer, with_lazy_states
from holdfast._core.state.sharded import add_checkpointable, add_sharded, is_checkpointable
from holdfast._core.state.structure import (
    STRUCTURE,
    Stateful,
    describe,
    has_tensors,
    is_empty,
    is_nested,
    is_stateful,
    join,
    refuse_circle,
)
from holdfast._core.state.subclasses import (
    inner_tensors,
    is_dtensor,
    is_one_object,
    is_sharded_tensor,
    is_wrapper,
    settled,
)
from holdfast._core.state.tensors import PerRank, Shard
from holdfast.errors import BadInput


def flatten(state: StateDict, rank: int) -> Flat:
    """Return all leaves, in the order of the state. Raises BadInput if two leaves have the same name."""
    # A module or an optimizer without a dict around it: its names have no prefix.
    if is_stateful(state):
        state = {"": state}
    if not isinstance(state, Mapping):
        raise BadInput(f"The state must be a dict of names and values, not {type(state).__name__}.")
    flat = Flat()
    try:
        _walk(state, "", _fixed, flat, rank)
    except RecursionError:
        refuse_circle(state)
        raise
    if len({leaf.name for leaf in flat.leaves}) < len(flat.leaves):
        check_names(flat.leaves)
    return flat


def _walk(
    value: object, name: str, put: Callable[[object], None], flat: Flat, rank: int, private: bool = False
) -> None:
    leaves = flat.leaves
    first = len(leaves)  # leaves from here on belong to this value
    if isinstance(value, LiveDict | LiveList):
        # First: it may have been built before the optimizer's first step (docs/decisions/0012).
        value.look_again()
    if isinstance(value, torch.Tensor):
        _walk_tensor(value, name, put, flat, private)
    # Checked before Mapping, because a ParameterState is one. The names in an empty state are not known yet,
    # and a nested state needs a description of its structure. Both are one leaf here, and are split later.
    elif isinstance(value, ParameterState) and (not value or is_nested(value, value.parameter)):
        flat.containers[name] = str
        leaves.append(Leaf(name, value, value.fill, private=private))
    elif isinstance(value, Mapping):
        _walk_mapping(value, name, flat, rank, private)
        if name and is_empty(value):
            # An empty dict is a leaf, so that a load sees it: the checkpoint may have a subtree there.
            leaves.append(Leaf(name, {}, _unless_empty(put), private=private))
        if isinstance(value, LiveDict | OpenDict):
            leaves += [
                Leaf(join(name, key) if key else name, rest, rest.fill, private=private)
                for key, rest in value.rest()
            ]
    elif isinstance(value, Shard):
        leaves.append(Leaf(name, value, put))
    elif isinstance(value, PerRank):
        rule = value.merge and MergeRule(name_of_rank(name, rank), value.merge, value.value, flat.states)
        _walk(value.value, name_of_rank(name, rank), partial(setattr, value, "value"), flat, rank, True)
        for leaf in leaves[first:]:
            leaf.optional, leaf.rule = value.optional, rule
    elif is_stateful(value):
        _walk_stateful(value, name, flat, rank, private)
    elif isinstance(value, list | tuple) and has_tensors(value):
        _walk_items(value, name, put, flat, rank, private)
    elif isinstance(value, torch.Generator):
        leaves.append(Leaf(name, value.get_state(), partial(_set_state, value), private=private, made=True))
    elif is_dataclass(value) and has_tensors(value):
        flat.containers[name] = str
        for key, part in fields_of(value):
            _walk(part, join(name, key), partial(object.__setattr__, value, key), flat, rank, private)
    elif isinstance(value, LiveList):
        leaves.append(Leaf(name, value.plain(), partial(setitem, value, slice(None)), private=private))
    else:
        leaves.append(Leaf(name, value, put, private=private))
    if isinstance(value, LiveDict | LiveList) and value.source is not None:
        for leaf in leaves[first:]:
            leaf.source = value.source


_CALLS_NOTHING = (torch.Tensor, str, int, float, bytes, type(None))
_AS_IT_IS = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)}


def _walk_mapping(mapping: StateDict, name: str, flat: Flat, rank: int, private: bool) -> None:
    """Walk a dict. Its leaves keep its order, but values whose methods are called are visited in the order of
    names."""
    leaves, first = flat.leaves, len(flat.leaves)
    items = [(key, mapping[key]) for key in [*mapping.keys()]]  # a TensorDict's items() wrap plain values
    if not isinstance(mapping, dict) and any(
        isinstance(item, torch.Tensor) and mapping[key] is not item for key, item in items
    ):
        raise BadInput(
            f"{name!r} is a {type(mapping).__name__} that makes its tensors anew at each access, so a load "
            "can't fill them.",
            hint="Put the containers that hold the tensors into the state.",
        )
    flat.containers[name] = str
    # The hot path: no call of `_walk` per leaf.
    if {type(item) for _, item in items} <= _AS_IT_IS and {type(key) for key, _ in items} == {str}:
        prefix = f"{name}." if name else ""
        leaves += [
            Leaf(prefix + key, item, partial(setitem, mapping, key), private=private) for key, item in items
        ]
        return
    # Sorting takes time, so it is done only if user code may be called.
    by_name = not all(
        isinstance(item, _CALLS_NOTHING)
        or (type(item) is tuple and all(isinstance(part, _CALLS_NOTHING) for part in item))
        for _, item in items
    )
    parts: dict[int, tuple[int, int]] = {}
    names = [str(key) for key, _ in items] if by_name else []
    for index in sorted(range(len(items)), key=names.__getitem__) if by_name else range(len(items)):
        key, item = items[index]
        begin = len(leaves) - first
        _walk(item, join(name, key), partial(setitem, mapping, key), flat, rank, private)
        if by_name:
            parts[index] = begin, len(leaves) - first
    if by_name:
        # Back into the order of the dict: only the calls had to be in the order of names.
        taken = leaves[first:]
        leaves[first:] = [leaf for index in range(len(items)) for leaf in taken[slice(*parts[index])]]


def _walk_tensor(
    value: torch.Tensor, name: str, put: Callable[[object], None], flat: Flat, private: bool
) -> None:
    """Add a tensor. A wrapper is walked as the tensors that it consists of, which a load fills in place."""
    # A tensor that a collective is still writing must not be copied.
    value = settled(value)
    if is_one_object(value):
        # On the CPU, because the number of a device is not the same on all ranks.
        there = partial(_put_on, value.device, put)
        flat.leaves.append(Leaf(name, value.detach().cpu(), there, private=private))
        return
    if not is_wrapper(value):
        flat.leaves.append(Leaf(name, value, put, private=private))
        return
    first = len(flat.leaves)
    for attribute, inner in inner_tensors(value):
        _walk_tensor(inner, join(name, attribute), _fixed, flat, private)
    for leaf in flat.leaves[first:]:
        leaf.outer = value


def _walk_stateful(value: Stateful, name: str, flat: Flat, rank: int, private: bool) -> None:
    state = value.state_dict()
    if isinstance(value, torch.optim.Optimizer):
        state = with_lazy_states(value, state)
    flat.states[id(value)] = state
    inner = [state]  # in a list, so that a load can replace a state that is not a dict
    first = len(flat.leaves)
    _walk(state, name, partial(setitem, inner, 0), flat, rank, private)
    leaves = flat.leaves[first:]

    def give_back() -> None:
        if isinstance(value, torch.optim.Optimizer):
            load_optimizer(value, inner[0])
        # load_state_dict copies, which does nothing to a parameter on the meta device.
        elif isinstance(value, torch.nn.Module) and any(leaf.made for leaf in leaves):
            load_module(value, inner[0])
        else:
            value.load_state_dict(inner[0])

    # Appended after those of inner values, so that inner values are loaded first.
    flat.after.append((leaves, give_back))


def _walk_items(
    value: Sequence[object], name: str, put: Callable[[object], None], flat: Flat, rank: int, private: bool
) -> None:
    items, first = list(value), len(flat.leaves)
    if all(isinstance(item, Shard) for item in items):
        flat.leaves += [Leaf(name, item, _fixed) for item in items]
        return
    flat.containers[name] = int
    for position, item in enumerate(items):
        set_item = partial(setitem, items if isinstance(value, tuple) else value, position)
        if isinstance(value, LiveList) and isinstance(item, dict):
            # A parameter group may lack values that the checkpoint has: a count, the rate of a schedule.
            rest = Rest(item.update)
            flat.leaves.append(Leaf(join(name, position), rest, rest.fill, private=private))
        _walk(item, join(name, position), set_item, flat, rank, private)
    if isinstance(value, tuple):  # a tuple can't be changed, so it is replaced
        flat.after.append((flat.leaves[first:], lambda: _put_tuple(value, items, put)))


def _put_tuple(value: tuple[object, ...], items: Sequence[object], put: Callable[[object], None]) -> None:
    if any(new is not old for new, old in zip(items, value, strict=True)):
        put(tuple.__new__(type(value), items))


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _put_on(device: torch.device, put: Callable[[object], None], value: object) -> None:
    put(value.to(device) if isinstance(value, torch.Tensor) else value)


def _fixed(value: object) -> None:
    """Ignore the value: this leaf is filled in place, and can't be replaced."""


def _unless_empty(put: Callable[[object], None]) -> Callable[[object], None]:
    """Make a setter that keeps the caller's container: an empty TensorDict has a batch size."""

    def put_more(value: object) -> None:
        if value != {}:
            put(value)

    return put_more


def select(
    leaves: Sequence[Leaf], include: Sequence[str] | None, exclude: Sequence[str] | None
) -> list[Leaf]:
    """Return the leaves whose names match some pattern of `include` and none of `exclude` (shell patterns).

    A pattern that names a subtree selects all of it: `model` matches `model.layers.0.weight`.
    """
    refuse_text(include=include, exclude=exclude)
    if include is None and not exclude:
        return list(leaves)
    lazy = [leaf.name for leaf in leaves if isinstance(leaf.value, ParameterState)]
    for what, patterns in (("include", include), ("exclude", exclude)):
        for pattern in unmatched(patterns, [leaf.name for leaf in leaves]) if patterns else ():
            # A mistyped `exclude` would save what should be left out, a mistyped `include` nothing.
            if not any(_may_match(name, pattern) for name in lazy):
                first = leaves[0].name if leaves else ""
                raise BadInput(f"{what}: no name in the state matches {pattern!r}; the first is {first!r}.")
    keep, is_kept, is_allowed = [], selector((include, exclude)), selector((None, exclude))
    for leaf in leaves:
        # Lazy leaves match every `include`: only the checkpoint tells which of their names do.
        if (is_allowed if isinstance(leaf.value, ParameterState | Rest) else is_kept)(leaf.name):
            leaf.patterns = include, exclude
            keep.append(leaf)
    return keep


def _may_match(state: str, pattern: str) -> bool:
    """Return whether a pattern may match a name in the optimizer's state `state`, whose names are not known
    yet."""
    begin, name = head_of(pattern), f"{state}."
    return begin.startswith(name) or (begin != pattern and name.startswith(begin))


def leaves_of(leaf: Leaf, rank: int) -> list[Leaf]:
    """Return the leaves of a nested optimizer state, or zeros in its place, and the description of its
    structure."""
    content = dict(leaf.value) or leaf.value.zeros()
    flat = Flat()
    if content:
        _walk(content, leaf.name, _fixed, flat, rank, leaf.private)
    full = [inner for inner in flat.leaves if not is_empty(inner.value)]
    selected = [inner for inner in full if is_selected(inner.name, leaf.patterns)]
    if is_nested(content, leaf.value.parameter) and (selected or not full):
        name = join(leaf.name, STRUCTURE)
        selected.append(Leaf(name, describe(content, leaf.value.parameter), _fixed, private=leaf.private))
    return selected


def build_shard_table(
    leaves: Sequence[Leaf], rank: int, everyone: tuple[int, ...], for_load: bool = False
) -> tuple[ShardTable, list[int]]:
    """Return the leaves as shards, and for each row the index of its leaf."""
    table, owner = ShardTable(rank), list[int]()
    alone = len(everyone) == 1  # no other rank can have a copy
    addresses = [plain_address(leaf.value) for leaf in leaves]
    # A model may have 100,000 plain tensors, so they are added together.
    is_plain = [address is not None for address in addresses]
    for alike, run in groupby(range(len(leaves)), is_plain.__getitem__):
        try:
            if alike:
                rows = [*run]
                first, stop = rows[0], rows[-1] + 1
                some = leaves[first:stop]
                add_plain(
                    table,
                    [leaf.name for leaf in some],
                    [leaf.value for leaf in some],
                    addresses[first:stop],
                    [(0, 1) if alone or leaf.private else None for leaf in some],
                )
                owner += rows
                continue
            for index in run:
                before = len(table)
                _add(table, leaves[index], everyone, alone, for_load)
                owner += [index] * (len(table) - before)
        except BadInput as error:
            error.rank = rank
            raise
    table.check()
    return table, owner


def _add(table: ShardTable, leaf: Leaf, everyone: tuple[int, ...], alone: bool, for_load: bool) -> None:
    if isinstance(leaf.value, Rest):
        return
    if isinstance(leaf.value, ParameterState):
        # A load makes these rows after it has read the checkpoint's names (`_core/loading/lazy_state.py`).
        inner = () if for_load else leaves_of(leaf, table.rank)
        table.extend(build_shard_table(inner, table.rank, everyone)[0])
        return
    if for_load:
        _make_memory(leaf)
    name, value = leaf.name, leaf.value
    undeclared = (0, 1) if alone or leaf.private else None
    if isinstance(value, torch.Tensor) and not is_one_object(value):
        if is_dtensor(value):
            add_dtensor(table, name, value, everyone, undeclared)
        elif is_sharded_tensor(value):
            add_sharded(table, name, value, everyone, undeclared)
        elif is_checkpointable(value):
            add_checkpointable(table, name, value, undeclared)
        else:
            spec = spec_of(name, value)
            table.add(spec, whole(spec.shape), undeclared, True, TensorMemory(value))
    elif isinstance(value, Shard):
        spec = spec_of(name, value.tensor, value.global_shape)
        box = Box(value.offset, tuple(value.tensor.shape))
        table.add(spec, box, value.replica, False, TensorMemory(value.tensor), value.late)
    elif isinstance(value, Part):
        table.add(value.spec, value.box, value.replica, value.spec.kind == OBJECT, value.memory)
    else:
        # In a load the length is read from the checkpoint, and memory is allocated then.
        part = Part.object(name, b"" if for_load else objects.encode(value, name))
        table.add(part.spec, part.box, undeclared, True, part.memory)


def _make_memory(leaf: Leaf) -> None:
    """Give a leaf on the meta device a tensor with memory, which replaces the value after it is filled."""
    value = leaf.value
    if is_meta(value):
        leaf.value, leaf.made = materialize(leaf.name, value, leaf.put is _fixed), True
    elif isinstance(value, Shard) and is_meta(value.tensor):
        leaf.value, leaf.made = copy(value), True
        leaf.value.tensor = materialize(leaf.name, value.tensor)
        leaf.put = lambda made: setattr(value, "tensor", made.tensor)
