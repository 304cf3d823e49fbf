"""DistributedOptimizer state as boxes of global tensors, without a collective, for any other layout.

Theory. The optimizer shards by flat ranges: for each parameter in its buckets, a data-parallel rank has the
elements [start, stop) of main parameter and moments. The model's sharded state dict gives the offset of the
parameter in its global tensor. A flat range of a box of n axes is at most 2n-1 boxes, so each rank can
describe its part of `optimizer.state.exp_avg.<key of the parameter>` exactly, without gathering.
(megatron-core's own `fully_reshardable` gathers every bucket over data-parallel ranks, three times.) Names
and shapes are those of `fully_reshardable`, so a checkpoint converts to one that stock megatron-core loads,
and stock checkpoints load here.

Fused weights (gate and up) come as factories that build views of the parameter; the offset of a view in the
parameter gives its part of the flat range.

A load uses the same description: the pieces are views of the live state, and are filled in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from holdfast._core.layout.box import from_flat_range
from holdfast._core.state.subclasses import check_kind, has_memory
from holdfast._core.torch_private import local_of
from holdfast._frameworks.megatron import mcore
from holdfast._frameworks.megatron.groups import check_kinds, find_group
from holdfast._frameworks.megatron.shards import WrittenCopies
from holdfast._frameworks.megatron.steps import groups_of, step_of, step_of_others
from holdfast.errors import BadInput

MARK = "holdfast_pieces"
"""Key in a state dict for loading, which marks that its optimizer state is in pieces."""
OTHERWISE = "holdfast_otherwise"
"""Key in a state dict for loading in a stock format: a function that describes it as Holdfast saves do."""
PREFIX = "optimizer.state"
_STOCK_FORMATS = (
    "dp_reshardable",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
    "fully_sharded_model_space",
)
"""Formats of optimizer state that only stock's description can load."""
_OURS = {mcore.SHARDING_TYPE: mcore.FULLY_RESHARDABLE, "chained_optim_avoid_prefix": True}
"""Metadata with which stock describes an optimizer under the same names as Holdfast."""
_SHARED = "step"
"""State without the parameter's shape: it is stored in the parameter groups."""


def sharded_state_dict(
    optimizer: mcore.DistributedOptimizer,
    model_sharded_state_dict: mcore.StateDict,
    is_loading: bool = False,
    metadata: mcore.StateDict | None = None,
) -> mcore.ByOptimizer:
    """Describe a DistributedOptimizer, or a ChainedOptimizer of them, by `ShardedTensor`s over live memory.

    Any other optimizer in it, also one of a subclass, describes itself, as in stock megatron-core: Muon's
    LayerWiseDistributedOptimizer gathers its parameter groups from all ranks by a collective.

    model_sharded_state_dict: of the same model, made with `keep_vars=True` as Megatron does.
    is_loading: allocate the state if the optimizer has not stepped yet.
    metadata: passed to an optimizer that describes itself; by default it requests Holdfast's names.
    """
    if type(optimizer) is mcore.ChainedOptimizer:
        parts = optimizer.chained_optimizers
        if len(parts) == 1:
            return sharded_state_dict(parts[0], model_sharded_state_dict, is_loading, metadata)
        # First, as stock does, give the groups of all optimizers the same step.
        mcore.synchronize_steps(optimizer)
        return {
            number: sharded_state_dict(part, model_sharded_state_dict, is_loading, metadata)
            for number, part in enumerate(parts)
        }
    # A subclass may hold its state in another way, and describe it in its own method.
    if type(optimizer) is not mcore.DistributedOptimizer:
        metadata = _OURS if metadata is None else _as_noted(metadata, is_loading)
        own: mcore.ByOptimizer = optimizer.sharded_state_dict(
            model_sharded_state_dict, is_loading, metadata=metadata
        )
        return own
    if optimizer.is_stub_optimizer:
        return {}
    _allocate(optimizer, is_loading)
    state = _common_part(optimizer)
    state["param_state"] = _describe(optimizer, model_sharded_state_dict)
    # The stock format with these names and shapes.
    state["param_state_sharding_type"] = mcore.FULLY_RESHARDABLE
    if is_loading:
        state[MARK] = mcore.LocalNonpersistentObject(True)
    return state


