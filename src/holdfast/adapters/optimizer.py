"""A model and its torch optimizers as a state keyed by names: no step is run, nothing is gathered.

The layout is that of `torch.distributed.checkpoint.state_dict`, so checkpoints go both ways: parameters under their names without what
wrappers add to them, moments under `state.<name>.<key>`, hyperparameters under `param_groups`.

Theory. An optimizer makes a parameter's state at its first gradient, so a fresh one has none, and an expert that no token reached has none
either, maybe on one rank only. torch fills the gap with a step of zero gradients, on whatever ranks find their state empty. Here a state
that is not there is an `Unborn`: a load makes what the checkpoint has of it, a save passes it by, or, if asked, writes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from holdfast.adapters.dtensor import CHUNKS, is_dtensor
from holdfast.adapters.tensors import Unborn
from holdfast.errors import BadInput, MissingTensors, ShapeMismatch

State = dict[str, Any]
_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Modules that hold the real one under a name of their own."""


def get_state_dict(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    options: Any = None,
    missing: str = "skip",
    flatten_optimizer_state_dict: bool = False,
) -> tuple[State, State]:
    """`torch.distributed.checkpoint.state_dict.get_state_dict`, without a step or a collective.

    Returns the model's state and the optimizers', of this rank's own tensors, to save, or to load into and give to `set_state_dict`.

    model: a module, or this rank's parts of one (pipeline stages).
    options: torch's `StateDictOptions`, of which `flatten_optimizer_state_dict`, `ignore_frozen_params` and `strict` are heeded.
    missing: what a save does with a trainable parameter that has no optimizer state on this rank: "skip" leaves it out, which
        is right if no rank has it, and an error that names it if some have; "zeros" saves zeros for this rank's part.
    flatten_optimizer_state_dict: hyperparameters parameter by parameter, as torch does under this name: needed where ranks
        hold different parameters (pipeline stages, experts as modules of their own).

    Raises BadInput for two parameters of one name, for a parameter of the optimizer that is not in the model, for FSDP1, and for options
    that gather or scatter.
    """
    _check(options, "get_state_dict")
    flatten = flatten_optimizer_state_dict or getattr(options, "flatten_optimizer_state_dict", False)
    if missing not in ("skip", "zeros"):
        raise BadInput(f"missing={missing!r}: give 'skip' or 'zeros'.")
    parts = [model] if isinstance(model, torch.nn.Module) else list(model)
    names = _names(parts)
    state: State = {}
    groups: list[State] = []
    flat: State = {}
    seen: set[str] = set()
    for optimizer in _several(optimizers):
        for group in optimizer.param_groups:
            mine = [_name_of(parameter, names) for parameter in group["params"]]
            hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**hyper, "params": mine})
            for name, parameter in zip(mine, group["params"], strict=True):
                if flatten:
                    flat |= {f"param_groups.{name}.{key}": value for key, value in hyper.items()}
                if name in seen:
                    raise BadInput(
                        f"The parameter {name!r} is in two groups, or in two optimizers; its state has one name."
                    )
                seen.add(name)
                found = _state_of(optimizer, group, parameter, missing == "zeros")
                if found is not None:
                    state[name] = found
    whole = _model_state(parts)
    if getattr(options, "ignore_frozen_params", False):
        frozen = {names[id(p)] for part in parts for p in part.parameters() if not p.requires_grad}
        whole = {name: value for name, value in whole.items() if name not in frozen}
    if not flatten:
        return whole, {"state": state, "param_groups": groups}
    for name, found in state.items():
        if isinstance(found, Unborn):
            flat[f"state.{name}"] = found
        else:
            flat |= {f"state.{name}.{key}": value for key, value in found.items()}
    return whole, flat


def set_state_dict(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: Any = None,
    strict: bool = True,
) -> None:
    """`torch.distributed.checkpoint.state_dict.set_state_dict`: puts loaded states where they belong, on this rank alone.

    Takes what `get_state_dict` gave and a load has filled (of torch's function of this name, or ours). Tensors of the model were filled
    in place; optimizer states become the optimizer's own, without a copy. Everything is checked before anything is changed.

    options: torch's `StateDictOptions`, as in `get_state_dict`.
    strict: a name of the model's state that is not in the model, or the other way round, is an error.

    Raises MissingTensors if the checkpoint had a part of some parameter's state only.
    """
    _check(options, "set_state_dict")
    strict = (
        strict and getattr(options, "strict", True) and not getattr(options, "ignore_frozen_params", False)
    )
    parts = [model] if isinstance(model, torch.nn.Module) else list(model)
    names = _names(parts)
    optim = _nested(optim_state_dict) if "param_groups" not in optim_state_dict else optim_state_dict
    by_name: dict[str, State] = {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in optim.get("param_groups", ())
        for name in group["params"]
    }
    states = optim.get("state", {})
    todo: list[tuple[torch.optim.Optimizer, torch.Tensor, State]] = []
    hypers: list[tuple[State, State]] = []
    for optimizer in _several(optimizers):
        for group in optimizer.param_groups:
            mine = {_name_of(parameter, names): parameter for parameter in group["params"]}
            there = [found for name in mine if isinstance(found := states.get(name), Mapping)]
            scalars = {key for found in there for key, value in found.items() if _is_scalar(value)}
            for name, parameter in mine.items():
                state = _checked(group, parameter, name, states.get(name), scalars)
                todo.append((optimizer, parameter, state))
            hyper = {name: by_name[name] for name in mine if name in by_name}
            hypers.append((group, _one_of(hyper)))
    for part, given in _given(parts, model_state_dict, strict):
        part.load_state_dict(given, strict=False)
    for optimizer, parameter, state in todo:
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    for group, found in hypers:
        for key, value in found.items():
            group[key] = value.to(group[key].device) if _is_tensor(value, group.get(key)) else value


