"""A user's nested state as named leaves, and loaded values back into it.

Dicts are walked always, lists and tuples only where tensors are inside (as torch DCP does); the
path, joined by dots, is the name. What has `state_dict` and `load_state_dict` is asked for its
state; on load it gets it back. Everything that is not a tensor is an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.adapters.dtensor import add_dtensor, is_dtensor
from holdfast.adapters.memory import BytesMemory, Part
from holdfast.adapters.tensors import PerRank, Shard, Unborn, add_shard, add_tensor
from holdfast.errors import BadInput
from holdfast.format import objects
from holdfast.layout.box import Box
from holdfast.layout.tensor import CODE_OF, OBJECT, TensorSpec, matches
from holdfast.plan.holding import Holding

UINT8 = CODE_OF["uint8"]


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


@dataclass
class Flat:
    """A state taken apart."""

    leaves: list[Leaf] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    """To be called once everything is loaded: load_state_dict of stateful values, innermost first."""


def _is_stateful(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor | Shard | PerRank | Unborn) or _is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensors(v) for v in value.values())
    return isinstance(value, list | tuple) and any(_has_tensors(v) for v in value)


def flatten(state: Mapping[Any, Any], rank: int) -> Flat:
    """All leaves, in the order of the state. Two leaves under one name are an error."""
    if _is_stateful(state):
        state = {"": state}
    if not isinstance(state, Mapping):
        raise BadInput(f"The state must be a dict of names and values, not {type(state).__name__}.")
    flat = Flat()
    _walk(state, "", lambda value: None, flat, rank)
    seen: dict[str, Leaf] = {}
    for leaf in flat.leaves:
        if leaf.name in seen and not (
            isinstance(leaf.value, Shard) and isinstance(seen[leaf.name].value, Shard)
        ):
            raise BadInput(
                f"Two values of the state have the name {leaf.name!r} (path elements are joined by dots); rename one."
            )
        seen[leaf.name] = leaf
    return flat


def _walk(
    value: Any, name: str, put: Callable[[Any], None], flat: Flat, rank: int, private: bool = False
) -> None:
    leaves = flat.leaves
    if isinstance(value, torch.Tensor):
        leaves.append(Leaf(name, value, put, private=private))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(item, torch.Tensor) and type(key) is str:  # the hot path, with no call a leaf
                path = f"{name}.{key}" if name else key
                leaves.append(Leaf(path, item, _setter(value, key), private=private))
                continue
            _walk(item, _join(name, key), _setter(value, key), flat, rank, private)
        if not value and name:
            leaves.append(Leaf(name, {}, put, private=private))
    elif isinstance(value, Shard):
        leaves.append(Leaf(name, value, put))
    elif isinstance(value, Unborn):
        leaves.append(Leaf(name, value, put, private=private))
    elif isinstance(value, PerRank):
        first = len(leaves)
        _walk(value.value, f"{name}@{rank}", _attribute(value), flat, rank, True)
        for leaf in leaves[first:]:
            leaf.optional = value.optional
    elif _is_stateful(value):
        inner = [value.state_dict()]  # a list, because what it returns need not be a dict to fill
        _walk(inner[0], name, _setter(inner, 0), flat, rank, private)
        flat.after.append(lambda: value.load_state_dict(inner[0]))
    elif isinstance(value, list | tuple) and _has_tensors(value):
        items = list(value)
        if all(isinstance(item, Shard) for item in items):
            for item in items:
                leaves.append(Leaf(name, item, lambda loaded: None))
            return
        if isinstance(value, tuple) and not all(_has_tensors(item) for item in items):
            raise BadInput(
                f"{name!r} is a tuple of tensors and other values, which can't be filled in place by a load; make it a list."
            )
        for position, item in enumerate(items):
            _walk(item, _join(name, position), _setter(value, position), flat, rank, private)
    else:
        leaves.append(Leaf(name, value, put, private=private))


def _join(name: str, key: Any) -> str:
    if not isinstance(key, str | int | float | bool | tuple) and key is not None:
        raise BadInput(f"A dict under {name!r} has the key {key!r}; names are made of text and numbers.")
    text = str(key)
    return f"{name}.{text}" if name and text else name or text


def _setter(container: Any, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _attribute(holder: PerRank) -> Callable[[Any], None]:
    def put(value: Any) -> None:
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
            raise BadInput(f"{what} takes a list of patterns, not the text {patterns!r}.")
        if patterns is None:
            continue
        for pattern in patterns:
            unborn = any(
                isinstance(leaf.value, Unborn) for leaf in leaves
            )  # what it may hold is not known yet
            if not unborn and not any(matches(leaf.name, pattern) for leaf in leaves):
                raise BadInput(
                    f"{what}: no name in the state matches {pattern!r}; the first is {_first(leaves)!r}."
                )
        hit = [any(matches(leaf.name, pattern) for pattern in patterns) for leaf in keep]
        keep = [
            leaf
            for leaf, yes in zip(keep, hit, strict=True)
            if yes == (what == "include") or (what == "include" and isinstance(leaf.value, Unborn))
        ]
    for leaf in keep:
        if isinstance(leaf.value, Unborn) and leaf.value.zeros:
            leaf.value = _selected(leaf, include, exclude)
    return keep


def _selected(leaf: Leaf, include: Sequence[str] | None, exclude: Sequence[str] | None) -> Unborn:
    value: Unborn = leaf.value
    zeros = {
        key: tensor
        for key, tensor in value.zeros.items()
        if is_selected(f"{leaf.name}.{key}", include, exclude)
    }
    return Unborn(value.like, value.make, zeros)


def is_selected(name: str, include: Sequence[str] | None, exclude: Sequence[str] | None) -> bool:
    """Does `select` take a leaf of this name?"""
    taken = include is None or any(matches(name, pattern) for pattern in include)
    return taken and not any(matches(name, pattern) for pattern in exclude or ())


def _first(leaves: Sequence[Leaf]) -> str:
    return leaves[0].name if leaves else ""


def hold(
    leaves: Sequence[Leaf], rank: int, everyone: tuple[int, ...], for_load: bool = False
) -> tuple[Holding, list[int]]:
    """The leaves as shards; the second list says which leaf each row belongs to."""
    held, owner = Holding(rank), []
    alone = len(everyone) == 1
    for at, leaf in enumerate(leaves):
        value = leaf.value
        if isinstance(value, Unborn):
            zeros = {} if for_load else value.zeros
            part, _ = hold(
                [Leaf(f"{leaf.name}.{key}", tensor, leaf.put) for key, tensor in zeros.items()],
                rank,
                everyone,
            )
            held.extend(part)
            owner.extend([at] * len(part))
            continue
        before = len(held)
        undeclared = (0, 1) if alone or leaf.private else None
        try:
            if isinstance(value, Shard):
                add_shard(held, leaf.name, value)
            elif isinstance(value, Part):
                held.add(value.spec, value.box, value.replica, value.spec.kind == OBJECT, value.memory)
            elif isinstance(value, torch.Tensor):
                if is_dtensor(value):
                    add_dtensor(held, leaf.name, value, everyone, undeclared)
                else:
                    add_tensor(held, leaf.name, value, undeclared)
            else:
                data = b"" if for_load else objects.encode(value, leaf.name)
                spec = TensorSpec(leaf.name, UINT8, (len(data),), OBJECT)
                held.add(spec, Box((0,), (len(data),)), undeclared, True, BytesMemory(data))
            leaf.name.encode()
        except UnicodeEncodeError:
            raise BadInput(f"The name {leaf.name!r} is not valid Unicode text.") from None
        except BadInput as error:
            error.rank = rank
            raise
        owner.extend([at] * (len(held) - before))
    held.check()
    return held, owner
