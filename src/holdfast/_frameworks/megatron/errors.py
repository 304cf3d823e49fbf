"""The errors of megatron-core as a base of Holdfast's (`foreign_errors`)."""

from __future__ import annotations

from functools import cache

from holdfast._frameworks.foreign_errors import of_torch
from holdfast._frameworks.megatron import mcore


@cache
def of_megatron() -> type[BaseException]:
    """Return a subclass of the errors that megatron-core raises: its own, and torch DCP's, which its
    `torch_dist` strategy raises for a key or a shape that the checkpoint does not have."""
    return type("CheckpointingException", (mcore.CheckpointingException, of_torch()), {})
