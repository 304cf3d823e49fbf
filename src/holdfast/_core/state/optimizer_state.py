"""The states of an optimizer's parameters: creating them in a load, checking that they are complete, and
optimizers that are themselves in a state.

No optimizer is recognised by name, but by its settings. A parameter determines where its missing state is
created; the states of other parameters in its group determine what a complete state contains. Only `step` has
a special meaning, as in `torch.optim.Optimizer.load_state_dict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import torch

from holdfast._core.state.dtensor import CHUNKS
from holdfast._core.state.live import OpenDict, ParameterState, State, StateDict
from holdfast._core.state.structure import has_tensors
from holdfast._core.state.subclasses import is_dtensor
from holdfast._core.torch_private import local_of
from holdfast.errors import BadInput, MissingTensors

_STEP = "step"


def make(
    group: Mapping[str, object], parameter: torch.Tensor, key: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Create a tensor for a state that the checkpoint has, where torch's optimizers expect it."""
    if key != _STEP and tuple(shape) == tuple(parameter.shape):
        return like(parameter, dtype)
    if is_dtensor(parameter) and shape:
        raise BadInput(
            f"The checkpoint has an optimizer state {key!r} of shape {tuple(shape)} for a DTensor of shape "
            f"{tuple(parameter.shape)}.",
            hint="How it is to be sharded only the optimizer knows: let it take a step before the load.",
        )
    # torch's optimizers count steps in host memory, except in a CUDA graph (capturable) or fused.
    on_device = key != _STEP or group.get("capturable") or group.get("fused")
    return torch.zeros(tuple(shape), dtype=dtype, device=parameter.device if on_device else "cpu")


def like(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return zeros with the device, strides and placements of the parameter."""
    # zeros_like keeps strides, and mesh and placements of a DTensor: the state is cut as the parameter is.
    made = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if is_dtensor(parameter):  # zeros_like does not copy chunk metadata, which is on the local tensor
        chunks = getattr(local_of(parameter), CHUNKS, None)
        if chunks is not None:
            setattr(local_of(made), CHUNKS, chunks)
    return made


def zeros_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> State:
    """Return zeros for a parameter's state, shaped as the states of other parameters are; {} if this rank has
    none.

    Values that are not shaped as their parameter (`step`) are saved by ranks that have them.
    """
    for other, there in optimizer.state.items():
        shaped = {
            key: value
            for key, value in there.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == other.shape
        }
        # The first one, because nothing else tells what this parameter's state would contain.
        if shaped:
            return {key: like(parameter, value.dtype, value.device) for key, value in shaped.items()}
    return {}


# -- settings -----------------------------------------------------------------------------------------


@cache
def _settings() -> frozenset[str]:
    """Return the names of what torch's optimizers are built with, without those that change no step."""
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    names = (signature(kind).parameters for kind in kinds if issubclass(kind, torch.optim.Optimizer))
    return frozenset(chain.from_iterable(names)) - {
        "params",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
    }


def check_settings(
    optimizer: torch.optim.Optimizer, group: Mapping[str, object], saved: Mapping[str, object]
) -> None:
    """Raise BadInput if a group was saved by another kind of optimizer, whose states this one would take for
    its own: it has settings of torch's optimizers that this one lacks, and lacks some of this one's."""
    # Not by one alone: versions of torch add settings, and schedulers and users keep others there.
    theirs, ours = (saved.keys() - group.keys()) & _settings(), optimizer.defaults.keys() - saved.keys()
    if theirs and ours:
        raise BadInput(
            f"The checkpoint's optimizer was another one than {type(optimizer).__name__}: it was saved with "
            f"{', '.join(sorted(theirs))}, and without {', '.join(sorted(ours))}.",
            hint="Build the optimizer that was saved, or leave it out of the load.",
        )


# -- complete states ----------------------------------------------------------------------------------


class GivenState(NamedTuple):
    """A parameter of a group, and its new state."""

    name: str
    parameter: torch.Tensor
    state: StateDict | None


def check_whole(group: Sequence[GivenState]) -> list[State]:
    """Return the states of a group's parameters, as the optimizer can take them; {} for one that has none.

    A state is incomplete if another parameter of the same shape has all of its keys and more, or if all
    others with as many dimensions do. (Adafactor keeps other values for vectors than for matrices; the keys
    may depend on the parameter's size.) Raises MissingTensors for an incomplete state, unless it lacks only
    `step`: then no rank had taken a step, and all saved zeros.
    """
    alike: dict[object, Counter[frozenset[object]]] = {}
    for _, parameter, state in group:
        if state:
            for kind in (tuple(parameter.shape), parameter.dim()):
                # Counted, so that a state is compared with each set of keys once, not with each state.
                alike.setdefault(kind, Counter())[frozenset(state)] += 1
    return [_whole(given, group, alike) if given.state else {} for given in group]


def _whole(
    given: GivenState, group: Sequence[GivenState], alike: Mapping[object, Counter[frozenset[object]]]
) -> State:
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
            hint="It was saved by another optimizer, or by get_state_dict(missing='zeros'), which knows no "
            "such value; leave the optimizer's state out of the load.",
        )
    return dict(state)


