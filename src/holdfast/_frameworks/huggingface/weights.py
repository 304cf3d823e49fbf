"""Which weights a framework loads or exports, or why the call is left to it; without megatron-core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Left(Exception):
    """Raised with the reason why a call is left to the framework."""


@dataclass(frozen=True)
class Weights:
    """The weights of a live model, and the published folder that they are (or were) loaded from.

    chunks: the parts of the model on this rank, one for each virtual pipeline stage; they may have wrappers.
    folder: a path.
    without: the output layer's name, if it is not loaded.
    """

    chunks: Sequence[torch.nn.Module]
    folder: str
    without: tuple[str, ...] = ()

    def modules(self) -> list[torch.nn.Module]:
        """Return the parts of the model without wrappers."""
        return [unwrapped(chunk) for chunk in self.chunks]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Remove the wrappers for training (DDP, Float16Module) from a model."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module
