"""DistributedOptimizer state as boxes of global tensors, without a collective, for any other layout.

Theory. The optimizer shards by flat ranges: of each parameter in its buckets a data-parallel rank has the
elements [start, stop) of main parameter and moments. The model's sharded state dict says where the parameter
lies in its global tensor. A flat range of a box is at most 2n-1 boxes, so each rank can name exactly what it
has of `optimizer.state.exp_avg.<key of the parameter>` and need not gather anything (megatron-core's own
`fully_reshardable` gathers every bucket over data-parallel ranks, three times). Names and shapes are those of
`fully_reshardable`, so a checkpoint converts to one that stock megatron-core loads, and its checkpoints load
here.

Fused weights (gate and up) come as factories that build views of the parameter; where a view begins in the
parameter tells where its part of the flat range lies.

Loading is the same description read the other way: the pieces are views of the live state, filled in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from holdfast.errors import BadInput
from holdfast.integrations.megatron import mcore
from holdfast.integrations.megatron.shards import Copies
from holdfast.integrations.megatron.steps import Steps, groups_of, step_of
from holdfast.layout.box import from_flat_range

MARK = "holdfast_pieces"
"""In a state dict for loading: its optimizer state is in pieces."""
PREFIX = "optimizer.state"
_SHARED = ("step",)
"""State that isn't of a parameter's shape: it travels in the parameter groups."""


class _Part(NamedTuple):
    """A ShardedTensor of the model, and where it begins in its parameter, in elements."""

    tensor: mcore.ShardedTensor
    start: int
    writes: bool = False


def sharded_state_dict(
    optimizer: mcore.DistributedOptimizer, model_sharded_state_dict: mcore.StateDict, is_loading: bool = False
) -> mcore.ByOptimizer:
    """The state of a DistributedOptimizer or a ChainedOptimizer of them, as `ShardedTensor`s over live
    memory.

    model_sharded_state_dict: of the same model, made with `keep_vars=True` as Megatron does.
    is_loading: allocate the state if the optimizer has not stepped yet.
    """
    if isinstance(optimizer, mcore.ChainedOptimizer):
        parts = optimizer.chained_optimizers
        if len(parts) == 1:
            return sharded_state_dict(parts[0], model_sharded_state_dict, is_loading)
        # Before describing, as stock does: groups of the optimizers must not differ in their step.
        mcore.synchronize_steps(optimizer)
        return {
            number: sharded_state_dict(part, model_sharded_state_dict, is_loading)
            for number, part in enumerate(parts)
        }
    if not isinstance(optimizer, mcore.DistributedOptimizer):
        stock: mcore.ByOptimizer = optimizer.sharded_state_dict(model_sharded_state_dict, is_loading)
        return stock
    if _is_stub(optimizer):
        return {}
    allocate(optimizer, is_loading)
    state = _common_part(optimizer)
    state["param_state"] = _describe(optimizer, model_sharded_state_dict)
    state["param_state_sharding_type"] = mcore.FULLY_RESHARDABLE  # what it converts to
    if is_loading:
        state[MARK] = mcore.LocalNonpersistentObject(True)
    return state


def _is_stub(optimizer: mcore.DistributedOptimizer) -> bool:
    """It has no parameters, and no state."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def _common_part(optimizer: mcore.DistributedOptimizer) -> mcore.ByOptimizer:
    """What isn't state of parameters. A group has a step where megatron-core says so: never one of an
    optimizer that has no parameters on this rank, which counts none. (megatron-core's `state_dict` fails for
    such a one with PyTorch's Adam, and repeats what was loaded once with Transformer Engine's.)"""
    counts = bool(mcore.local_ranges(optimizer))
    state = dict(optimizer.state_dict()) if counts else mcore.state_without_parameters(optimizer)
    left_out = ("params",) if counts else ("params", "step")
    groups = [
        # A class in a group (an offloaded optimizer's) is a setting of this process, and is not stored.
        {key: value for key, value in group.items() if key not in left_out and not isinstance(value, type)}
        for group in state["optimizer"]["param_groups"]
    ]
    state["optimizer"] = {**state["optimizer"], "param_groups": groups}
    return state


def allocate(optimizer: mcore.DistributedOptimizer, is_loading: bool = True) -> None:
    """Give an optimizer that has not stepped yet its moments, zeros: there must be something to load into,
    and to save."""
    if len(optimizer.optimizer.state) or not mcore.local_ranges(optimizer):
        return
    if not is_loading and mcore.is_offloaded(
        optimizer
    ):  # megatron-core gives it state by a step, on random gradients
        raise BadInput("An offloaded optimizer has no state before its first step: save after it.")
    # Loading its own groups makes megatron-core allocate the state, by `torch.empty`.
    groups = optimizer.optimizer.state_dict()["param_groups"]
    _load_groups(optimizer, groups, [step_of(group) for group in groups])
    for param, start, stop in mcore.local_ranges(optimizer):
        values = mcore.parameter_state(optimizer, param)
        for key, value in values.items():
            # Zeros, which is what a moment is before the first step.
            if key.startswith("exp_avg") and isinstance(value, torch.Tensor):
                value.zero_()
        if not is_loading and mcore.has_master_weights(optimizer):
            # The inner optimizer's main parameter was allocated just now: it has nothing in it yet.
            values["param"] = param.detach().view(-1)[start:stop].float()
        mcore.set_parameter_state(optimizer, param, values)  # they may be copies in another precision


