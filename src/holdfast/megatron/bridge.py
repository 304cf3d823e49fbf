"""Megatron-Bridge's checkpoint manager:
`CheckpointConfig.custom_manager_class = "holdfast.megatron.bridge.CheckpointManager"`."""

from holdfast._frameworks.megatron.bridge import CheckpointManager

__all__ = ["CheckpointManager"]
