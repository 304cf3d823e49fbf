"""A user's nested state as named leaves, and loaded values back into it.

Dicts are walked always, lists and tuples only where tensors are inside (as torch DCP does); the
path, joined by dots, is the name. What has `state_dict` and `load_state_dict` is asked for its
state; on load it gets it back. Everything that is not a tensor is an object.

Such methods are the user's, and may issue collectives. So they are called in the order of names, which is the
same on all ranks whatever the order of their dicts is; torch DCP does so, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.errors import BadInput
from holdfast.format import objects
from holdfast.format.names import name_of_rank
from holdfast.layout.box import Box
from holdfast.layout.tensor import CODE_OF, OBJECT, Replica, TensorSpec, matches
from holdfast.plan.shard_table import ShardTable
from holdfast.state.dtensor import add_dtensor
from holdfast.state.live import LiveDict, LiveList, OpenDict, ParameterState, Rest, Source, StateDict
from holdfast.state.memory import BytesMemory, Part, TensorMemory, add_tensor, spec_of
from holdfast.state.meta import is_meta, materialize
from holdfast.state.modules import load_module
from holdfast.state.optimizer_state import load_optimizer, with_lazy_states
from holdfast.state.sharded import add_checkpointable, add_sharded, is_checkpointable
from holdfast.state.structure import (
    STRUCTURE,
    Stateful,
    describe,
    has_tensors,
    is_empty,
    is_nested,
    is_stateful,
    join,
)
from holdfast.state.subclasses import inner_tensors, is_dtensor, is_sharded_tensor, is_wrapper, settled
from holdfast.state.tensors import PerRank, Shard

UINT8 = CODE_OF["uint8"]
Patterns = tuple[Sequence[str] | None, Sequence[str] | None]
"""include, exclude"""


@dataclass(slots=True)
class Leaf:
    """One value of the state: its name and how to put another in its place."""

    name: str
    value: Any
    put: Callable[[Any], None]
    optional: bool = False
    private: bool = False
    """It is this rank's own (PerRank): no other rank holds the name."""
    converts: bool = False
    """A load converts another dtype to this tensor's, as torch DCP and Megatron do."""
    fits: bool = False
    """A load fills what the stored shape and this tensor's have in common, and zeroes the rest: a vocabulary
    that is padded differently."""
    source: Source | None = None
    """What is told once a load has filled it, if its container is live."""
    outer: torch.Tensor | None = None
    """The wrapper tensor that this one is a part of."""
    patterns: Patterns = (None, None)
    """Which parts of it are wanted, where it is an optimizer's state."""
    made: bool = False
    """A load has made its tensor, which is to be put in the place of one on the meta device."""

    def is_empty(self) -> bool:
        """Is it a dict with nothing in it?"""
        return type(self.value) is dict and not self.value


@dataclass
class Flat:
    """A state taken apart."""

    leaves: list[Leaf] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    """To be called once everything is loaded: load_state_dict of stateful values, innermost first."""


def flatten(state: StateDict, rank: int) -> Flat:
    """All leaves, in the order of the state. Two leaves under one name are an error."""
    # A module or an optimizer alone, without a dict around it: its names have no prefix.
    if is_stateful(state):
        state = {"": state}
    if not isinstance(state, Mapping):
        raise BadInput(f"The state must be a dict of names and values, not {type(state).__name__}.")
    flat = Flat()
    _walk(state, "", _fixed, flat, rank)
    seen: dict[str, Leaf] = {}
    for leaf in flat.leaves:
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
    return flat


def _walk(
    value: object, name: str, put: Callable[[object], None], flat: Flat, rank: int, private: bool = False
) -> None:
    leaves = flat.leaves
    first = len(leaves)  # from here on they are this value's, whichever branch adds them
    if isinstance(value, LiveDict | LiveList):
        # First of all: it may have been built before the optimizer's first step (docs/decisions/0012).
        value.look_again()
    if isinstance(value, torch.Tensor):
        _walk_tensor(value, name, put, flat, private)
    # Before Mapping, which it is, too: of an empty one the names are not known yet, and a nested one
    # needs a description of how it is built. Both are one leaf here, and taken apart later.
    elif isinstance(value, ParameterState) and (not value or is_nested(value, value.parameter)):
        leaves.append(Leaf(name, value, value.fill, private=private))
    elif isinstance(value, Mapping):
        _walk_mapping(value, name, flat, rank, private)
        if not value and name:
            # An empty dict is a leaf, so that a load sees it: the checkpoint may have a whole subtree there.
            leaves.append(Leaf(name, {}, put, private=private))
        if isinstance(value, LiveDict | OpenDict):
            leaves += [
                Leaf(join(name, key) if key else name, rest, rest.fill, private=private)
                for key, rest in value.rest()
            ]
    elif isinstance(value, Shard):
        leaves.append(Leaf(name, value, put))
    elif isinstance(value, PerRank):
        _walk(value.value, name_of_rank(name, rank), _attribute(value), flat, rank, True)
        for leaf in leaves[first:]:
            leaf.optional = value.optional
    elif is_stateful(value):
        _walk_stateful(value, name, flat, rank, private)
    elif isinstance(value, list | tuple) and has_tensors(value):
        _walk_items(value, name, flat, rank, private)
    elif isinstance(value, LiveList):
        leaves.append(Leaf(name, value.plain(), value.replace, private=private))
    else:
        leaves.append(Leaf(name, value, put, private=private))
    if isinstance(value, LiveDict | LiveList) and value.source is not None:
        for leaf in leaves[first:]:
            leaf.source = value.source


