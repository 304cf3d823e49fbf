"""A checkpoint manager for Megatron-Bridge: `CheckpointConfig.custom_manager_class`, since v0.4.0.

The tests run it with 0.6.2 (docs/recipes/megatron-bridge.md lists what was run before). 0.3.1 does not have
the setting; use `install()` there. Megatron-Bridge's own manager does the work, and writes tracker files,
`train_state.pt` and `run_config.yaml`. Its saves and loads go through Holdfast, and its waits have deadlines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from holdfast._core.protocol.job import Job
from holdfast._frameworks.guard import guarded
from holdfast._frameworks.install import install, is_installed


class CheckpointManager:
    """Megatron-Bridge's `DefaultCheckpointManager` over Holdfast. The constructor calls `install()`, unless
    the process has done so."""

    job: Job | None = None
    """As for `install`. A subclass may set one; an earlier call of `install` keeps its own."""

    def __init__(self, checkpoint_config: object) -> None:
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        # An earlier `install()`, with other deadlines, participants or guards, stays.
        if not is_installed():
            install(job=self.job)
        self._default = DefaultCheckpointManager(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, object]:
        """The context that Megatron-Bridge's setup reads."""
        context: dict[str, object] = self._default.checkpointing_context
        return context

    def save(self, ctx: object, *callback_manager: object) -> None:
        """Save. callback_manager: the second argument since v0.5; v0.4 gives none."""
        with self._guarded("save"):
            self._default.save(ctx, *callback_manager)

    def load(self, ctx: object) -> tuple[int, int]:
        """Load; return (iteration, floating point operations so far), or (0, 0) if there is no checkpoint."""
        with self._guarded("load"):
            iteration, operations = self._default.load(ctx)
            return iteration, operations

    def finalize_async_saves(self, state: object, blocking: bool = False, terminate: bool = False) -> None:
        # An asynchronous save's last finalize function is a barrier; all ranks reach it in the same call.
        with self._guarded("finalize_async_saves"):
            self._default.finalize_async_saves(state, blocking=blocking, terminate=terminate)

    def _guarded(self, method: str) -> AbstractContextManager[None]:
        title = f"{type(self).__qualname__}.{method}"
        return guarded(title, job=self.job)
