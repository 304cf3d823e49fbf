"""Holdfast's manager for Megatron-Bridge, as a subclass with deadlines of its own."""

from holdfast.megatron.bridge import CheckpointManager


class Manager(CheckpointManager):
    """The test sets both deadlines."""