def describe(
    stock: Callable[..., object],
    optimizer: mcore.DistributedOptimizer,
    model_sharded_state_dict: mcore.StateDict | None = None,
    is_loading: bool = False,
    sharding_type: str | None = None,
    metadata: mcore.StateDict | None = None,
) -> object:
    """Replace an optimizer's `sharded_state_dict`; stock's own handles subclasses, and loads of formats that
    only stock writes."""
    ours = partial(sharded_state_dict, optimizer, model_sharded_state_dict or {}, is_loading, metadata)
    # `ours` describes every save except Megatron-FSDP's. State in a stock-only format loads only with
    # stock's description.
    wanted = sharding_type or (metadata or {}).get(mcore.SHARDING_TYPE)
    stocks = is_loading and wanted in _STOCK_FORMATS
    # If not, a subclass has called the method that it extends.
    is_known = type(optimizer) in (mcore.DistributedOptimizer, mcore.ChainedOptimizer)
    if is_known and wanted != mcore.FSDP_DTENSOR and not stocks:
        return ours()
    if metadata is not None:
        metadata = _as_noted(metadata, is_loading)
    named = {} if sharding_type is None else {"sharding_type": sharding_type}
    state = stock(optimizer, model_sharded_state_dict or {}, is_loading, metadata=metadata, **named)
    # A Holdfast save told this format wrote its own; the load detects which one the checkpoint has.
    if is_known and isinstance(state, dict) and "param_state" in state:
        state[OTHERWISE] = mcore.LocalNonpersistentObject(ours)
    return state


def _as_noted(metadata: mcore.StateDict, is_loading: bool) -> mcore.StateDict:
    """Return the metadata for a description by stock. For a save, it has the format noted in the checkpoint,
    which is the same for all optimizers."""
    if is_loading or metadata.get(mcore.SHARDING_TYPE) not in _STOCK_FORMATS:
        return metadata
    return {**metadata, mcore.SHARDING_TYPE: mcore.FULLY_RESHARDABLE}


def as_we_save(state: mcore.ByOptimizer) -> mcore.ByOptimizer:
    """Return a state dict for loading, with stock's descriptions replaced by Holdfast's if there are any."""
    if OTHERWISE in state:
        described: mcore.ByOptimizer = state[OTHERWISE].unwrap()()
        return described
    return {key: as_we_save(part) if isinstance(part, dict) else part for key, part in state.items()}


def _common_part(optimizer: mcore.DistributedOptimizer) -> mcore.ByOptimizer:
    """Return the optimizer's state without the state of parameters.

    Groups keep the step that megatron-core sets, but not in an optimizer without parameters on this rank,
    which counts no steps. (For that one, megatron-core's `state_dict` fails with PyTorch's Adam, and returns
    an outdated step with Transformer Engine's.)
    """
    counts = bool(mcore.local_ranges(optimizer))
    state = dict(optimizer.state_dict()) if counts else mcore.state_without_parameters(optimizer)
    left_out = ("params",) if counts else ("params", "step")
    groups = [
        # A class in a group (of an offloaded optimizer) is a setting of this process, and is not stored.
        {key: value for key, value in group.items() if key not in left_out and not isinstance(value, type)}
        for group in state["optimizer"]["param_groups"]
    ]
    state["optimizer"] = {**state["optimizer"], "param_groups": groups}
    return state


def _allocate(optimizer: mcore.DistributedOptimizer, is_loading: bool) -> None:
    """Allocate zero moments for an optimizer that has not stepped yet, so that a load can fill them and a
    save can write them."""
    if len(optimizer.optimizer.state) or not mcore.local_ranges(optimizer):
        return
    # megatron-core would allocate it by a step on random gradients.
    if not is_loading and mcore.is_offloaded(optimizer):
        raise BadInput("An offloaded optimizer has no state before its first step: save after it.")
    # Loading its own groups makes megatron-core allocate the state, by `torch.empty`.
    groups = optimizer.optimizer.state_dict()["param_groups"]
    _load_groups(optimizer, groups, [step_of(group) for group in groups])
    for param, start, stop in mcore.local_ranges(optimizer):
        values = mcore.parameter_state(optimizer, param)
        for key, value in values.items():
            # Moments are zero before the first step.
            if key.startswith("exp_avg") and isinstance(value, torch.Tensor):
                value.zero_()
        if not is_loading and mcore.has_master_weights(optimizer):
            # The inner optimizer's main parameter was just allocated, and has no values yet.
            values["param"] = param.detach().view(-1)[start:stop].float()
        mcore.set_parameter_state(optimizer, param, values)  # they may be copies in another precision


