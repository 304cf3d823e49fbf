"""The structure of nested values: the containers to walk, the names of parts, and how to rebuild a value.

Names alone don't tell a list from a dict with numbers as keys, nor which class wraps `codes` and `scale`. A
state that is filled in place does not need to know. An optimizer's state that a load has to create is stored
with a description of its containers, if it has any.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch

from holdfast._core.base.values import Json, told
from holdfast._core.format.records import fields_of, is_record
from holdfast._core.state.from_names import listed
from holdfast._core.state.live import ParameterState, State, StateDict
from holdfast._core.state.subclasses import allowed_type, inner_tensors, is_wrapper, same_memory, type_name
from holdfast._core.state.tensors import PerRank, Shard
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError

STRUCTURE = "__structure__"
"""The name of the description of a nested state, under the state's own name."""
LEAF = 0
"""The description of a value that is stored as it is."""
Description: TypeAlias = Json
"""LEAF, or a list that begins with the kind of a container. `describe` makes it; one from a checkpoint may be
invalid."""
_ABSENT = object()


class Stateful(Protocol):
    """An object with a state: modules, optimizers, schedulers, data loaders."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


def join(name: str, key: object) -> str:
    """Return the name of a part: the path to it, joined by dots."""
    if not isinstance(key, str | int | float | bool | tuple) and key is not None:
        raise BadInput(f"A dict under {name!r} has the key {key!r}; names are made of text and numbers.")
    text = str(key)
    return f"{name}.{text}" if name else text


def is_stateful(value: object) -> TypeGuard[Stateful]:
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def has_tensors(value: object) -> bool:
    """Return whether a value contains tensors. Only then is a list split into its items."""
    # Values that are filled in place; a list of plain values is replaced as one object.
    if isinstance(value, torch.Tensor | torch.Generator | Shard | PerRank | ParameterState) or is_stateful(
        value
    ):
        return True
    if isinstance(value, Mapping):
        return any(has_tensors(v) for v in value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return is_record(value) and any(has_tensors(part) for _, part in fields_of(value))
    return isinstance(value, list | tuple) and any(has_tensors(v) for v in value)


def refuse_circle(state: object) -> None:
    """Raise BadInput if a dict, list or tuple of the state contains itself."""
    above: dict[int, str] = {}
    """The containers that the present one lies in, with their names."""
    done: set[int] = set()
    todo: list[tuple[str, object, bool]] = [("", state, False)]
    while todo:
        name, value, is_over = todo.pop()
        if is_over:
            del above[id(value)]
            done.add(id(value))
        elif id(value) in above:
            whole = f"as {above[id(value)]!r}" if above[id(value)] else "as the state itself"
            raise BadInput(f"The state contains itself: {name!r} is the same object {whole}.")
        elif isinstance(value, Mapping | list | tuple) and id(value) not in done:
            above[id(value)] = name
            parts = value.items() if isinstance(value, Mapping) else enumerate(value)
            todo += [(name, value, True), *((join(name, key), part, False) for key, part in parts)]


def is_nested(state: StateDict, parameter: torch.Tensor) -> bool:
    """Return whether a parameter's state is more than a flat dict of plain values. None counts as more,
    because it may stand for a value of any kind."""
    return any(
        type(key) is not str or "." in key or value is None or describe(value, parameter) != LEAF
        for key, value in state.items()
    )


def is_empty(value: object) -> bool:
    """Return whether a value is an empty container. Its description alone represents it."""
    # By its keys: a TensorDict is a mapping, but has no truth value, and its length is its batch size.
    container = value.keys() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list | tuple) and not container


def describe(value: object, parameter: torch.Tensor | None = None) -> Description:
    """Return the containers of a value as a plain value: `["dict", [[key, part], ...]]`, `["list", [part,
    ...]]`, and so on.

    parameter: the parameter that the value is a state of. Tensors are described, too, if their strides are
        neither the parameter's nor row-major.
    """
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, parameter)
    if isinstance(value, Mapping):
        return ["dict", [[key, describe(part, parameter)] for key, part in value.items()]]
    if isinstance(value, list | tuple) and (not value or has_tensors(value)):
        return [
            "tuple" if isinstance(value, tuple) else "list",
            [describe(part, parameter) for part in value],
        ]
    return LEAF


def _describe_tensor(value: torch.Tensor, parameter: torch.Tensor | None) -> Description:
    if type(value) is torch.Tensor:
        # `build` makes row-major tensors anyway; a slice of a larger tensor need not get its strides again.
        if value.layout is not torch.strided or value.is_contiguous() or not _is_dense(value):
            return LEAF
        as_parameter = parameter is not None and (parameter.shape, parameter.stride()) == (
            value.shape,
            value.stride(),
        )
        return LEAF if as_parameter else ["strides", list(value.stride())]
    if not is_wrapper(value):
        return LEAF
    parts = [[name, describe(inner)] for name, inner in inner_tensors(value)]
    context = _plain(value.__tensor_flatten__()[1])  # type: ignore[attr-defined]
    return ["tensor", type_name(value), parts, context, list(value.shape), list(value.stride())]


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether the elements fill the tensor's memory, each once, in some order of its axes."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _plain(context: object) -> object:
    """Convert torch.Size to tuple, which can be stored."""
    if isinstance(context, Mapping):
        return {key: _plain(part) for key, part in context.items()}
    if isinstance(context, tuple):
        return tuple(_plain(part) for part in context)
    return [_plain(part) for part in context] if isinstance(context, list) else context


def _describes_a_state(value: object) -> bool:
    """Return whether a value under `STRUCTURE` describes a state, which is a dict. A user's dict may have
    such a key, too."""
    match value:
        case ["dict", [*parts]]:
            return all(isinstance(part, list) and len(part) == 2 for part in parts)
    return False


def nest(values: Mapping[str, object]) -> State:
    """Return values as nested dicts, with a level for each dot in their names.

    A state that is stored with a description of its containers is built from it. If a prefix of a name is
    itself the name of a value, prefix and remainder form one key. An optimizer's dict has the keys of its
    `state_dict`.
    """
    end = f".{STRUCTURE}"
    described = {
        name.removesuffix(end): value
        for name, value in values.items()
        if name.endswith(end) and _describes_a_state(value)
    }
    made = {name: build(description, name, values) for name, description in described.items()}
    root: State = {}
    for name, value in sorted({**values, **made}.items()):
        parts = name.split(".")
        if any(".".join(parts[:count]) in described for count in range(1, len(parts))):
            continue
        node = root
        for count, part in enumerate(parts[:-1]):
            inner = node.setdefault(part, {})
            if type(inner) is not dict:
                parts = parts[count:]
                break
            node = inner
        else:
            parts = parts[-1:]
        node[".".join(parts)] = value
    leaves = {id(value) for value in (*values.values(), *made.values())}
    nodes = [root]
    while nodes:
        node = nodes.pop()
        nodes += [part for part in node.values() if type(part) is dict]
        if "param_groups" in node and type(node.get("state")) is dict:
            _as_optimizer(node, leaves)
    return root


def _as_optimizer(node: State, leaves: Container[int]) -> None:
    """Convert the keys of states from text to the numbers of parameters in the groups. An optimizer's
    `load_state_dict` would accept text keys without an error, and not use their states.

    A list or a tuple with tensors in it is stored in parts. It becomes a tuple in a group, as all optimizers
    of torch have their `betas`, and a list in a state.
    """
    groups, is_whole = node["param_groups"], id(node["param_groups"]) in leaves
    # torch DCP saves the parts of this list.
    if type(groups) is dict and sorted(groups) == sorted(map(str, range(len(groups)))):
        groups = node["param_groups"] = [groups[str(number)] for number in range(len(groups))]
    if not isinstance(groups, list):
        return
    known = [group.get("params") for group in groups if isinstance(group, dict)]
    numbers = {str(key): key for keys in known if isinstance(keys, list) for key in keys if type(key) is int}
    states = node["state"] = {numbers.get(key, key): part for key, part in node["state"].items()}
    # Other groups and states are by names of parameters, and a level in them may be a part of a name.
    for group in () if is_whole else groups:
        if isinstance(group, dict) and "params" in group:
            for key, value in group.items():
                made = listed(value, leaves)
                group[key] = tuple(made) if isinstance(made, list) and made is not value else made
    for state in (states[number] for number in numbers.values() if number in states):
        if type(state) is dict and id(state) not in leaves:
            state.update({key: listed(value, leaves) for key, value in state.items()})


def build(
    description: Description, name: str, values: Mapping[str, object], present: object = None
) -> object:
    """Build a value from its parts, given in `values` by name. A wrapper tensor of `present` is kept if its
    parts were filled in place."""
    try:
        value = _build(description, name, values, present)
        return {} if value is _ABSENT else value
    except HoldfastError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(
            f"The checkpoint says how {name!r} is built, and it can't be built so: {told(error)}"
        ) from None


def _build(description: Description, name: str, values: Mapping[str, object], present: object) -> object:
    if description == LEAF:
        return values.get(name, _ABSENT)
    kind, *rest = description
    if kind == "strides":
        value = values.get(name, _ABSENT)
        return _restrided(value, tuple(rest[0])) if isinstance(value, torch.Tensor) else value
    if kind == "tensor":
        return _build_tensor(name, values, present, *rest)
    if kind == "dict":
        parts = {
            key: _build(part, join(name, key), values, _part_of(present, key, isinstance(present, Mapping)))
            for key, part in rest[0]
        }
        # include= or exclude= may leave out parts; a container without any part is absent, too.
        there = {key: value for key, value in parts.items() if value is not _ABSENT}
        return there if there or not parts else _ABSENT
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is no kind of container")
    items = [
        _build(part, join(name, index), values, _part_of(present, index, isinstance(present, list | tuple)))
        for index, part in enumerate(rest[0])
    ]
    if items and all(item is _ABSENT for item in items):
        return _ABSENT
    items = [None if item is _ABSENT else item for item in items]
    return tuple(items) if kind == "tuple" else items


def _restrided(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the same elements with the strides of the saved tensor: with other strides, matrix products may
    differ in bits."""
    if value.stride() == strides or not value.numel():
        return value
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    if not _is_dense(made):
        raise ValueError(f"strides {strides} of a tensor of shape {tuple(value.shape)}")
    return made.copy_(value)


def _part_of(value: Any, key: object, is_container: bool) -> object:
    """Return the present value under a key; None if there is none."""
    try:
        return value[key] if is_container else None
    except LookupError:
        return None


def _build_tensor(
    name: str,
    values: Mapping[str, object],
    present: object,
    path: str,
    parts: Description,
    context: object,
    shape: Json,
    stride: Json,
) -> object:
    there = dict(inner_tensors(present)) if is_wrapper(present) else {}
    inner = {
        attribute: _build(part, join(name, attribute), values, there.get(attribute))
        for attribute, part in parts
    }
    if any(value is _ABSENT for value in inner.values()):
        return _ABSENT
    # All parts were filled in place: the present wrapper has its new value, and references to it stay valid.
    if inner.keys() == there.keys() and all(
        inner[key] is there[key] or same_memory(inner[key], there[key]) for key in inner
    ):
        return present
    kind = allowed_type(path, name)
    return kind.__tensor_unflatten__(inner, context, torch.Size(shape), tuple(stride))
