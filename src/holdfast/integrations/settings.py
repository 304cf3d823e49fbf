"""What `install` was asked for: deadlines, who takes part, and which parts are on."""

from __future__ import annotations

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
        """Is a part of `Replacement` switched on?"""
        return {
            "checkpoints": self.checkpoints,
            "guard": self.guard,
            "groups": self.warm_up or self.session,
        }[part]

    def ranks(self) -> tuple[int, ...] | None:
        """The ranks that take part, ascending; None for all."""
        given = self.participants
        if given is None:
            return None
        if isinstance(given, dist.ProcessGroup):
            given = dist.get_process_group_ranks(given)
        elif callable(given):
            given = given()
        found = check_participants(given)
        return None if found is None else tuple(sorted(found))