def _check(options: Any, call: str) -> None:
    for name in ("full_state_dict", "broadcast_from_rank0", "cpu_offload"):
        if getattr(options, name, False):
            raise BadInput(
                f"holdfast.{call} takes no {name}: each rank gives and takes its own part, and any layout loads.",
                hint=f"Leave {name} out; a save copies to the host by itself.",
            )


def _several(optimizers: Any) -> list[torch.optim.Optimizer]:
    return [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)


# -- names ------------------------------------------------------------------------------------------


def _clean(part: torch.nn.Module) -> Callable[[str], str]:
    """What takes the segments of wrappers out of a name; some wrappers take out their own, and not those below."""
    wrappers: dict[int, str] = {}
    for path, module in part.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise BadInput(
                f"The model's {path or 'root'!r} is wrapped by FSDP1 (FullyShardedDataParallel), whose state takes collectives to get.",
                hint="Use fully_shard (FSDP2), or save what its own state_dict gives.",
            )
        wrappers |= {id(module): inner for kind, inner in _WRAPPERS.items() if kind in kinds}
    if not wrappers:
        return lambda name: name

    def clean(name: str) -> str:
        kept, at = [], part
        for segment in name.split("."):
            while (inner := wrappers.get(id(at))) is not None and segment != inner:
                at = getattr(at, inner)  # taken out already
            if inner is None:
                kept.append(segment)
            at = getattr(at, segment, None)  # type: ignore[assignment]
        return ".".join(kept)

    return clean


def _names(parts: Sequence[torch.nn.Module]) -> dict[int, str]:
    """The name of each parameter, by identity; a tied one has its first. No two parameters have one name."""
    names: dict[int, str] = {}
    of: dict[str, int] = {}
    for part in parts:
        clean = _clean(part)
        for path, parameter in part.named_parameters(remove_duplicate=False):
            name = clean(path)
            if of.setdefault(name, id(parameter)) != id(parameter):
                raise BadInput(
                    f"Two parameters of the model have the name {name!r} once the names of wrappers are taken out of {path!r}; rename one."
                )
            names.setdefault(id(parameter), name)
    return names


def _name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    try:
        return names[id(parameter)]
    except KeyError:
        raise BadInput(
            f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model.",
            hint="Make the optimizer after the model was wrapped, sharded and moved, or give all parts of the model.",
        ) from None


def _model_state(parts: Sequence[torch.nn.Module]) -> State:
    state: State = {}
    for part in parts:
        clean = _clean(part)
        for path, value in part.state_dict().items():
            name = clean(path)
            if name in state:
                raise BadInput(
                    f"Two values of the model's state have the name {name!r} once the names of wrappers are taken out of {path!r}; "
                    "rename one."
                )
            state[name] = value
    return state


def _given(
    parts: Sequence[torch.nn.Module], state: Mapping[str, Any], strict: bool
) -> list[tuple[torch.nn.Module, State]]:
    """What each part is to be given, by its own names: all but what it has already. Nothing is changed."""
    left, found = set(state), []
    for part in parts:
        clean, there = _clean(part), part.state_dict()
        given: State = {}
        for path, present in there.items():
            name = clean(path)
            left.discard(name)
            if name not in state:
                if strict:
                    raise MissingTensors(f"The model has {name!r}, and model_state_dict does not.")
                continue
            value = state[name]
            if is_dtensor(present) and isinstance(value, torch.Tensor) and not is_dtensor(value):
                raise BadInput(
                    f"{name!r} of model_state_dict is a whole tensor, and the model has a DTensor.",
                    hint="Give what get_state_dict gave, without full_state_dict.",
                )
            if not _is(value, present):
                given[path] = value
        found.append((part, given))
    if left and strict:
        raise BadInput(f"model_state_dict has {min(left)!r}, and the model does not.")
    return found


def _is(one: Any, other: Any) -> bool:
    """Is this the same memory, so that it holds what was loaded already?"""
    a, b = (getattr(value, "_local_tensor", value) for value in (one, other))
    same = _is_tensor(a, b) and a.data_ptr() == b.data_ptr() and a.shape == b.shape
    return bool(same and a.stride() == b.stride() and a.numel())


# -- the optimizer's state --------------------------------------------------------------------------