_CALLS_NOTHING = (torch.Tensor, str, int, float, bytes, type(None))
_AS_IT_IS = {torch.Tensor, int, float, bool, str, type(None)}


def _walk_mapping(mapping: StateDict, name: str, flat: Flat, rank: int, private: bool) -> None:
    """Its leaves are in its own order. If something of the user's may be called on the way, that is done in
    the order of names."""
    leaves, first = flat.leaves, len(flat.leaves)
    items = list(mapping.items())
    # Sorting costs, so it is done only where a method of the user's may be called on the way.
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
        if type(item) in _AS_IT_IS and type(key) is str:  # the hot path, with no call a leaf
            path = f"{name}.{key}" if name else key
            leaves.append(Leaf(path, item, _setter(mapping, key), private=private))
        else:
            _walk(item, join(name, key), _setter(mapping, key), flat, rank, private)
        if by_name:
            parts[index] = begin, len(leaves) - first
    if by_name:
        # Back into the order of the dict: only the calls were to be in the order of names.
        taken = leaves[first:]
        leaves[first:] = [leaf for index in range(len(items)) for leaf in taken[slice(*parts[index])]]


def _walk_tensor(
    value: torch.Tensor, name: str, put: Callable[[object], None], flat: Flat, private: bool
) -> None:
    """A wrapper is walked as the tensors that it is made of, which a load fills where they lie."""
    # What a collective is still writing must not be copied.
    value = settled(value)
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
    inner = [state]  # a list, because what state_dict returns need not be a dict to fill
    first = len(flat.leaves)
    _walk(state, name, _setter(inner, 0), flat, rank, private)
    leaves = flat.leaves[first:]

    def give_back() -> None:
        if isinstance(value, torch.optim.Optimizer):
            load_optimizer(value, inner[0])
        # load_state_dict copies, which does nothing for a parameter on the meta device.
        elif isinstance(value, torch.nn.Module) and any(leaf.made for leaf in leaves):
            load_module(value, inner[0])
        else:
            value.load_state_dict(inner[0])

    # Appended after those of inner values, so that inner ones take over their states first.
    flat.after.append(give_back)


def _walk_items(value: Sequence[object], name: str, flat: Flat, rank: int, private: bool) -> None:
    items = list(value)
    if all(isinstance(item, Shard) for item in items):
        flat.leaves += [Leaf(name, item, _fixed) for item in items]
        return
    if isinstance(value, tuple) and not all(has_tensors(item) for item in items):
        raise BadInput(
            f"{name!r} is a tuple of tensors and other values, which can't be filled in place by a load; "
            "make it a list."
        )
    for position, item in enumerate(items):
        put = _fixed if isinstance(value, tuple) else _setter(value, position)
        if isinstance(value, LiveList) and isinstance(item, dict):
            # A parameter group may lack what the checkpoint has in it: a count, the rate of a schedule.
            rest = Rest(item.update)
            flat.leaves.append(Leaf(join(name, position), rest, rest.fill, private=private))
        _walk(item, join(name, position), put, flat, rank, private)


def _fixed(value: object) -> None:
    """What stands here is filled in place; nothing else can be put there."""


def _setter(container: Any, key: object) -> Callable[[object], None]:
    def put(value: object) -> None:
        container[key] = value

    return put


def _attribute(holder: PerRank) -> Callable[[object], None]:
    def put(value: object) -> None:
        holder.value = value

    return put


def select(
    leaves: Sequence[Leaf], include: Sequence[str] | None, exclude: Sequence[str] | None
) -> list[Leaf]:
    """The leaves whose names match some pattern of `include` and none of `exclude` (shell patterns).

    A pattern that names a subtree takes all of it: `model` matches `model.layers.0.weight`.
    """
    keep = list(leaves)
    for what, patterns in (("include", include), ("exclude", exclude)):
        if isinstance(patterns, str):
            # Text is a sequence, too: each character would be a pattern.
            raise BadInput(f"{what} takes a list of patterns, not the text {patterns!r}.")
        if patterns is None:
            continue
        for pattern in patterns:
            # A mistyped pattern of `exclude` would save what is to be left out, and one of `include` nothing.
            if not any(matches(leaf.name, pattern) or _may_match(leaf, pattern) for leaf in leaves):
                raise BadInput(
                    f"{what}: no name in the state matches {pattern!r}; the first is {_first(leaves)!r}."
                )
        hit = [any(matches(leaf.name, pattern) for pattern in patterns) for leaf in keep]
        keep = [
            leaf
            for leaf, yes in zip(keep, hit, strict=True)
            # Lazy leaves stay: which of their names match only the checkpoint tells.
            if yes == (what == "include") or (what == "include" and _is_lazy(leaf))
        ]
    for leaf in keep:
        leaf.patterns = include, exclude
    return keep


