"""`install()`: the frameworks' own save and load functions call Holdfast, with no other change.

verl, Megatron-LM, Megatron-Bridge and ms-swift all call through attributes of the module
`megatron.core.dist_checkpointing` and through methods of the optimizer, so those are what is replaced.
`uninstall()` puts back what was there. Nothing is replaced by importing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from holdfast.format.names import HOLDFAST_CONFIG
from holdfast.groups.lifecycle.warm_up import warm_up as warm_up_groups
from holdfast.groups.session.session import Session
from holdfast.integrations.megatron import checkpointing, mcore, metadata, optimizer, queue
from holdfast.integrations.megatron.guard import find
from holdfast.integrations.megatron.guard import guard as guard_function

_sessions: list[Session] = []
"""The one of this process, if it has one."""
_replaced: list[tuple[Any, str, Any]] = []
_INHERITED = object()
"""In place of what a class has from another."""
_STOCK_OPTIMIZER_FORMATS = (
    "dp_reshardable",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
    "fully_sharded_model_space",
    "fsdp_dtensor",
)
"""Descriptions of optimizer state that a stock checkpoint may need to be loaded."""


def install(
    *,
    timeout: float = 1800.0,
    stall_timeout: float = 120.0,
    participants: Any = None,
    guard: Sequence[str] = (),
    warm_up: bool = False,
    session: bool = False,
    memory_budget: int | None = None,
) -> None:
    """Replace megatron-core's save and load, and its optimizer's state dict, by Holdfast's. Idempotent.

    timeout, stall_timeout, participants: as for `save`, for every call that frameworks make.
    guard: dotted names of functions, a framework's own save and load, in which barriers and object
        collectives wait over the roster with these deadlines (`guarded`). Only functions that are looked up
        by that name when they are called can be replaced.
    warm_up: `parallel_state.initialize_model_parallel` issues the first collectives of every group that there
        is, at its end, with these deadlines and `memory_budget` bytes of GPU memory (`holdfast.warm_up`).
    session: from there to the end of the process ranks watch each other, and groups are closed in order
        (`holdfast.session`).
    """
    places = {place: find(place) for place in guard}  # a name that is none changes nothing
    uninstall()
    for place, (owner, name) in places.items():
        wrapped = guard_function(place, owner, name, timeout=timeout, stall_timeout=stall_timeout)
        _replace(owner, name, wrapped)
    how = {"timeout": timeout, "stall_timeout": stall_timeout, "participants": participants}
    modules = (mcore.dist_checkpointing, mcore.serialization)
    for module in modules:
        _replace(module, "save", _with(checkpointing.save, how))
        _replace(module, "load", _with(checkpointing.load, how))
        _replace(module, "load_plain_tensors", _with(checkpointing.load_plain_tensors, how))
        for name in (
            "load_common_state_dict",
            "load_content_metadata",
            "load_tensors_metadata",
            "load_sharded_metadata",
        ):
            _replace(module, name, getattr(metadata, name))
    _replace(
        mcore.dist_checkpointing,
        "check_is_distributed_checkpoint",
        metadata.check_is_distributed_checkpoint,
    )
    name = "verify_checkpoint_and_load_strategy"
    if hasattr(mcore.serialization, name):  # before 0.17
        _replace(mcore.serialization, name, _strategies(getattr(mcore.serialization, name)))
    _replace(
        mcore.DistributedOptimizer,
        "sharded_state_dict",
        _describe(mcore.DistributedOptimizer.sharded_state_dict),
    )
    if warm_up or session:
        name = "initialize_model_parallel"
        made = _opened(
            getattr(mcore.parallel_state, name), warm_up, session, timeout, stall_timeout, memory_budget
        )
        _replace(mcore.parallel_state, name, made)
    calls = mcore.AsyncCallsQueue
    _replace(calls, "schedule_async_request", queue.schedule(calls.schedule_async_request))
    _replace(calls, "maybe_finalize_async_calls", queue.finalize(calls.maybe_finalize_async_calls))
    for kind in (mcore.DistributedOptimizer, mcore.ChainedOptimizer):
        _replace(kind, "load_state_dict", _give_back(kind.load_state_dict))
    _replace(
        mcore.ChainedOptimizer, "sharded_state_dict", _describe(mcore.ChainedOptimizer.sharded_state_dict)
    )


def uninstall() -> None:
    """Put back what `install` replaced."""
    while _replaced:
        target, name, original = _replaced.pop()
        if original is _INHERITED:
            delattr(target, name)
        else:
            setattr(target, name, original)


def _replace(target: Any, name: str, new: Any) -> None:
    if hasattr(target, name):
        _replaced.append((target, name, vars(target).get(name, _INHERITED)))
        setattr(target, name, new)


def _opened(
    original: Callable[..., None],
    warm: bool,
    watched: bool,
    timeout: float,
    stall_timeout: float,
    memory_budget: int | None,
) -> Callable[..., None]:
    """`initialize_model_parallel`, and after it all groups are warm."""

    @wraps(original)
    def initialize_model_parallel(*args: Any, **named: Any) -> None:
        original(*args, **named)
        if watched and not _sessions:
            made = Session(
                timeout=timeout,
                stall_timeout=stall_timeout,
                warm=warm,
                memory_budget=memory_budget,
                owns_world=True,
            )
            _sessions.append(made.until_exit())
        elif warm:
            warm_up_groups(timeout=timeout, stall_timeout=stall_timeout, memory_budget=memory_budget)

    return initialize_model_parallel


def _with(call: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    @wraps(call)
    def bound(*args: Any, **named: Any) -> Any:
        return call(*args, **{**how, **named})

    return bound


def _strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    """Frameworks ask for the strategy that loads a folder before they call `load`. For a folder of
    Holdfast's, for which megatron-core has none, its own stands in; nobody uses it."""

    @wraps(original)
    def verify_checkpoint_and_load_strategy(checkpoint_dir: str, *args: Any, **named: Any) -> Any:
        config = mcore.maybe_load_config(checkpoint_dir)
        if config is not None and config.sharded_backend == HOLDFAST_CONFIG["sharded_backend"]:
            return mcore.load_strategies()
        return original(checkpoint_dir, *args, **named)

    return verify_checkpoint_and_load_strategy


def _describe(original: Callable[..., Any]) -> Callable[..., Any]:
    """sharded_state_dict of an optimizer: ours, unless a stock checkpoint has it otherwise."""

    @wraps(original)
    def sharded_state_dict(
        self: Any,
        model_sharded_state_dict: Any = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
        **named: Any,
    ) -> Any:
        wanted = sharding_type or (metadata or {}).get(mcore.SHARDING_TYPE)
        if wanted == "fsdp_dtensor" or (is_loading and wanted in _STOCK_OPTIMIZER_FORMATS):
            if sharding_type is not None:
                named["sharding_type"] = sharding_type
            return original(self, model_sharded_state_dict or {}, is_loading, metadata=metadata, **named)
        return optimizer.sharded_state_dict(self, model_sharded_state_dict or {}, is_loading)

    return sharded_state_dict


def _give_back(original: Callable[..., Any]) -> Callable[..., Any]:
    """load_state_dict of an optimizer: ours for what `_describe` made, else Megatron's."""

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        if optimizer.is_ours(state_dict):
            optimizer.load_state_dict(self, state_dict)
        else:
            original(self, state_dict)

    return load_state_dict
