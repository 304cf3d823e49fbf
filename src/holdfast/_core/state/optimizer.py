"""A model and its torch optimizers as a state keyed by names: no step is run, nothing is gathered.

The layout is that of `torch.distributed.checkpoint.state_dict`, so checkpoints go both ways: parameters under
their names without what wrappers add to them, moments under `state.<name>.<key>`, hyperparameters under
`param_groups`.

An optimizer creates a parameter's state at its first gradient, so a fresh optimizer has none, and an expert
that no token reached has none either, maybe on one rank only. torch fills the gap with a step of zero
gradients, on those ranks whose state is empty. Here a missing state is an empty `ParameterState`: a load
creates the values that the checkpoint has, a save skips it or, on request, writes zeros. All returned states
are live (`live.py`): each save reads the present values of the optimizer, and each load updates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from holdfast._core.base.values import check_switches
from holdfast._core.state.live import LiveDict, LiveList, ParameterState, Rest, State, StateDict, settle
from holdfast._core.state.modules import ModelView, give, given_of, name_of, names_of
from holdfast._core.state.optimizer_state import GivenState, check_settings, check_whole, make, zeros_of
from holdfast._core.state.structure import is_nested
from holdfast.errors import BadInput

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_state_dict(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: Optimizers = (),
    *,
    options: object = None,
    missing: str = "skip",
    flatten_optimizer_state_dict: bool = False,
) -> tuple[State, State]:
    """`torch.distributed.checkpoint.state_dict.get_state_dict`, without a step or a collective.

    Returns the states of the model and the optimizers, with this rank's own tensors, to save or to load into.
    They can be built once: each save and load reads the current values of the model and the optimizers
    (except entries that you replaced), and a load updates the model and the optimizers; calling
    `set_state_dict` after it is harmless. This holds for these dicts and the dicts in them; a deep copy is a
    snapshot.

    model: a module, or this rank's parts of one (pipeline stages).
    options: torch's `StateDictOptions`; `flatten_optimizer_state_dict`, `ignore_frozen_params` and `strict`
        are used.
    missing: how a save treats a trainable parameter without optimizer state on this rank. "skip" leaves it
        out; it is an error, which names the parameter, if other ranks have state for it. "zeros" saves zeros
        for this rank's part.
    flatten_optimizer_state_dict: store hyperparameters per parameter, as torch does under this name: needed
        if ranks hold different parameters (pipeline stages, experts as separate modules).

    Raises BadInput if two parameters have the same name, if a parameter of the optimizer is not in the model,
    for FSDP1, and for options that gather or scatter.
    """
    _check(options, "get_state_dict")
    flat = flatten_optimizer_state_dict or getattr(options, "flatten_optimizer_state_dict", False)
    if missing not in ("skip", "zeros"):
        raise BadInput(f"missing={missing!r}: give 'skip' or 'zeros'.")
    parts = _parts(model)
    names_of(parts)  # refuses two parameters with the same name, also without an optimizer
    view = OptimizerView(parts, _several(optimizers), missing == "zeros", flat)
    return ModelView(parts, getattr(options, "ignore_frozen_params", False)).state, view.state


def set_state_dict(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: Optimizers = (),
    *,
    model_state_dict: Mapping[str, object],
    optim_state_dict: Mapping[str, object],
    options: object = None,
    strict: bool = True,
) -> None:
    """`torch.distributed.checkpoint.state_dict.set_state_dict`: puts loaded states into the model and the
    optimizers, on this rank alone.

    Takes the result of `get_state_dict` (torch's or ours) after a load has filled it. Tensors of the model
    were filled in place; the optimizer takes the loaded states without a copy. Everything is checked before
    anything is changed.

    model_state_dict: an empty one leaves the model as it is, as in torch.
    options: torch's `StateDictOptions`, as in `get_state_dict`.
    strict: raise an error for names that are only in `model_state_dict` or only in the model.

    Raises MissingTensors if the checkpoint has only a part of some parameter's state, BadInput if there are
    optimizers and optim_state_dict is empty.
    """
    _check(options, "set_state_dict")
    check_switches(strict=strict)
    strict = (
        strict and getattr(options, "strict", True) and not getattr(options, "ignore_frozen_params", False)
    )
    parts, several = _parts(model), _several(optimizers)
    if several and not optim_state_dict:
        raise BadInput(
            "optim_state_dict is empty, and there are optimizers to set.",
            hint="Give what get_state_dict gave, or leave the optimizers out.",
        )
    # Both are checked before either is changed: a refusal must leave model and optimizer as they were.
    changes = _Changes(parts, several, optim_state_dict)
    given = given_of(parts, model_state_dict, strict) if model_state_dict else []
    for part, values in given:
        give(part, values)
    changes.make()
    settle(model_state_dict)
    settle(optim_state_dict)


def _parts(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    parts = list(model) if isinstance(model, Iterable) and not isinstance(model, torch.nn.Module) else [model]
    if not all(isinstance(part, torch.nn.Module) for part in parts):
        raise BadInput(f"model must be a module, or a list of them, not {type(model).__name__}.")
    return parts


def _several(optimizers: Any) -> list[torch.optim.Optimizer]:
    is_one = hasattr(optimizers, "param_groups") or not isinstance(optimizers, Iterable)
    several = [optimizers] if is_one else list(optimizers)
    if not all(hasattr(optimizer, "param_groups") for optimizer in several):
        raise BadInput(f"optimizers must be an optimizer, or a list of them, not {optimizers!r}.")
    return several


def _check(options: object, call: str) -> None:
    for name in ("full_state_dict", "broadcast_from_rank0", "cpu_offload"):
        if getattr(options, name, False):
            raise BadInput(
                f"holdfast.{call} takes no {name}: each rank gives and takes its own part, and any layout "
                "loads.",
                hint=f"Leave {name} out; a save copies to the host by itself.",
            )


# -- from the optimizers ------------------------------------------------------------------------------


class OptimizerView:
    """The optimizers of a model as a live state by names."""

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        zeros: bool,
        flat: bool,
    ) -> None:
        self._parts, self._optimizers, self._zeros = parts, optimizers, zeros
        self._known: dict[int, ParameterState] = {}
        self.state: State
        if flat:
            self.state = LiveDict(self._flat, self, self._rest)
        else:
            self.state = {
                "state": LiveDict(self._states, self),
                "param_groups": LiveList(self._groups, self),
            }

    def loaded(self) -> None:
        """Copy the values that a load put into the state to the optimizers."""
        _Changes(self._parts, self._optimizers, self.state).make()
        settle(self.state)

    def _each(self) -> Iterator[tuple[torch.optim.Optimizer, State, dict[str, torch.Tensor]]]:
        """Yield each group, and its parameters by their names."""
        names, seen = names_of(self._parts), set[str]()
        for optimizer in self._optimizers:
            _check_keys(optimizer)
            for group in optimizer.param_groups:
                mine: dict[str, torch.Tensor] = {}
                for parameter in group["params"]:
                    name = name_of(parameter, names)
                    # A name can have only one state; the other would be lost silently.
                    if name in seen:
                        raise BadInput(
                            f"The parameter {name!r} is in two groups, or in two optimizers; its state has "
                            "one name."
                        )
                    seen.add(name)
                    mine[name] = parameter
                yield optimizer, group, mine

    def _states(self) -> dict[str, ParameterState]:
        states = {
            name: self._state_of(optimizer, group, parameter)
            for optimizer, group, parameters in self._each()
            for name, parameter in parameters.items()
        }
        # Forget states of parameters that are no longer in the optimizer, and so these parameters.
        self._known = {id(state.parameter): state for state in states.values()}
        return states

    def _state_of(
        self, optimizer: torch.optim.Optimizer, group: State, parameter: torch.Tensor
    ) -> ParameterState:
        """Return the state of a parameter: always the same object, so that all references to it see the same
        values."""
        known = self._known.get(id(parameter))  # the id is valid, because the state refers to the parameter
        if known is None:
            known = self._known[id(parameter)] = ParameterState(
                lambda: optimizer.state.get(parameter) or {},
                parameter,
                partial(make, group, parameter),
                partial(zeros_of, optimizer, parameter) if self._zeros and parameter.requires_grad else dict,
                self,
            )
        return known

    def _groups(self) -> list[State]:
        return [{**_hyper(group), "params": list(parameters)} for _, group, parameters in self._each()]

    def _flat(self) -> State:
        """Return torch's flat layout. A state that is empty or nested is under its parameter's name."""
        flat: State = {}
        for optimizer, group, parameters in self._each():
            hyper = _hyper(group)
            for name, parameter in parameters.items():
                flat |= {f"param_groups.{name}.{key}": value for key, value in hyper.items()}
                there = optimizer.state.get(parameter)
                if there and not is_nested(there, parameter):
                    flat |= {f"state.{name}.{key}": value for key, value in there.items()}
                else:
                    flat[f"state.{name}"] = self._state_of(optimizer, group, parameter)
        self._known = {id(v.parameter): v for v in flat.values() if isinstance(v, ParameterState)}
        return flat

    def _rest(self) -> list[tuple[str, Rest]]:
        """Return placeholders for the values that a load may add to groups and states in the flat layout,
        each with its path."""
        return [
            (path, Rest(partial(self._fill, path), make_it, parameter))
            for optimizer, group, parameters in self._each()
            for name, parameter in parameters.items()
            for path, make_it in (
                (f"param_groups.{name}", None),
                (f"state.{name}", partial(make, group, parameter)),
            )
            if path not in self.state and (make_it is None or optimizer.state.get(parameter))
        ]

    def _fill(self, path: str, loaded: StateDict) -> None:
        self.state.update({f"{path}.{key}": value for key, value in loaded.items()})


def _hyper(group: State) -> State:
    # torch sets `param_names` if it was given named parameters; here names are the model's.
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raise BadInput if the optimizer has a state that belongs to no parameter, and so has no name."""
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise BadInput(
                f"{type(optimizer).__name__} keeps a state {key!r} that belongs to no parameter, for which "
                "torch's layout has no place.",
                hint="Put the optimizer itself into the state instead of what get_state_dict gives for it.",
            )


# -- into the optimizers ------------------------------------------------------------------------------


class _Changes:
    """The changes that a state makes to optimizers: checked at construction, before anything is changed."""

    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        optim_state_dict: StateDict,
    ) -> None:
        names = names_of(parts)
        optim = _nested(optim_state_dict) if "param_groups" not in optim_state_dict else optim_state_dict
        by_name: dict[str, State] = {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in optim.get("param_groups", ())
            for name in group["params"]
        }
        states = optim.get("state", {})
        self._states: list[tuple[torch.optim.Optimizer, torch.Tensor, State]] = []
        self._hypers: list[tuple[State, State]] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                mine = [
                    GivenState(name, parameter, _now(states.get(name)))
                    for parameter in group["params"]
                    for name in (name_of(parameter, names),)
                ]
                # By group, because the other states of a group tell what a complete state contains.
                for given, state in zip(mine, check_whole(mine), strict=True):
                    self._states.append((optimizer, given.parameter, state))
                hyper = {given.name: by_name[given.name] for given in mine if given.name in by_name}
                self._hypers.append((group, _one_of(hyper)))
                check_settings(optimizer, group, self._hypers[-1][1])

    def make(self) -> None:
        for optimizer, parameter, state in self._states:
            # No entry, as for a parameter that has not had a gradient yet.
            if not state:
                optimizer.state.pop(parameter, None)
            elif not _is_same(optimizer.state.get(parameter), state):
                optimizer.state[parameter] = state
        for group, hyper in self._hypers:
            for key, value in hyper.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    # A rate that is a tensor stays on its device; a load may have created it in host memory.
                    value = value.to(group[key].device)
                group[key] = value
        for optimizer in {
            id(optimizer): optimizer for optimizer, _, state in self._states if _counts(state)
        }.values():
            # As load_state_dict does: there torch's optimizers make tensors of such numbers, which older
            # versions have saved, and step with tensors only.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _counts(state: State) -> bool:
    """Return whether a state counts its steps in a Python number instead of a tensor."""
    return isinstance(state.get("step"), int | float)


