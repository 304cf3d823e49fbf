"""Replacements for functions of megatron-core: save and load, optimizers' state dicts, the queue of
asynchronous saves, `initialize_model_parallel`, and those of Megatron-FSDP, which megatron-core contains.

verl, Megatron-LM, Megatron-Bridge and ms-swift all call these functions. This module does not import
megatron-core: a replacement imports what it needs when it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING

import torch.distributed as dist

from holdfast._core.base.deadline import TIMEOUT
from holdfast._core.base.reporting import warn_once
from holdfast._core.protocol.call import own_timeout
from holdfast._frameworks.arguments import by_name, names_of
from holdfast._frameworks.folders import refuse_url
from holdfast._frameworks.guard import is_guarded
from holdfast._frameworks.megatron_fsdp import patches as megatron_fsdp
from holdfast._frameworks.patching import MakeReplacement, Replacement
from holdfast._frameworks.ray import is_between_calls
from holdfast._frameworks.settings import Settings
from holdfast._groups.lifecycle.warm_up import warm_up as warm_up_groups
from holdfast._groups.session.session import GroupSession
from holdfast.errors import BadInput, GroupsFailed

if TYPE_CHECKING:
    from types import ModuleType

log = logging.getLogger("holdfast")
Function = Callable[..., object]
_sessions: list[GroupSession] = []
"""The session of this process, if it has one."""
_CORE = "megatron.core.dist_checkpointing"
QUEUE = f"{_CORE}.strategies.async_utils"
"""The module of AsyncCallsQueue."""
_ONE, _CHAIN = "megatron.core.optimizer.distrib_optimizer", "megatron.core.optimizer.optimizer"
_WITH_ORIGINAL = (
    (_ONE, "DistributedOptimizer.sharded_state_dict", "optimizer", "describe"),
    (_ONE, "DistributedOptimizer.load_state_dict", "optimizer", "give_back"),
    (_CHAIN, "ChainedOptimizer.sharded_state_dict", "optimizer", "describe"),
    (_CHAIN, "ChainedOptimizer.load_state_dict", "optimizer", "give_back"),
    (QUEUE, "AsyncCallsQueue.schedule_async_request", "queue", "schedule"),
    (QUEUE, "AsyncCallsQueue.maybe_finalize_async_calls", "queue", "finalize"),
)
"""Methods, with the module and function of Holdfast that replaces them and is also given the original."""
PLANNED_BY = (
    f"{_CORE}.strategies.state_dict_saver",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver",
)
"""Modules whose `save_state_dict_async_plan` begins an asynchronous save of fsdp_dtensor and torch_dcp."""


def replacements(settings: Settings) -> Iterator[Replacement]:
    serialization = f"{_CORE}.serialization"
    for name in ("save", "load", "load_plain_tensors"):
        # A lambda, because participants are asked for at each call: groups are made after install().
        make = _standing_in("checkpointing", name, lambda: {"job": settings.of_a_call()})
        yield Replacement(serialization, name, "checkpoints", make, takes=_taken("checkpointing", name))
    for name in (
        "load_common_state_dict",
        "load_content_metadata",
        "load_tensors_metadata",
        "load_sharded_metadata",
    ):
        make, takes = _standing_in("metadata", name), _taken("metadata", name)
        yield Replacement(serialization, name, "checkpoints", make, takes=takes)
    name = "check_is_distributed_checkpoint"
    make, takes = _standing_in("metadata", name), _taken("metadata", name)
    yield Replacement(f"{_CORE}.core", name, "checkpoints", make, takes=takes)
    name = "verify_checkpoint_and_load_strategy"  # before 0.17
    make, takes = _through("metadata", "strategies"), _taken("metadata", "strategies")
    yield Replacement(f"{_CORE}.validation", name, "checkpoints", make, optional=True, takes=takes)
    for place, name, module, ours in _WITH_ORIGINAL:
        yield Replacement(place, name, "checkpoints", _through(module, ours), takes=_taken(module, ours))
    yield from megatron_fsdp.replacements()
    for module in PLANNED_BY:
        yield Replacement(module, "save_state_dict_async_plan", "checkpoints", _told, optional=True)
    yield Replacement(
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        "groups",
        lambda original: _opened(original, settings),
    )


def _ours(module: str) -> ModuleType:
    """Import a module of this package, and with it megatron-core."""
    return import_module(f"holdfast._frameworks.megatron.{module}")


def _taken(module: str, name: str) -> Callable[[], tuple[str, ...]]:
    """Return a function that returns the parameter names of a function in this package."""
    return lambda: names_of(getattr(_ours(module), name))


def _standing_in(module: str, name: str, more: Callable[[], dict[str, object]] = dict) -> MakeReplacement:
    """Make a replacement that calls this package's function of that name with the same arguments, and those
    of `more`."""

    def make(original: Function) -> Function:
        @wraps(original)
        def call(*args: object, **named: object) -> object:
            # megatron-core has no tracker, but the frameworks that call it write one.
            refuse_url(
                next((one for one in args[:2] if isinstance(one, str)), named.get("checkpoint_dir")), name
            )
            # The caller's arguments take precedence over those of `install`.
            return getattr(_ours(module), name)(*args, **{**more(), **named})

        return call

    return make


def _through(module: str, name: str) -> MakeReplacement:
    """Make a replacement that calls this package's function of that name with the original, the first
    argument (the object of a method), and the others by name."""

    def make(original: Function) -> Function:
        first = names_of(original)[0]

        @wraps(original)
        def call(*args: object, **named: object) -> object:
            ours = getattr(_ours(module), name)
            given = by_name(original, (first, *names_of(ours)), args, named)
            return ours(original, given.pop(first), **given)

        return call

    return make


def _opened(original: Function, settings: Settings) -> Function:
    """Make `initialize_model_parallel` that also warms up all groups, and starts the session."""

    @wraps(original)
    def initialize_model_parallel(*args: object, **named: object) -> None:
        original(*args, **named)
        if dist.get_backend() == "fake":  # the other ranks are not there
            return
        # Asked after the original, because without participants the new groups give the ranks.
        ranks = settings.ranks()
        if ranks is not None:
            # A session and a warm-up of all groups would wait for ranks that do not train.
            log.warning(
                "install(): %d of %d ranks train, so there is no session, and groups are not warmed up. "
                "Call holdfast.warm_up(groups) on the ranks that are in them.",
                len(ranks),
                dist.get_world_size(),
            )
            return
        try:
            _begin_session(settings)
        except (BadInput, GroupsFailed) as error:
            # Continue without the session and the warm-up, which are optional.
            log.warning("install(): groups are not warmed up, and no session watches them: %s", error)

    return initialize_model_parallel


def _begin_session(settings: Settings) -> None:
    job = replace(settings.job, timeout=max(settings.job.timeout or TIMEOUT, own_timeout(None)))
    # A process has one session, but a framework may make new groups.
    if settings.session and not _sessions:
        made = GroupSession(
            job=job,
            after_end=settings.after_end,
            warm=settings.warm_up,
            operations=settings.operations,
            memory_budget=settings.memory_budget,
            owns_world=True,
        )
        _sessions.append(made.until_exit(is_between_calls))
    elif settings.warm_up:
        warm_up_groups(job=job, operations=settings.operations, memory_budget=settings.memory_budget)


def _told(original: Function) -> Function:
    """Make the function that begins an asynchronous DCP save, and warns in a guarded call: it is the only
    kind of save that is not replaced there."""

    @wraps(original)
    def save_state_dict_async_plan(*args: object, **named: object) -> object:
        if is_guarded():
            warn_once(
                "An asynchronous save of fsdp_dtensor or torch_dcp is not replaced: "
                f"{original.__module__} plans and writes it, with its collectives, and the checkpoint is not "
                "Holdfast's. Leave out --async-save (async_save), or save as torch_dist."
            )
        return original(*args, **named)

    return save_state_dict_async_plan
