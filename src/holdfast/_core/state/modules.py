"""Modules as states: names without the segments that wrappers add, and loading values back into modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch

from holdfast._core.state.live import LiveDict, State, settle
from holdfast._core.state.subclasses import is_dtensor, same_memory
from holdfast.errors import BadInput, MissingTensors

_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Wrapper modules by class name, and the attribute that holds the wrapped module."""


@lru_cache(maxsize=4096)
def _kinds(kind: type) -> frozenset[str]:
    return frozenset(base.__name__ for base in kind.__mro__)


def _clean(part: torch.nn.Module) -> Callable[[str], str]:
    """Return a function that removes the segments of wrappers from a name.

    Some wrappers remove their own segment, but not those below.
    """
    wrappers: dict[int, str] = {}
    for path, module in part.named_modules():
        kind: type = type(module)
        kinds = _kinds(kind)
        # All wrappers are recognised by class name, so that their modules need not be imported.
        if "FullyShardedDataParallel" in kinds:
            raise BadInput(
                f"The model's {path or 'root'!r} is wrapped by FSDP1 (FullyShardedDataParallel), whose "
                "state takes collectives to get.",
                hint="Use fully_shard (FSDP2), or save what its own state_dict gives.",
            )
        wrappers |= {id(module): inner for kind, inner in _WRAPPERS.items() if kind in kinds}
    if not wrappers:
        return lambda name: name

    def clean(name: str) -> str:
        kept, owner = [], part
        for segment in name.split("."):
            while (inner := wrappers.get(id(owner))) is not None and segment != inner:
                owner = getattr(owner, inner)  # the wrapper has removed its segment itself
            if inner is None:
                kept.append(segment)
            owner = getattr(owner, segment, None)  # type: ignore[assignment]
        return ".".join(kept)

    return clean


def names_of(parts: Sequence[torch.nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by `id`; for a tied parameter, its first name. Raises BadInput if two
    parameters have the same name."""
    names: dict[int, str] = {}
    of: dict[str, int] = {}
    for part in parts:
        clean = _clean(part)
        for module in part.modules():
            kind: type = type(module)
            if "FSDPModule" in _kinds(kind):
                # As state_dict() does: after a forward without a backward, the root has whole parameters.
                module.reshard()  # type: ignore[operator]
        # All names of tied parameters: none of them may be the name of another parameter.
        for path, parameter in part.named_parameters(remove_duplicate=False):
            name = clean(path)
            if of.setdefault(name, id(parameter)) != id(parameter):
                raise BadInput(
                    f"Two parameters of the model have the name {name!r} once the names of wrappers are "
                    f"taken out of {path!r}; rename one."
                )
            names.setdefault(id(parameter), name)
    return names


def name_of(parameter: torch.Tensor, names: dict[int, str]) -> str:
    """Return the name of an optimizer's parameter. Raises BadInput if the model does not have it."""
    try:
        return names[id(parameter)]
    except KeyError:
        raise BadInput(
            f"The optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model.",
            hint="Make the optimizer after the model was wrapped, sharded and moved, or give all parts of "
            "the model.",
        ) from None


def state_of(parts: Sequence[torch.nn.Module]) -> State:
    state: State = {}
    for part in parts:
        clean = _clean(part)
        for path, value in part.state_dict().items():
            name = clean(path)
            if name in state:
                raise BadInput(
                    f"Two values of the model's state have the name {name!r} once the names of wrappers are "
                    f"taken out of {path!r}; rename one."
                )
            state[name] = value
    return state


def given_of(
    parts: Sequence[torch.nn.Module], state: Mapping[str, object], strict: bool
) -> list[tuple[torch.nn.Module, State]]:
    """Return the values to put into each part, by the part's own names, except those that it already has.
    Changes nothing."""
    left, by_part = set(state), []
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
            # Only values in other memory: usually the load has filled the module's own tensors in place.
            if not same_memory(value, present):
                given[path] = value
        by_part.append((part, given))
    if left and strict:
        raise BadInput(f"model_state_dict has {min(left)!r}, and the model does not.")
    return by_part


def give(part: torch.nn.Module, given: Mapping[str, object]) -> None:
    """Load some values into a module; parameters on the meta device are replaced."""
    unmade = _on_meta(part, given) if given else {}
    if unmade:
        _assign(part, unmade)
    part.load_state_dict({path: value for path, value in given.items() if path not in unmade}, strict=False)


def load_module(module: torch.nn.Module, state: Mapping[str, object]) -> None:
    """Call `load_state_dict` of a module that had tensors on the meta device, which are replaced."""
    _assign(module, _on_meta(module, state))
    module.load_state_dict(state)


def _on_meta(module: torch.nn.Module, state: Mapping[str, object]) -> State:
    """Return the loaded values for which the module has no memory yet."""
    meta = {
        path
        for path, value in module.state_dict().items()
        if isinstance(value, torch.Tensor) and value.device.type == "meta"
    }
    return {
        path: value
        for path, value in state.items()
        if path in meta and isinstance(value, torch.Tensor) and value.device.type != "meta"
    }


def _assign(module: torch.nn.Module, given: State) -> None:
    """Call `load_state_dict(assign=True)`, and tie again the parameters that were tied."""
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((inner, name))
    module.load_state_dict(given, strict=False, assign=True)
    for tied in owners.values():
        made = [getattr(inner, name) for inner, name in tied]
        real = next((parameter for parameter in made if parameter.device.type != "meta"), None)
        # assign= gives each name a separate parameter, so tied weights would no longer be tied.
        if len(tied) > 1 and real is not None:
            for inner, name in tied:
                setattr(inner, name, real)


class ModelView:
    """A model as a live state."""

    def __init__(self, parts: Sequence[torch.nn.Module], without_frozen: bool) -> None:
        self._parts, self._without_frozen = parts, without_frozen
        self.state = LiveDict(self._fetch, self)

    def _fetch(self) -> State:
        state = state_of(self._parts)
        if not self._without_frozen:
            return state
        names = names_of(self._parts)
        # Checked each time: parameters may be frozen or unfrozen during the training.
        frozen = {names[id(p)] for part in self._parts for p in part.parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def loaded(self) -> None:
        """Put the values into the model that were not loaded in place: values that are not tensors, and
        values that the user has put into the state."""
        for part, given in given_of(self._parts, self.state, strict=False):
            if given:
                give(part, given)
        settle(self.state)