def _load_groups(
    optimizer: mcore.DistributedOptimizer, groups: list[mcore.StateDict], steps: list[float], **more: float
) -> None:
    """Load parameter groups, in the inner optimizer's order, with steps where it keeps them; this also
    allocates its state."""
    made = [{key: value for key, value in group.items() if key not in ("params", "step")} for group in groups]
    if mcore.counts_per_parameter():
        step = max(steps, default=0.0)  # megatron-core requires the step in every group
        made = [{**group, "step": step} for group in made]
    else:
        own = optimizer.optimizer.param_groups
        for group, step, inner in zip(made, steps, own, strict=True):
            # As in these optimizers themselves, a group without parameters has no step.
            if step and inner["params"]:
                group["step"] = int(step)
    mcore.ORIGINAL_LOAD(optimizer, {"optimizer": {"param_groups": made}, **more})


def give_back(
    stock: Callable[..., object], optimizer: mcore.DistributedOptimizer, state_dict: object
) -> None:
    """Replace an optimizer's `load_state_dict`; stock's own handles states not from `sharded_state_dict`."""
    parts = [state_dict, *state_dict.values()] if isinstance(state_dict, dict) else []
    ours = any(isinstance(part, dict) and (MARK in part or _is_fsdp(optimizer, part)) for part in parts)
    if isinstance(state_dict, dict) and ours:
        load_state_dict(optimizer, state_dict)
    else:
        stock(optimizer, state_dict)
        check_kinds(optimizer)


def _is_fsdp(optimizer: mcore.DistributedOptimizer, state: mcore.StateDict) -> bool:
    """Return whether this is the state of an offloaded optimizer under Megatron-FSDP."""
    return mcore.GROUP_OF_PARAMETER in state and mcore.is_offloaded(optimizer)


def load_state_dict(optimizer: mcore.DistributedOptimizer, state: mcore.ByOptimizer) -> None:
    """Apply a loaded state that `sharded_state_dict(..., is_loading=True)` has described.

    The layout that saved may have had parameters in other optimizers (without expert parallelism, experts
    belong to the dense one), so parameter groups are matched by their identifiers, not by position, among
    those of an optimizer of the same kind.
    """
    is_chain = type(optimizer) is mcore.ChainedOptimizer
    parts = optimizer.chained_optimizers if is_chain else [optimizer]
    mine = [state] if len(parts) == 1 else [state.get(number, {}) for number in range(len(parts))]
    # The saved state may have more optimizers.
    saved = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    saved = [part for part in [state, *saved] if "optimizer" in part]
    others = step_of_others(saved)
    for part, own in zip(parts, mine, strict=True):
        if MARK in own:
            # Its own first: two optimizers may have groups with the same identifiers.
            _restore(part, sorted(saved, key=lambda one: one is not own), others, own.get("param_state", {}))
        elif _is_fsdp(part, own):
            _restore_fsdp(part, own)
        elif not getattr(part, "is_stub_optimizer", False):
            part.load_state_dict(own)
    check_kinds(optimizer)
    if len(parts) > 1:
        mcore.synchronize_steps(optimizer)


def _restore(
    optimizer: mcore.DistributedOptimizer,
    saved: list[mcore.StateDict],
    others: float,
    param_state: dict[int, dict[str, list[mcore.ShardedTensor]]],
) -> None:
    if not saved:
        raise BadInput(
            "The loaded state has no parameter groups for the optimizer: the checkpoint has no optimizer "
            "state."
        )
    groups = [group for part in saved for group in groups_of(part)]
    own = optimizer.optimizer.state_dict()["param_groups"]
    matches = [find_group(group, groups, optimizer.optimizer) for group in own]
    scaler = {"grad_scaler": saved[0]["grad_scaler"]} if "grad_scaler" in saved[0] else {}
    _load_groups(optimizer, matches, [step_of(group) or others for group in matches], **scaler)
    for number, (param, _, _) in enumerate(mcore.local_ranges(optimizer)):
        present, loaded = mcore.parameter_state(optimizer, param), param_state.get(number, {})
        # The load has filled the live state itself; only copies in another precision must be set.
        if all(pieces[0].data_ptr() == present[key].data_ptr() for key, pieces in loaded.items() if pieces):
            continue
        # megatron-core sets every key that the state has, so the present step is passed unchanged.
        tensors = {key: value for key, value in present.items() if key == _SHARED}
        tensors |= {key: torch.cat([piece.reshape(-1) for piece in pieces]) for key, pieces in loaded.items()}
        mcore.set_parameter_state(optimizer, param, tensors)
    if mcore.is_offloaded(optimizer):
        mcore.sync_offloaded(optimizer)
    # Each parameter gets its own `step` tensor: torch's Adam adds to a shared one once per parameter.
    for values in optimizer.optimizer.state.values():
        if isinstance(values.get(_SHARED), torch.Tensor):
            values[_SHARED] = values[_SHARED].clone()


