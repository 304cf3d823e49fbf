"""All names of megatron-core that Holdfast uses, in one place; private ones are marked.

Tested with 0.16.1 (docs/megatron.md lists others). If a version lacks a name, the import of this module fails
with that name, rather than a save halfway through.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from holdfast._core.format.torch_objects import Allowed
from holdfast._frameworks.arguments import Function
from holdfast._frameworks.patching import original_of

try:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.core import CheckpointingException, maybe_load_config
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_inplace,
        extract_matching_values,
        merge,
        nested_values,
    )
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
        apply_factories,
        apply_factory_merges,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
    from megatron.core.dist_checkpointing.utils import (
        extract_nonpersistent,
        extract_sharded_base,
        force_all_tensors_to_non_fp8,
    )
    from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag
    from megatron.core.optimizer import ChainedOptimizer, distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import param_group_identifier_keys as GROUP_KEYS
    from megatron.core.package_info import __version__ as VERSION
except ImportError as error:
    raise ImportError(
        f"holdfast.megatron needs megatron-core ({error}). Install it: pip install megatron-core."
    ) from error

StateDict: TypeAlias = dict[str, Any]
"""A state dict, sharded or not, or a part of one: nested dicts and lists with a framework's values."""
Loaded: TypeAlias = Any
"""The result of a load: a state dict, or a tuple of it and the missing and unexpected keys."""
ByOptimizer: TypeAlias = dict[Any, Any]
"""The state of a ChainedOptimizer: its optimizers' states by number, and other entries by name."""
CONTENT_METADATA = "content_metadata"
SHARDING_TYPE = "distrib_optim_sharding_type"
FULLY_RESHARDABLE = "fully_reshardable"
FSDP_DTENSOR = "fsdp_dtensor"


def stock(name: str) -> Function:
    """Return megatron-core's own function of `dist_checkpointing`, also after `install()`."""
    found: Function = getattr(serialization, name)
    return original_of(found)


def groups() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the global ranks of this rank's data-parallel group (with context parallel) and of its expert
    data-parallel group, in the order of replica numbers; empty if Megatron's own groups are not set up."""
    # Megatron's own groups may not be set up: its models and optimizers take others as arguments.
    if not parallel_state.is_initialized():
        return (), ()
    return (
        _copies(parallel_state.get_data_parallel_group, with_context_parallel=True),
        _copies(parallel_state.get_expert_data_parallel_group),
    )


def _copies(find: Callable[..., ProcessGroup], **how: bool) -> tuple[int, ...]:
    """Return the ranks over which copies of a tensor are numbered; none if that depends on the tensor.

    Since 0.19 weights may be sharded over a part of the data-parallel group (generalized tensor parallelism):
    their copies are numbered over the rest of it, copies of other tensors over all of it.
    """
    try:
        ranks = get_process_group_ranks(find(**how))
        if "with_gtp_remat" in inspect.signature(find).parameters and (
            get_process_group_ranks(find(**how, with_gtp_remat=False)) != ranks
        ):
            return ()
    except AssertionError:  # this group was not made
        return ()
    return tuple(ranks)


@functools.cache
def safe_types(stock: bool = False) -> tuple[Allowed, ...]:
    """Return megatron-core's enumerations, which its `args` contain, as allowed types of objects. Loading one
    only looks up a member.

    stock: also the names of torch's optimizers, which stock megatron-core stores in the parameter groups of
        an offloaded optimizer; loading can't create one.
    """
    from megatron.core import enums
    from megatron.core.transformer import enums as transformer_enums

    members = [*vars(enums).values(), *vars(transformer_enums).values()]
    kinds = {kind for kind in members if isinstance(kind, type) and issubclass(kind, enum.Enum)}
    allowed: list[Allowed] = [
        (functools.partial(_member, kind), f"{kind.__module__}.{kind.__qualname__}") for kind in kinds
    ]
    if stock:
        for optimizer in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            name = f"{optimizer.__module__}.{optimizer.__qualname__}"
            allowed.append((functools.partial(_refuse, name), name))
    return tuple(allowed)