def _load_groups(
    optimizer: mcore.DistributedOptimizer, groups: list[mcore.StateDict], steps: list[float], **more: float
) -> None:
    """Give the inner optimizer parameter groups in its own order, with steps where it keeps them, and its
    state memory."""
    made = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
    if mcore.counts_per_parameter():
        step = max(steps, default=0.0)  # megatron-core takes it from the groups, all of which must have it
        made = [{**group, "step": step} for group in made]
    else:
        own = optimizer.optimizer.param_groups
        for group, step, inner in zip(made, steps, own, strict=True):
            # As these optimizers count themselves: a group without parameters has no step.
            if step and inner["params"]:
                group["step"] = int(step)
    mcore.ORIGINAL_LOAD(optimizer, {"optimizer": {"param_groups": made}, **more})


def is_ours(state: object) -> bool:
    """Was a loaded state dict asked for by `sharded_state_dict`?"""
    parts = [state, *state.values()] if isinstance(state, dict) else []
    return any(isinstance(part, dict) and MARK in part for part in parts)


def load_state_dict(optimizer: mcore.DistributedOptimizer, state: mcore.ByOptimizer) -> None:
    """The counterpart of `sharded_state_dict(..., is_loading=True)`, after a load.

    The layout that saved may have had its parameters in other optimizers (without expert parallelism experts
    belong to the dense one), so parameter groups are found by what identifies them, not by their place.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, mcore.ChainedOptimizer) else [optimizer]
    mine = [state] if len(parts) == 1 else [state.get(number, {}) for number in range(len(parts))]
    # Keys are numbers and names, which can't be compared. The layout that saved may have had more optimizers.
    saved = [value for key, value in sorted(state.items(), key=str) if isinstance(key, int)]
    saved = [part for part in [state, *saved] if "optimizer" in part]
    steps = Steps(saved)  # on every rank, so that none goes on alone where others raise
    for part, own in zip(parts, mine, strict=True):
        if MARK in own:
            _restore(part, saved, steps, own.get("param_state", {}))
        elif not _is_stub(part):
            part.load_state_dict(own)
    if len(parts) > 1:
        mcore.synchronize_steps(optimizer)


def _restore(
    optimizer: mcore.DistributedOptimizer,
    saved: list[mcore.StateDict],
    steps: Steps,
    param_state: dict[int, dict[str, list[mcore.ShardedTensor]]],
) -> None:
    if not saved:
        raise BadInput(
            "The loaded state has no parameter groups for the optimizer: the checkpoint has no optimizer "
            "state."
        )
    groups = [group for part in saved for group in groups_of(part)]
    own = optimizer.optimizer.state_dict()["param_groups"]
    found = [_group(group, groups) for group in own]
    scaler = {key: saved[0][key] for key in ("grad_scaler",) if key in saved[0]}
    _load_groups(optimizer, found, [steps.of(group) for group in found], **scaler)
    for number, (param, start, stop) in enumerate(mcore.local_ranges(optimizer)):
        present, loaded = mcore.parameter_state(optimizer, param), param_state.get(number, {})
        # The load has filled the live state itself; only copies in another precision are left to be set.
        if all(_is_view(pieces, present[key]) for key, pieces in loaded.items()):
            continue
        # megatron-core sets every key that the state has, so the present step goes back as it is.
        tensors = {key: present[key] for key in _SHARED if key in present}
        tensors |= {key: _joined(pieces, stop - start) for key, pieces in loaded.items()}
        mcore.set_parameter_state(optimizer, param, tensors)
    if mcore.is_offloaded(optimizer):
        mcore.sync_offloaded(optimizer)
    _unshare_steps(optimizer)


def _group(own: mcore.StateDict, groups: list[mcore.StateDict]) -> mcore.StateDict:
    """The saved parameter group that stands for one of this layout; whether it is of experts matters last."""
    keys = [key for key in own if key.removeprefix("pre_") in mcore.GROUP_KEYS]
    # Without expert parallelism experts are in dense groups: then this alone may differ.
    for ignored in ((), ("is_expert_parallel",)):
        wanted = [key for key in keys if key not in ignored]
        for group in groups:
            if all(group.get(key, own[key]) == own[key] for key in wanted):
                classes = {key: value for key, value in own.items() if isinstance(value, type)}
                return {**group, **classes, **{key: own[key] for key in keys}}
    raise BadInput(
        f"The checkpoint has no parameter group with { {key: own[key] for key in keys} }.",
        hint="Build the optimizer with the same weight-decay and learning-rate multipliers as when it was "
        "saved.",
    )


def _unshare_steps(optimizer: mcore.DistributedOptimizer) -> None:
    """megatron-core gives all parameters one `step` tensor; torch's Adam adds to it once per parameter."""
    for values in optimizer.optimizer.state.values():
        if isinstance(values.get("step"), torch.Tensor):
            values["step"] = values["step"].clone()


