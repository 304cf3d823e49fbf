"""A checkpoint manager for Megatron-Bridge: `CheckpointConfig.custom_manager_class`, which v0.4.0 and later
have.

The tests run it with 0.6.2 (docs/recipes/megatron-bridge.md says what was run before). 0.3.1 lacks the
setting: it takes `install()`. Megatron-Bridge's own manager does the work, so tracker files, `train_state.pt`
and `run_config.yaml` stay its own; what it saves and loads goes through Holdfast, and what it waits for has a
deadline.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from holdfast.format.torch_objects import allowing
from holdfast.integrations.guard import guarded
from holdfast.integrations.install import install, is_installed


class CheckpointManager:
    """Megatron-Bridge's `DefaultCheckpointManager` over Holdfast. Making one calls `install()`, unless that
    was done."""

    timeout: float = 1800.0
    stall_timeout: float = 120.0
    """Deadlines as for `install`. A subclass may have others; what `install` was called with before stays."""

    def __init__(self, checkpoint_config: object) -> None:
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        # What was installed with other deadlines, participants or guards stays.
        if not is_installed():
            install(timeout=self.timeout, stall_timeout=self.stall_timeout)
        self._config = checkpoint_config
        self._default = DefaultCheckpointManager(checkpoint_config)

    @property
    def checkpointing_context(self) -> dict[str, object]:
        """Megatron-Bridge's setup looks into it."""
        context: dict[str, object] = self._default.checkpointing_context
        return context

    def save(self, ctx: object, *callback_manager: object) -> None:
        """callback_manager: the second argument since v0.5; v0.4 gives none."""
        with self._guarded("save"):
            self._default.save(ctx, *callback_manager)

    def load(self, ctx: object) -> tuple[int, int]:
        """(iteration, floating point operations so far); (0, 0) if there is nothing to load."""
        from megatron.bridge.training.state import TrainState

        # Rank 0 reads `train_state.pt` and broadcasts it as an object of this class, which must decode.
        with self._guarded("load"), allowing([TrainState]):
            iteration, operations = self._default.load(ctx)
            return iteration, operations

    def finalize_async_saves(self, state: object, blocking: bool = False, terminate: bool = False) -> None:
        # The last function of an asynchronous save is a barrier; all ranks come to it in the same call.
        with self._guarded("finalize_async_saves"):
            self._default.finalize_async_saves(state, blocking=blocking, terminate=terminate)

    def _guarded(self, method: str) -> AbstractContextManager[None]:
        config = self._config
        local = getattr(config, "non_persistent_ckpt_type", None) == "local"
        if local or getattr(config, "also_save_hf_checkpoint", False):
            return nullcontext()  # these exchange objects of classes that a guard may refuse
        title = f"{type(self).__qualname__}.{method}"
        return guarded(title, timeout=self.timeout, stall_timeout=self.stall_timeout)