def _member(kind: type[enum.Enum], value: object) -> enum.Enum:
    return kind(value)


def _refuse(name: str, *args: object) -> None:
    raise ValueError(f"a checkpoint may name {name}, not make one")


def load_strategies() -> tuple[object, object]:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    return TorchDistLoadShardedStrategy(), TorchCommonLoadStrategy()


# -- private names of DistributedOptimizer -----------------------------------------------------


def local_ranges(optimizer: DistributedOptimizer) -> list[tuple[torch.nn.Parameter, int, int]]:
    """List (model parameter, start, stop): the flat range of each parameter whose state this rank has."""
    return [
        (param, ranges["param"].start, ranges["param"].end)
        for buffer in optimizer.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for param, ranges in bucket["param_map"].items()
    ]


def parameter_state(optimizer: DistributedOptimizer, param: torch.nn.Parameter) -> StateDict:
    """Return `param`, `exp_avg`, `exp_avg_sq` ... of a model parameter, flat; views or copies."""
    return dict(optimizer._get_main_param_and_optimizer_states(param))


@torch.no_grad()  # the main parameter may be a view of a model parameter
def set_parameter_state(
    optimizer: DistributedOptimizer, param: torch.nn.Parameter, tensors: StateDict
) -> None:
    optimizer._set_main_param_and_optimizer_states(param, tensors)


def counts_per_parameter() -> bool:
    """Return whether the inner optimizer counts steps in the state of each parameter, as PyTorch's Adam does.

    Optimizers of Transformer Engine and Apex count in their parameter groups. megatron-core uses these if one
    of the packages is installed.
    """
    return not distrib_optimizer.HAVE_APEX_OR_TE


def state_without_parameters(optimizer: DistributedOptimizer) -> StateDict:
    """Return `state_dict()` of a DistributedOptimizer that has no parameters on this rank."""
    inner = optimizer.optimizer.state_dict()
    state: StateDict = {"optimizer": {key: value for key, value in inner.items() if key != "state"}}
    if optimizer.grad_scaler:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


ORIGINAL_LOAD = original_of(DistributedOptimizer.load_state_dict)
"""Megatron's own function, also after `install()`."""


def describes_optimizers() -> bool:
    """Return whether `install` has replaced DistributedOptimizer.sharded_state_dict."""
    return original_of(DistributedOptimizer.sharded_state_dict) is not DistributedOptimizer.sharded_state_dict


def has_master_weights(optimizer: DistributedOptimizer) -> bool:
    """Return whether the inner optimizer keeps the main parameters, instead of megatron-core."""
    return bool(getattr(optimizer.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def is_offloaded(optimizer: DistributedOptimizer) -> bool:
    """Return whether it has a HybridDeviceOptimizer, whose parts have their own copies of the state."""
    return hasattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers")


def sync_offloaded(optimizer: DistributedOptimizer) -> None:
    optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


GROUP_OF_PARAMETER = "param_to_group_meta"
"""Key of the parameter groups in an optimizer's state under Megatron-FSDP."""


def matched_groups(optimizer: DistributedOptimizer, groups: StateDict) -> list[tuple[StateDict, StateDict]]:
    """Pair each parameter group of an optimizer with the loaded one. groups: by names of parameters."""
    own = optimizer.optimizer.param_groups
    return list(zip(own, optimizer._param2group_meta_to_param_groups(groups, own), strict=True))


def fsdp_state(optimizer: DistributedOptimizer) -> dict[str, StateDict]:
    """Return the live state of each parameter, by its name, under Megatron-FSDP."""
    state: dict[str, StateDict] = optimizer.sharded_param_state_fsdp_dtensor()["state"]
    return state


def synchronize_steps(chained: ChainedOptimizer) -> None:
    """Give all parameter groups of a ChainedOptimizer the same step."""
    chained._synchronize_steps()
