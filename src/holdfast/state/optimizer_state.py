"""The states that an optimizer keeps for its parameters: what a load makes, what is whole, and an optimizer
that is in a state as it is.

No optimizer is known by name here. Where a state that was never made is to lie, its parameter says; what
belongs to a state, the states of other parameters of the same group say. Only `step` has a meaning of its
own, as it has in `torch.optim.Optimizer.load_state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from holdfast.errors import BadInput, MissingTensors
from holdfast.state.dtensor import CHUNKS
from holdfast.state.live import OpenDict, ParameterState, State, StateDict
from holdfast.state.structure import has_tensors
from holdfast.state.subclasses import is_dtensor

_STEP = "step"


def make(
    group: Mapping[str, object], parameter: torch.Tensor, key: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor for a state that the checkpoint has: where torch's optimizers want it."""
    if key != _STEP and tuple(shape) == tuple(parameter.shape):
        return like(parameter, dtype)
    if is_dtensor(parameter) and shape:
        raise BadInput(
            f"The checkpoint has an optimizer state {key!r} of shape {tuple(shape)} for a DTensor of shape "
            f"{tuple(parameter.shape)}.",
            hint="How it is to be sharded only the optimizer knows: let it take a step before the load.",
        )
    # torch's optimizers count steps in host memory, but for those that run inside a CUDA graph or one kernel.
    on_device = key != _STEP or group.get("capturable") or group.get("fused")
    return torch.zeros(tuple(shape), dtype=dtype, device=parameter.device if on_device else "cpu")


def like(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Zeros that lie as the parameter does."""
    # zeros_like keeps strides, and of a DTensor mesh and placements: the state is cut as the parameter is.
    made = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if is_dtensor(parameter):  # chunk metadata stands on the local tensor, and would stay behind
        chunks = getattr(parameter._local_tensor, CHUNKS, None)
        if chunks is not None:
            setattr(made._local_tensor, CHUNKS, chunks)  # type: ignore[attr-defined]
    return made


def zeros_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> State:
    """Zeros for a parameter's state, shaped as the states of other parameters are. Nothing, if there are none
    on this rank.

    What is not shaped as its parameter (`step`) is said by ranks that have it.
    """
    for other, there in optimizer.state.items():
        shaped = {
            key: value
            for key, value in there.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == other.shape
        }
        # The first one stands for all: nothing else here tells what this parameter's state would have.
        if shaped:
            return {key: like(parameter, value.dtype, value.device) for key, value in shaped.items()}
    return {}


# -- what belongs to a state --------------------------------------------------------------------------


class Given(NamedTuple):
    """A parameter of a group, and the state that is to become its own."""

    name: str
    parameter: torch.Tensor
    state: StateDict | None


def check_whole(group: Sequence[Given]) -> list[State]:
    """The states of a group's parameters, as the optimizer can take them; {} for one that has none.

    A state is a part if another parameter of the same shape has all that it has and more, or if all others
    with as many dimensions have. (Adafactor keeps other values for vectors than for matrices; what a
    parameter has may depend on its size.) Raises MissingTensors for a part, but for one that lacks `step`
    only: no rank had taken one, and all saved zeros.
    """
    alike: dict[object, Counter[frozenset[object]]] = {}
    for _, parameter, state in group:
        if state:
            for kind in (tuple(parameter.shape), parameter.dim()):
                # Counted once, so that a state is compared with the kinds of states there are, not with each.
                alike.setdefault(kind, Counter())[frozenset(state)] += 1
    return [_whole(given, group, alike) if given.state else {} for given in group]


def _whole(given: Given, group: Sequence[Given], alike: Mapping[object, Counter[frozenset[object]]]) -> State:
    name, parameter, state = given
    assert state is not None
    for key, value in state.items():
        shaped = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim()
        if shaped and is_dtensor(parameter) and not is_dtensor(value):
            raise BadInput(
                f"The state {key!r} of {name!r} is a whole tensor, and the parameter is a DTensor.",
                hint="Give what get_state_dict gave, without full_state_dict.",
            )
    lacking = _lacking(frozenset(state), alike[tuple(parameter.shape)], alike[parameter.dim()])
    if lacking == {_STEP}:
        theirs = next(other.state[_STEP] for other in group if other.state and _STEP in other.state)
        zero = torch.zeros_like(theirs) if isinstance(theirs, torch.Tensor) else type(theirs)(0)
        return {**state, _STEP: zero}
    if lacking:
        raise MissingTensors(
            f"The checkpoint has a part of the optimizer's state of {name!r}: {min(map(str, lacking))!r} is "
            "not there.",
            hint="It was saved by another optimizer, or by missing='zeros', which knows of no such value; "
            "leave the optimizer's state out of the load.",
        )
    return dict(state)


def _lacking(
    mine: frozenset[object],
    same_shape: Counter[frozenset[object]],
    same_dimensions: Counter[frozenset[object]],
) -> frozenset[object]:
    """What other states have, and this one should."""
    more = [keys for keys in same_shape if keys > mine]
    others = [keys for keys in same_dimensions if keys != mine]
    if not more and same_dimensions[mine] == 1 and all(keys > mine for keys in others):
        more = others
    return frozenset().union(*more) - mine


# -- an optimizer that is in a state as it is ---------------------------------------------------------


def with_lazy_states(optimizer: torch.optim.Optimizer, state: object) -> object:
    """What `optimizer.state_dict()` gave, in which parameters that have no state yet stand, too: a load can
    make theirs.

    One of another layout than torch's is left as it is.
    """
    if not isinstance(state, Mapping):
        return state
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        return state
    numbers = [list(group.get("params", ())) for group in groups if isinstance(group, Mapping)]
    if list(map(len, numbers)) != [len(group["params"]) for group in optimizer.param_groups]:
        return state
    states = dict(state["state"])
    for group, packed in zip(optimizer.param_groups, numbers, strict=True):
        for parameter, number in zip(group["params"], packed, strict=True):
            there = states.get(number) or {}
            states[number] = ParameterState(partial(dict, there), parameter, partial(make, group, parameter))
    # Numbers are parameters, and each has an entry; other keys belong to none, and are taken as they are.
    whole: State = {**state, "state": OpenDict(states, lambda key: not key.partition(".")[0].isdecimal())}
    if has_tensors(groups):  # else they are one object
        whole["param_groups"] = [OpenDict(group) for group in groups]
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """`optimizer.load_state_dict` of what `with_lazy_states` gave, once it is filled.

    torch casts states to their parameter's dtype, which loses what a bfloat16 parameter's float32 moments are
    for. They keep theirs.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        optimizer.load_state_dict(state)
        return
    states = {
        number: dict(entry) if isinstance(entry, ParameterState) else entry
        for number, entry in state["state"].items()
        if not isinstance(entry, ParameterState) or entry
    }
    groups = [dict(group) for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "state": states, "param_groups": groups})
    # One that loads in its own way knows what it casts, and why.
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter)
        if isinstance(now, dict) and now and number in states:
            optimizer.state[parameter] = _in_dtype_of(states[number], now)


def _in_dtype_of(loaded: object, cast: object) -> object:
    """What the optimizer has made of a loaded state, with the tensors that it has cast as they were."""
    if isinstance(loaded, torch.Tensor) and isinstance(cast, torch.Tensor):
        return loaded if loaded.dtype != cast.dtype else cast
    if isinstance(loaded, dict) and isinstance(cast, dict):
        return {key: _in_dtype_of(loaded.get(key), value) for key, value in cast.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(cast) and len(loaded) == len(cast):
        return type(cast)(map(_in_dtype_of, loaded, cast))
    return cast
