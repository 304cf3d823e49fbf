"""Megatron-Bridge's checkpoint manager:
`CheckpointConfig.custom_manager_class = "holdfast.megatron.bridge.CheckpointManager"`."""

from holdfast._frameworks.megatron_bridge.manager import CheckpointManager

__all__ = ["CheckpointManager"]
