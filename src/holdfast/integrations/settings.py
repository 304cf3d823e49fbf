"""The settings of `install`: deadlines, participants, and which parts are on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch.distributed as dist

from holdfast.protocol.call import check_participants

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Participants: TypeAlias = "Iterable[int] | ProcessGroup | Callable[[], Iterable[int]] | None"
"""Ranks, a process group, or a function that is asked at each call (groups may be made later)."""


@dataclass(frozen=True)
class Settings:
    """The arguments of `install`, checked."""

    timeout: float = 1800.0
    stall_timeout: float = 120.0
    participants: Participants = None
    checkpoints: bool = True
    huggingface: bool = True
    guard: bool = True
    guarded: tuple[str, ...] = ()
    """More functions to guard, by their dotted names."""
    warm_up: bool = True
    session: bool = True
    operations: tuple[str, ...] | None = None
    memory_budget: int | None = None
    host_memory_budget: int | None = None
    nearest_rng: bool = False

    def is_on(self, part: str) -> bool:
        """Return whether a part (`Replacement.part`) is switched on."""
        return {
            "checkpoints": self.checkpoints,
            "huggingface": self.huggingface,
            "guard": self.guard,
            "groups": self.warm_up or self.session,
        }[part]

    def ranks(self) -> tuple[int, ...] | None:
        """Return the ranks that take part, ascending; None for all.

        Without `participants`, these are the ranks of megatron-core's groups, if those leave out some ranks.
        """
        given = self.participants
        if given is None:
            return _of_megatron()
        if isinstance(given, dist.ProcessGroup):
            given = dist.get_process_group_ranks(given)
        elif callable(given):
            given = given()
        participants = check_participants(given)
        return None if participants is None else tuple(sorted(participants))


def _of_megatron() -> tuple[int, ...] | None:
    """Return the ranks of megatron-core's groups; None if these are all ranks, or not known.

    A rank knows its own model-parallel and data-parallel groups. The layout is a regular grid, so every rank
    in it is this rank, shifted along both.
    """
    # Only looked up, because a program without megatron-core must not import it for this.
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not dist.is_initialized() or not state.model_parallel_is_initialized():
        return None
    try:
        model = dist.get_process_group_ranks(state.get_model_parallel_group())
        data = dist.get_process_group_ranks(state.get_data_parallel_group(with_context_parallel=True))
    except (AssertionError, KeyError, ValueError):  # this rank is in no group of Megatron's
        return None
    here = dist.get_rank()
    ranks = tuple(sorted({one + other - here for one in model for other in data}))
    whole = len(ranks) == dist.get_world_size()
    # If sums repeat, or lie outside of the world, the layout is no regular grid, and nothing is known.
    regular = len(ranks) == len(model) * len(data) and ranks[0] >= 0 and ranks[-1] < dist.get_world_size()
    return None if whole or not regular else ranks