def _state_of(optimizer: torch.optim.Optimizer, group: State, parameter: torch.Tensor, zeros: bool) -> Any:
    """What there is, or what stands for it."""
    there = optimizer.state.get(parameter)
    if there:
        return dict(there)
    if not parameter.requires_grad:
        return None
    return Unborn(parameter, partial(_make, group, parameter), _zeros(optimizer, parameter) if zeros else {})


def _make(
    group: State, parameter: torch.Tensor, key: str, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor for a state that the checkpoint has: where torch's optimizers want it."""
    if key != "step" and tuple(shape) == tuple(parameter.shape):
        return _like(parameter, dtype)
    on_device = key != "step" or group.get("capturable") or group.get("fused")
    if len(shape) == parameter.dim() and any(
        a not in (1, b) for a, b in zip(shape, parameter.shape, strict=True)
    ):
        raise ShapeMismatch(
            f"The checkpoint has an optimizer state {key!r} of shape {tuple(shape)} for a parameter of shape {tuple(parameter.shape)}.",
            hint="Build the model as it was saved, or leave the optimizer out of the load.",
        )
    if is_dtensor(parameter) and shape:
        raise BadInput(
            f"The checkpoint has an optimizer state {key!r} of shape {tuple(shape)} for a DTensor of shape {tuple(parameter.shape)}.",
            hint="How it is to be sharded only the optimizer knows: let it take a step before the load.",
        )
    return torch.zeros(tuple(shape), dtype=dtype, device=parameter.device if on_device else "cpu")


def _like(parameter: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    made = torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if is_dtensor(parameter):  # chunk metadata stands on the local tensor, and would stay behind
        chunks = getattr(parameter._local_tensor, CHUNKS, None)  # type: ignore[attr-defined]
        if chunks is not None:
            setattr(made._local_tensor, CHUNKS, chunks)  # type: ignore[attr-defined]
    return made


def _zeros(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """As the states of other parameters; what has no shape (`step`) is said by ranks that have it."""
    for other, there in optimizer.state.items():
        like = {
            key: value
            for key, value in there.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == other.shape
        }
        if like:
            return {key: _like(parameter, value.dtype, value.device) for key, value in like.items()}
    raise BadInput(
        f"missing='zeros': no parameter of the {type(optimizer).__name__} has a state on this rank, so what its zeros are is not known."
    )


def _checked(group: State, parameter: torch.Tensor, name: str, state: Any, scalars: set[str]) -> State:
    """A loaded state as the optimizer can take it; {} if there is none. `scalars`: keys of single numbers in the states of its group."""
    if isinstance(state, Unborn) or not state:
        return {}
    for key, value in state.items():
        alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim()
        if alike and is_dtensor(parameter) and not is_dtensor(value):
            raise BadInput(
                f"The state {key!r} of {name!r} is a whole tensor, and the parameter is a DTensor.",
                hint="Give what get_state_dict gave, without full_state_dict.",
            )
    lacking = scalars - state.keys()
    if lacking == {"step"}:  # no rank had taken one, and all saved zeros
        return {**state, "step": _make(group, parameter, "step", torch.float32, ())}
    if lacking or ("exp_avg" in state) != ("exp_avg_sq" in state):
        which = min(lacking or {"exp_avg", "exp_avg_sq"} - state.keys())
        raise MissingTensors(
            f"The checkpoint has a part of the optimizer's state of {name!r}: {which!r} is not there.",
            hint="It was saved by another optimizer, or by missing='zeros', which knows of no such value; leave the optimizer's state "
            "out of the load.",
        )
    return dict(state)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or not value.dim()


def _one_of(found: dict[str, State]) -> State:
    """The hyperparameters that the parameters of a group had; they must be the same."""
    first: State | None = None
    for name, hyper in found.items():
        if first is None:
            first, whose = hyper, name
        elif any(_differ(hyper.get(key), value) for key, value in first.items()):
            raise BadInput(
                f"{whose!r} and {name!r} are in one parameter group here, and were saved with different hyperparameters; group them as "
                "they were."
            )
    return first or {}


def _is_tensor(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _differ(one: Any, other: Any) -> bool:
    if _is_tensor(one, other):
        return not torch.equal(one.cpu(), other.cpu())
    with suppress(Exception):
        return bool(one != other)
    return True


def _nested(flat: Mapping[str, Any]) -> State:
    """torch's flat layout as the nested one. Names have dots, keys of states and groups have none."""
    state: dict[str, Any] = {}
    groups: dict[str, State] = {}
    for path, value in flat.items():
        kind, _, rest = path.partition(".")
        if kind == "state" and isinstance(value, Mapping | Unborn):
            state[rest] = value
            continue
        name, _, key = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise BadInput(
                f"optim_state_dict has the key {path!r}, which is neither of a parameter's state nor of its group."
            )
        (state if kind == "state" else groups).setdefault(name, {})[key] = value
    return {"state": state, "param_groups": [{**hyper, "params": [name]} for name, hyper in groups.items()]}