@torch.no_grad()
def _restore_fsdp(optimizer: mcore.DistributedOptimizer, loaded: mcore.StateDict) -> None:
    """Apply the state of an offloaded optimizer under Megatron-FSDP: its groups, and tensors that the load
    has not filled in place.

    megatron-core's own function fails there: HybridDeviceOptimizer looks for the state of parameters without
    elements on this rank, and for the float32 copies of float32 parameters, which do not exist.
    """
    for own, saved in mcore.matched_groups(optimizer, loaded[mcore.GROUP_OF_PARAMETER]):
        own.update({key: value for key, value in saved.items() if key != "params"})
    for name, values in mcore.fsdp_state(optimizer).items():
        for key, value in loaded["state"].get(name, {}).items():
            # Only local tensors: a state may be one, or a DTensor over it.
            there, here = (local_of(tensor) for tensor in (value, values[key]))
            if isinstance(there, torch.Tensor) and there.data_ptr() != here.data_ptr():
                here.copy_(there)


def _describe(
    optimizer: mcore.DistributedOptimizer, model: mcore.StateDict
) -> dict[int, dict[str, list[mcore.ShardedTensor]]]:
    where = {
        # By identity: with `keep_vars=True`, a state dict has the parameters themselves.
        id(item.data): item
        for item in mcore.nested_values(model)
        if isinstance(item, mcore.ShardedTensor | mcore.ShardedTensorFactory)
    }
    holders = torch.distributed.get_process_group_ranks(optimizer.data_parallel_group)
    copies = WrittenCopies(torch.distributed.get_rank(), ())
    pieces: dict[int, dict[str, list[mcore.ShardedTensor]]] = {}
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
            if key != _SHARED and isinstance(value, torch.Tensor)
        }
        # Decided once for each parameter, not for each box of each state.
        parts = [(part, offset, copies.writes_state(part, holders)) for part, offset in _parts(item)]
        pieces[number] = {
            key: list(_pieces(parts, f"{PREFIX}.{key}", value, start, stop)) for key, value in tensors.items()
        }
    return pieces


def _parts(item: mcore.ShardedTensor) -> list[tuple[mcore.ShardedTensor, int]]:
    """List the ShardedTensors of a parameter, with their offsets in it, in elements."""
    if isinstance(item, mcore.ShardedTensor):
        return [(item, 0)]
    base, parts = item.data, []
    for built in mcore.nested_values(item.build()):
        data = built.data
        # Only a view has an offset in the flat range; a copy in another order does not.
        inside = data.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        if not inside or not data.is_contiguous():
            raise BadInput(
                f"{item.key!r} is stored in another order of elements than the parameter has, so its "
                "optimizer state can't be described without gathering it.",
                hint="Legacy GroupedMLP does this: use TEGroupedMLP or SequentialMLP "
                "(no moe_use_legacy_grouped_gemm).",
            )
        parts.append((built, data.storage_offset() - base.storage_offset()))
    return sorted(parts, key=lambda part: part[1])


def _pieces(
    parts: list[tuple[mcore.ShardedTensor, int, bool]],
    prefix: str,
    values: torch.Tensor,
    start: int,
    stop: int,
) -> Iterator[mcore.ShardedTensor]:
    """Yield the flat range [start, stop) of a parameter as boxes over `values`, its state, in flat order.

    parts: the parameter's ShardedTensors, their offsets in it, and whether this rank writes their state.
    """
    flat = values.detach().view(-1)
    for tensor, begin, writes in parts:
        low, high = max(start, begin), min(stop, begin + math.prod(tensor.local_shape))
        if low >= high:
            continue
        if not has_memory(values):  # before torch refuses to cut it, and names nothing
            check_kind(f"{prefix}.{tensor.key}", values)
        offset = low - start
        lead = tensor.prepend_axis_num
        for box in from_flat_range(tuple(tensor.local_shape), low - begin, high - begin):
            data = flat[offset : offset + box.volume].view(box.shape)
            offset += box.volume
            inner = zip(tensor.global_offset[lead:], box.offset, strict=True)
            yield mcore.ShardedTensor(
                f"{prefix}.{tensor.key}",
                data,
                data.dtype,
                tuple(box.shape),
                tuple(tensor.global_shape),
                (*tensor.global_offset[:lead], *(theirs + ours for theirs, ours in inner)),
                None,
                # Each element of the state is on only one rank of the optimizer's group, so none is shared.
                0 if writes else 1,
                lead,
                tensor.allow_shape_mismatch,
            )
