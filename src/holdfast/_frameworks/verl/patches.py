"""What verl lacks: a method of its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from holdfast._frameworks.patching import Replacement
from holdfast._frameworks.settings import Settings


def replacements(settings: Settings) -> Iterator[Replacement]:
    """Add the method by which verl's trainer asks its workers at every step to finalize asynchronous saves.

    No worker of verl has it, so without it no asynchronous save is ever finalized.
    """

    def make(_: object) -> Callable[..., object]:
        decorator = import_module("verl.single_controller.base.decorator")

        def async_calls_finalize_fn_exec(self: object, blocking: bool = False) -> None:
            # Imported at the call, because verl may be imported before megatron-core.
            base = import_module("megatron.core.dist_checkpointing.strategies.base")
            base.async_calls.maybe_finalize_async_calls(blocking=blocking)

        register = decorator.register(dispatch_mode=decorator.Dispatch.ONE_TO_ALL)
        made: Callable[..., object] = register(async_calls_finalize_fn_exec)
        return made

    place = "verl.workers.engine_workers"
    for worker in ("ActorRolloutRefWorker", "TrainingWorker"):
        yield Replacement(
            place, f"{worker}.async_calls_finalize_fn_exec", "checkpoints", make, optional=True, adds=True
        )