def _lacking(
    mine: frozenset[object],
    same_shape: Counter[frozenset[object]],
    same_dimensions: Counter[frozenset[object]],
) -> frozenset[object]:
    """Return the keys that are missing in a state, according to the other states of its group."""
    more = [keys for keys in same_shape if keys > mine]
    others = [keys for keys in same_dimensions if keys != mine]
    if not more and same_dimensions[mine] == 1 and all(keys > mine for keys in others):
        more = others
    return frozenset().union(*more) - mine


# -- an optimizer that is itself in a state -----------------------------------------------------------


def with_lazy_states(optimizer: torch.optim.Optimizer, state: object) -> object:
    """Return `optimizer.state_dict()` with entries for parameters that have no state yet: a load creates it.

    A state in another layout than torch's is returned as it is.
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
    # Numbers are parameters, and each has an entry; other keys belong to no parameter, and load unchanged.
    whole: State = {**state, "state": OpenDict(states, lambda key: not key.partition(".")[0].isdecimal())}
    if has_tensors(groups):  # otherwise they are one object
        whole["param_groups"] = [OpenDict(group) for group in groups]
    return whole


def load_optimizer(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Call `optimizer.load_state_dict` with the result of `with_lazy_states`, after it was filled.

    torch casts states to their parameter's dtype, and so rounds float32 moments of bfloat16 parameters. Here
    states keep their dtype.
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
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        check_settings(optimizer, group, saved)
    whole = {**state, "state": states, "param_groups": groups}
    # An optimizer with its own load_state_dict decides itself where a state goes, and what it casts.
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(whole)
        return
    given = _arrangement(whole)

    def check(_: object, adapted: StateDict) -> None:
        # Not if a hook of the program has arranged the states.
        if _arrangement(adapted) == given:
            _check_order(optimizer, adapted["param_groups"])

    last_hook = optimizer.register_load_state_dict_pre_hook(check)
    try:
        optimizer.load_state_dict(whole)
    finally:
        last_hook.remove()
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        now = optimizer.state.get(parameter)
        if isinstance(now, dict) and now and number in states:
            optimizer.state[parameter] = _in_dtype_of(states[number], now)


def _arrangement(state: StateDict) -> object:
    """Return what tells which state goes to which position."""
    numbers = [list(group["params"]) for group in state["param_groups"]]
    return {number: id(entry) for number, entry in state["state"].items()}, numbers


def _check_order(optimizer: torch.optim.Optimizer, saved: Sequence[StateDict]) -> None:
    """Raise BadInput if a parameter has another position in the checkpoint: torch assigns states by position.
    Only optimizers that were built with named parameters tell."""
    theirs = _positions(saved)
    for name, here in _positions(optimizer.param_groups).items():
        there = theirs.get(name, here)
        if there != here:
            raise BadInput(
                "The optimizer has its parameters in another order than the checkpoint: "
                f"{name!r} is number {there} there, and number {here} here.",
                hint="States are assigned by position. Build the groups in the same order in every run (a "
                "set has no fixed order), or save what holdfast.get_state_dict(model, optimizer) gives, "
                "which goes by names.",
            )


def _positions(groups: Sequence[StateDict]) -> dict[str, int]:
    found, first = dict[str, int](), 0
    for group in groups:
        found.update((str(name), first + at) for at, name in enumerate(group.get("param_names") or ()))
        first += len(group["params"])
    return found


def _in_dtype_of(loaded: object, cast: object) -> object:
    """Return a state as the optimizer has loaded it, but with the original tensors where it has cast them."""
    if isinstance(loaded, torch.Tensor) and isinstance(cast, torch.Tensor):
        return loaded if loaded.dtype != cast.dtype else cast
    if isinstance(loaded, dict) and isinstance(cast, dict):
        return {key: _in_dtype_of(loaded.get(key), value) for key, value in cast.items()}
    if isinstance(loaded, list | tuple) and type(loaded) is type(cast) and len(loaded) == len(cast):
        return type(cast)(map(_in_dtype_of, loaded, cast))
    return cast