def _describe(
    optimizer: mcore.DistributedOptimizer, model: mcore.StateDict
) -> dict[int, dict[str, list[mcore.ShardedTensor]]]:
    where = {
        # By identity: made with `keep_vars=True`, a state dict has the parameters themselves.
        id(item.data): item
        for item in mcore.nested_values(model)
        if isinstance(item, mcore.ShardedTensor | mcore.ShardedTensorFactory)
    }
    holders = mcore.holders(optimizer)
    copies = Copies(torch.distributed.get_rank(), ())
    found: dict[int, dict[str, list[mcore.ShardedTensor]]] = {}
    for number, (param, start, stop) in enumerate(mcore.local_ranges(optimizer)):
        item = where.get(id(param))
        if item is None:
            raise BadInput(
                f"A parameter of shape {list(param.shape)} of the optimizer is not in the model's sharded "
                f"state dict.",
                hint="Give the state dict of the same model, made by model.sharded_state_dict() (it keeps "
                "the parameters).",
            )
        tensors = {
            key: value
            for key, value in mcore.parameter_state(optimizer, param).items()
            if key not in _SHARED and isinstance(value, torch.Tensor)
        }
        # Decided once for each parameter, not for each box of each kind of state.
        parts = [part._replace(writes=copies.writes_state(part.tensor, holders)) for part in _parts(item)]
        found[number] = {
            key: list(_pieces(parts, f"{PREFIX}.{key}", value, start, stop)) for key, value in tensors.items()
        }
    return found


def _parts(item: mcore.ShardedTensor) -> list[_Part]:
    """The ShardedTensors that a parameter is made of."""
    if isinstance(item, mcore.ShardedTensor):
        return [_Part(item, 0)]
    base, parts = item.data, []
    for built in mcore.nested_values(item.build()):
        data = built.data
        # Only a view tells where its part lies in the flat range; a copy in another order does not.
        inside = data.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        if not inside or not data.is_contiguous():
            raise BadInput(
                f"{item.key!r} is stored in another order of elements than the parameter has, so its "
                f"optimizer state "
                "can't be described without gathering it.",
                hint="Legacy GroupedMLP does this: use TEGroupedMLP or SequentialMLP "
                "(moe_use_legacy_grouped_gemm=False).",
            )
        parts.append(_Part(built, data.storage_offset() - base.storage_offset()))
    return sorted(parts, key=lambda part: part.start)


def _pieces(
    parts: list[_Part], prefix: str, values: torch.Tensor, start: int, stop: int
) -> Iterator[mcore.ShardedTensor]:
    """The flat range [start, stop) of a parameter, whose state is `values`, as boxes, in flat order."""
    flat = values.detach().view(-1)
    for tensor, begin, writes in parts:
        low, high = max(start, begin), min(stop, begin + math.prod(tensor.local_shape))
        if low >= high:
            continue
        at = low - start
        lead = tensor.prepend_axis_num
        for box in from_flat_range(tuple(tensor.local_shape), low - begin, high - begin):
            data = flat[at : at + box.volume].view(box.shape)
            at += box.volume
            inner = tensor.global_offset[lead:]
            piece = mcore.ShardedTensor(
                f"{prefix}.{tensor.key}",
                data,
                data.dtype,
                tuple(box.shape),
                tuple(tensor.global_shape),
                (0,) * len(tensor.global_shape),
                None,
                # Never shared: each element of the state is on one rank of the optimizer's group only.
                0 if writes else 1,
                lead,
                tensor.allow_shape_mismatch,
            )
            # Set afterwards: before 0.15 a ShardedTensor begins at a multiple of its shape, or is refused.
            piece.global_offset = (
                *tensor.global_offset[:lead],
                *(o + i for o, i in zip(inner, box.offset, strict=True)),
            )
            yield piece


def _joined(pieces: list[torch.Tensor], length: int) -> torch.Tensor:
    flat = torch.cat([piece.reshape(-1) for piece in pieces]) if len(pieces) != 1 else pieces[0].reshape(-1)
    if flat.numel() != length:
        raise BadInput(f"Optimizer state of {flat.numel()} elements was loaded where {length} belong.")
    return flat


def _is_view(pieces: list[torch.Tensor], state: torch.Tensor) -> bool:
    """Are the pieces views of the live state, so that it is loaded already?"""
    return not pieces or pieces[0].data_ptr() == state.data_ptr()