def _may_match(leaf: Leaf, pattern: str) -> bool:
    """Might a pattern match a name in an optimizer's state that is not known yet?"""
    if not isinstance(leaf.value, ParameterState):
        return False
    begin, name = re.split(r"[*?\[]", pattern, maxsplit=1)[0], f"{leaf.name}."
    return begin.startswith(name) or (begin != pattern and name.startswith(begin))


def _is_lazy(leaf: Leaf) -> bool:
    """Is it not known yet what is in it?"""
    return isinstance(leaf.value, ParameterState | Rest)


def is_selected(name: str, patterns: Patterns) -> bool:
    """Does `select` take a leaf of this name?"""
    include, exclude = patterns
    taken = include is None or any(matches(name, pattern) for pattern in include)
    return taken and not any(matches(name, pattern) for pattern in exclude or ())


def _first(leaves: Sequence[Leaf]) -> str:
    return leaves[0].name if leaves else ""


def leaves_of(leaf: Leaf, rank: int) -> list[Leaf]:
    """The leaves of an optimizer's state that is nested, or zeros in its place, and how it is built."""
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
    """The leaves as shards; the second list says which leaf each row belongs to."""
    table, owner = ShardTable(rank), []
    alone = len(everyone) == 1  # nobody else can have a copy, so this is the only one
    for index, leaf in enumerate(leaves):
        if isinstance(leaf.value, Rest):
            continue
        if isinstance(leaf.value, ParameterState):
            # A load makes these rows once it has seen the checkpoint's names (`loading/lazy_state.py`).
            part, _ = build_shard_table(() if for_load else leaves_of(leaf, rank), rank, everyone)
            table.extend(part)
            owner.extend([index] * len(part))
            continue
        before = len(table)
        try:
            if for_load:
                _make_memory(leaf)
            _add(table, leaf, everyone, (0, 1) if alone or leaf.private else None, for_load)
            leaf.name.encode()  # raises for half of a surrogate pair, which no file can name
        except UnicodeEncodeError:
            raise BadInput(f"The name {leaf.name!r} is not valid Unicode text.") from None
        except BadInput as error:
            error.rank = rank
            raise
        owner.extend([index] * (len(table) - before))
    table.check()
    return table, owner


def _add(
    table: ShardTable, leaf: Leaf, everyone: tuple[int, ...], undeclared: Replica | None, for_load: bool
) -> None:
    name, value = leaf.name, leaf.value
    if isinstance(value, torch.Tensor):
        # First what nearly every leaf is. A subclass is asked in turn what it is.
        if type(value) is torch.Tensor and not is_checkpointable(value):
            add_tensor(table, name, value, undeclared)
        elif is_dtensor(value):
            add_dtensor(table, name, value, everyone, undeclared)
        elif is_sharded_tensor(value):
            add_sharded(table, name, value, everyone, undeclared)
        elif is_checkpointable(value):
            add_checkpointable(table, name, value, undeclared)
        else:
            add_tensor(table, name, value, undeclared)
    elif isinstance(value, Shard):
        add_shard(table, name, value)
    elif isinstance(value, Part):
        table.add(value.spec, value.box, value.replica, value.spec.kind == OBJECT, value.memory)
    else:
        # A load knows the length only from the checkpoint, and makes room then.
        data = b"" if for_load else objects.encode(value, name)
        spec = TensorSpec(name, UINT8, (len(data),), OBJECT)
        table.add(spec, Box((0,), (len(data),)), undeclared, True, BytesMemory(data))


def _make_memory(leaf: Leaf) -> None:
    """Give memory to a tensor on the meta device. Once it is filled it is put in that one's place."""
    value = leaf.value
    if is_meta(value):
        leaf.value, leaf.made = materialize(leaf.name, value, leaf.put is _fixed), True
    elif isinstance(value, Shard) and is_meta(value.tensor):
        leaf.value, leaf.made = copy(value), True
        leaf.value.tensor = materialize(leaf.name, value.tensor)
        leaf.put = lambda made: setattr(value, "tensor", made.tensor)


def add_shard(table: ShardTable, name: str, shard: Shard) -> None:
    spec = spec_of(name, shard.tensor, shard.global_shape)
    box = Box(shard.offset, tuple(shard.tensor.shape))
    table.add(spec, box, shard.replica, False, TensorMemory(shard.tensor), shard.late)
