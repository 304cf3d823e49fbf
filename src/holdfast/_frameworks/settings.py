"""The settings of `install`: deadlines, participants, and which parts are on."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from holdfast._core.protocol.call import own_timeout
from holdfast._core.protocol.job import Job


@dataclass(frozen=True)
class Settings:
    """The arguments of `install`, checked."""

    job: Job = field(default_factory=Job)
    checkpoints: bool = True
    huggingface: bool = True
    guard: bool = True
    guarded: tuple[str, ...] = ()
    """More functions to guard, by their dotted names."""
    warm_up: bool = True
    session: bool = True
    operations: tuple[str, ...] | None = None
    memory_budget: int | None = None
    after_end: float | None = None

    def of_a_guard(self) -> Job:
        """Return the job of a guarded function that begins now: groups may be made long after `install`."""
        return replace(self.job, participants=self.ranks())

    def of_a_call(self, anyone: bool = False) -> Job:
        """Return the job of a call that replaces a framework's call: its timeout is at least the process
        group's. anyone: leave the participants to the call itself."""
        timeout = self.job.timeout
        least = timeout if timeout is None else max(timeout, own_timeout(None))
        return replace(self.job, timeout=least, participants=None if anyone else self.ranks())

    def is_on(self, part: str) -> bool:
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
        return _of_megatron() if self.job.participants is None else self.job.ranks()


def _of_megatron() -> tuple[int, ...] | None:
    """Return the ranks of megatron-core's groups; None if these are all ranks, or not known.

    A rank knows its own model-parallel and data-parallel groups. The layout is a regular grid, so the ranks
    are the sums of offsets in both groups.
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
