"""torchtitan's checkpoint manager: `checkpoint=holdfast.torchtitan.CheckpointManager.Config(enable=True)`."""

from holdfast._frameworks.torchtitan.manager import CheckpointManager

__all__ = ["CheckpointManager"]
