"""Replacements for functions of megatron-core: save and load, optimizers' state dicts, the queue of
asynchronous saves, `initialize_model_parallel`, and Megatron-FSDP's description of uneven tensors.

verl, Megatron-LM, Megatron-Bridge and ms-swift all call these functions. This module does not import
megatron-core: a replacement imports what it needs when it is called.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast.format.names import HOLDFAST_CONFIG
from holdfast.groups.lifecycle.warm_up import warm_up as warm_up_groups
from holdfast.groups.session.session import Session
from holdfast.integrations.guard import is_guarded
from holdfast.integrations.patching import Make, Replacement
from holdfast.integrations.settings import Settings

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger("holdfast")
Function = Callable[..., object]
_sessions: list[Session] = []
"""The session of this process, if it has one."""
_STOCK_OPTIMIZER_FORMATS = (
    "dp_reshardable",
    "fully_sharded_bucket_space",
    "dp_zero_gather_scatter",
    "fully_sharded_model_space",
    "fsdp_dtensor",
)
"""Formats of optimizer state that only stock's description can load."""
_CORE = "megatron.core.dist_checkpointing"
QUEUE = f"{_CORE}.strategies.async_utils"
"""The module of AsyncCallsQueue."""
_OPTIMIZERS = (
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"),
    ("megatron.core.optimizer.optimizer", "ChainedOptimizer"),
)
_SPLITS = "megatron.core.transformer.fsdp_dtensor_checkpoint"
_UNEVEN = ("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor", "megatron_fsdp.uneven_dtensor")
_PREPARE = (
    ("megatron.bridge.training.checkpointing", "preprocess_fsdp_dtensor_state_dict"),
    ("megatron.training.checkpointing", "preprocess_fsdp_dtensor_state_dict"),
    ("swift.megatron.utils.megatron_fsdp_checkpoint", "_preprocess_state_dict"),
)
"""Functions with the arguments (configuration, state, model)."""
_here = threading.local()


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Yield all replacements, of all parts of `install`."""
    how = {"timeout": settings.timeout, "stall_timeout": settings.stall_timeout}

    def bound(name: str, **more: object) -> Make:
        # A lambda, because participants are asked for at each call: groups are made after install().
        return _standing_in("checkpointing", name, lambda: {**how, "participants": settings.ranks(), **more})

    serialization = f"{_CORE}.serialization"
    budget = settings.host_memory_budget
    yield Replacement(serialization, "save", "checkpoints", bound("save", host_memory_budget=budget))
    yield Replacement(serialization, "load", "checkpoints", bound("load", nearest_rng=settings.nearest_rng))
    yield Replacement(serialization, "load_plain_tensors", "checkpoints", bound("load_plain_tensors"))
    for name in (
        "load_common_state_dict",
        "load_content_metadata",
        "load_tensors_metadata",
        "load_sharded_metadata",
    ):
        yield Replacement(serialization, name, "checkpoints", _standing_in("metadata", name))
    name = "check_is_distributed_checkpoint"
    yield Replacement(f"{_CORE}.core", name, "checkpoints", _standing_in("metadata", name))
    name = "verify_checkpoint_and_load_strategy"  # before 0.17
    yield Replacement(f"{_CORE}.validation", name, "checkpoints", _strategies, optional=True)
    for module, kind in _OPTIMIZERS:
        yield Replacement(module, f"{kind}.sharded_state_dict", "checkpoints", _describe)
        yield Replacement(module, f"{kind}.load_state_dict", "checkpoints", _give_back)
    yield Replacement(QUEUE, "AsyncCallsQueue.schedule_async_request", "checkpoints", _queue("schedule"))
    yield Replacement(QUEUE, "AsyncCallsQueue.maybe_finalize_async_calls", "checkpoints", _queue("finalize"))
    for name in ("handle_swiglu_in_state_dict", "handle_gdn_in_state_dict"):
        yield Replacement(_SPLITS, name, "checkpoints", _split(name), optional=True)
    for module in _UNEVEN:
        name = "preprocess_state_dict_for_uneven_dtensor"
        yield Replacement(module, name, "checkpoints", _uneven, optional=True)
    for module, name in _PREPARE:
        yield Replacement(module, name, "checkpoints", _with_model, optional=True)
    yield Replacement(
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        "groups",
        lambda original: _opened(original, settings),
    )


def _ours(module: str) -> ModuleType:
    """Import a module of this package, and with it megatron-core."""
    return import_module(f"holdfast.integrations.megatron.{module}")


def _standing_in(module: str, name: str, more: Callable[[], dict[str, object]] = dict) -> Make:
    """Make a function that calls ours of that name, and adds `more` to the arguments."""

    def make(original: Function) -> Function:
        @wraps(original)
        def call(*args: object, **named: object) -> object:
            # The caller's arguments take precedence over those of `install`.
            return getattr(_ours(module), name)(*args, **{**more(), **named})

        return call

    return make


def _queue(name: str) -> Make:
    def make(original: Function) -> Function:
        @wraps(original)
        def call(*args: object, **named: object) -> object:
            return getattr(_ours("queue"), name)(original)(*args, **named)

        return call

    return make


def _opened(original: Function, settings: Settings) -> Function:
    """Make `initialize_model_parallel` that also warms up all groups, and starts the session."""

    @wraps(original)
    def initialize_model_parallel(*args: object, **named: object) -> None:
        original(*args, **named)
        # Asked after the original, because without `participants=` the new groups give the ranks.
        if settings.ranks() is not None:
            _warn_without_session(settings)
        # A process has one session, but a framework may call this again to make new groups.
        elif settings.session and not _sessions:
            made = Session(
                timeout=settings.timeout,
                stall_timeout=settings.stall_timeout,
                warm=settings.warm_up,
                operations=settings.operations,
                memory_budget=settings.memory_budget,
                owns_world=True,
            )
            _sessions.append(made.until_exit())
        elif settings.warm_up:
            warm_up_groups(
                timeout=settings.timeout,
                stall_timeout=settings.stall_timeout,
                operations=settings.operations,
                memory_budget=settings.memory_budget,
            )

    return initialize_model_parallel


def _warn_without_session(settings: Settings) -> None:
    """Warn that only some ranks train: a session and a warm-up of all groups would wait for the others."""
    log.warning(
        "install(): %d of %d ranks train, so there is no session, and groups are not warmed up. "
        "Call holdfast.warm_up(groups) on the ranks that are in them.",
        len(settings.ranks() or ()),
        dist.get_world_size(),
    )


def _strategies(original: Function) -> Function:
    """Make a function that returns strategies also for a Holdfast folder: some frameworks ask for them
    before they call `load`. megatron-core has none for it, so its own are returned; they are not used."""

    @wraps(original)
    def verify_checkpoint_and_load_strategy(checkpoint_dir: str, *args: object, **named: object) -> object:
        mcore = _ours("mcore")
        config = mcore.maybe_load_config(checkpoint_dir)
        if config is not None and config.sharded_backend == HOLDFAST_CONFIG["sharded_backend"]:
            return mcore.load_strategies()
        return original(checkpoint_dir, *args, **named)

    return verify_checkpoint_and_load_strategy


def _describe(original: Function) -> Function:
    """Make an optimizer's `sharded_state_dict`: ours, or stock's to load a format that only stock writes."""

    @wraps(original)
    def sharded_state_dict(
        self: object,
        model_sharded_state_dict: object = None,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, object] | None = None,
        **named: object,
    ) -> object:
        # Ours describes every save except Megatron-FSDP's. State in a format of stock's own loads only with
        # stock's description.
        wanted = sharding_type or (metadata or {}).get(_ours("mcore").SHARDING_TYPE)
        if wanted == "fsdp_dtensor" or (is_loading and wanted in _STOCK_OPTIMIZER_FORMATS):
            # Only if it was given: a chain passes it to optimizers that do not have this argument.
            if sharding_type is not None:
                named["sharding_type"] = sharding_type
            return original(self, model_sharded_state_dict or {}, is_loading, metadata=metadata, **named)
        return _ours("optimizer").sharded_state_dict(self, model_sharded_state_dict or {}, is_loading)

    return sharded_state_dict


def _give_back(original: Function) -> Function:
    """Make an optimizer's `load_state_dict`: ours for what `_describe` made, otherwise Megatron's."""

    @wraps(original)
    def load_state_dict(self: object, state_dict: object) -> None:
        optimizer = _ours("optimizer")
        if optimizer.is_ours(state_dict):
            optimizer.load_state_dict(self, state_dict)
        else:
            original(self, state_dict)

    return load_state_dict


def _split(name: str) -> Make:
    """Make Megatron-FSDP's function that splits fused parameters: ours, without a collective.

    A parameter that never got a gradient has no optimizer state on some ranks; with stock code, ranks then
    issue different collectives. Here such ranks add zeros, which is the value of that state.
    """

    def make(original: Function) -> Function:
        @wraps(original)
        def call(
            model: object,
            model_state_dict: object,
            optimizer_state_dict: object = None,
            *args: object,
            **named: object,
        ) -> object:
            fsdp = import_module("holdfast.integrations.megatron_fsdp")
            if isinstance(optimizer_state_dict, dict) and "state" in optimizer_state_dict:
                # Before the split, so that the added state is split, too.
                fsdp.fill_missing_states(model, optimizer_state_dict)
            return getattr(fsdp, name)(model, model_state_dict, optimizer_state_dict, *args, **named)

        return call

    return make


def _uneven(original: Function) -> Function:
    """Make the function that sets chunk metadata: ours in a save or load by Holdfast, with the model's
    parameters; elsewhere stock's, because torch DCP needs its metadata."""

    @wraps(original)
    def preprocess_state_dict_for_uneven_dtensor(
        state_dict: object, *args: object, **named: object
    ) -> object:
        model = getattr(_here, "model", None)
        if model is None or not is_guarded():
            return original(state_dict, *args, **named)
        fsdp = import_module("holdfast.integrations.megatron_fsdp")
        return fsdp.preprocess_state_dict_for_uneven_dtensor(state_dict, model)

    return preprocess_state_dict_for_uneven_dtensor


def _with_model(original: Function) -> Function:
    """Make the function that prepares an fsdp_dtensor state, and keep its model for `_uneven`, which stock
    code calls without the model."""

    @wraps(original)
    def prepare(cfg: object, state_dict: object, model: object, *args: object, **named: object) -> object:
        outer, _here.model = getattr(_here, "model", None), model
        try:
            return original(cfg, state_dict, model, *args, **named)
        finally:
            _here.model = outer

    return prepare