def _is_same(present: object, state: State) -> bool:
    """Return whether these are the optimizer's own values, so that nothing has to be changed."""
    return (
        isinstance(present, dict)
        and present.keys() == state.keys()
        and all(present[key] is value for key, value in state.items())
    )


def _now(state: StateDict | None) -> StateDict | None:
    """Refresh a state that is still empty: the optimizer may have one by now."""
    if isinstance(state, ParameterState) and not state:
        state.look_again()
    return state


def _one_of(hypers: dict[str, State]) -> State:
    """Return the hyperparameters of a group: all its parameters must have been saved with the same."""
    first: State | None = None
    for name, hyper in hypers.items():
        if first is None:
            first, whose = hyper, name
        elif any(_differ(hyper.get(key), value) for key, value in first.items()):
            raise BadInput(
                f"{whose!r} and {name!r} are in one parameter group here, and were saved with different "
                "hyperparameters; group them as they were."
            )
    return first or {}


def _differ(one: object, other: object) -> bool:
    if one is other:
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one.cpu(), other.cpu())
    with suppress(Exception):
        # Comparing arrays, for example, may give no single bool; then they count as different.
        return bool(one != other)
    return True


def _nested(flat: StateDict) -> State:
    """Convert torch's flat layout to the nested one. Names contain dots, keys of states and groups do not."""
    state: State = {}
    groups: dict[str, State] = {}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        if kind == "state" and isinstance(value, Mapping):
            state[rest] = value
            continue
        name, _, key = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise BadInput(
                f"optim_state_dict has the key {path!r}, which is neither of a parameter's state nor of its "
                "group."
            )
        (state if kind == "state" else groups).setdefault(name, {})[key] = value
    return {"state": state, "param_groups": [{**hyper, "params": [name]} for name, hyper in groups.items()]}
