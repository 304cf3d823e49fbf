"""`Job`: the settings shared by all calls of a program, made once and passed to every call."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from holdfast._core.base.deadline import Limits
from holdfast._core.base.options import Options
from holdfast._core.base.values import check_switches, given
from holdfast._core.layout.grid import Grid
from holdfast._core.roster.base import Roster
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Participants: TypeAlias = "Iterable[int] | ProcessGroup | Callable[[], Iterable[int] | None] | None"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Participants, timeouts and resource limits for the calls of a program.

        job = holdfast.Job(timeout=600, participants=range(8))
        holdfast.save(state, "run/step-100", job=job)

    Raises BadInput for invalid values.
    """

    participants: Participants = None
    """Ranks of the default process group; a torch.distributed group; or a function that returns ranks,
    evaluated at each call. Default: all ranks. Other ranks must not call."""
    no_dist: bool = False
    """This process is alone, whether or not torch.distributed is initialised."""
    timeout: float | None = None
    """Seconds from the start of a call until it fails, even if it makes progress. None: a call fails after
    1800 s without progress, or after the timeout of the process group, if longer."""
    stall_timeout: float | None = None
    """Seconds without progress after which a rank counts as failed although its process is alive. None:
    never."""
    report_after: float = 30.0
    """Seconds after which a wait is logged: for which ranks, for how long, and their stacks."""
    lost_after: float = 120.0
    """Seconds after which an unresponsive host counts as lost."""
    grid: Grid | None = None
    """The layout, stored in the index of each checkpoint."""
    options: Options = field(default_factory=Options)
    """Settings for writing and reading, and memory limits."""
    roster: Roster | None = None
    """A message store to use in place of torch.distributed's."""

    def __post_init__(self) -> None:
        check_switches(no_dist=self.no_dist)
        limits_of(self)  # raises BadInput for invalid timeouts
        given = self.participants
        if given is not None and not callable(given) and not _is_group(given):
            object.__setattr__(self, "participants", _numbers(given))  # an iterator can be read only once
        if self.grid is not None and not isinstance(self.grid, Grid):
            raise BadInput(f"grid must be a holdfast.Grid, not {self.grid!r}.")
        if not isinstance(self.options, Options):
            raise BadInput(f"options must be a holdfast.Options, not {self.options!r}.")
        # Duck typing: a user's own class can be a roster (`testing.RosterContract`).
        if self.roster is not None and not hasattr(self.roster, "world_size"):
            raise BadInput(
                f"roster={self.roster!r} is no roster.", hint="Leave it out: torch.distributed has one."
            )

    def ranks(self) -> tuple[int, ...] | None:
        """Return the current participants in ascending order; None for all ranks."""
        given = self.participants() if callable(self.participants) else self.participants
        if given is None:
            return None
        # Sorted, because the call's signature contains the ranks: it must be the same on all of them.
        return tuple(sorted(_ranks_of(given) if _is_group(given) else _numbers(given)))

    def within(self, seconds: float) -> Job:
        """Return a copy of the job with `timeout=seconds`, unless it already has a timeout."""
        return self if self.timeout is not None else replace(self, timeout=seconds)


def limits_of(job: Job) -> Limits:
    """Return the timeouts of a job as `Limits`."""
    return Limits(job.timeout, job.stall_timeout, job.report_after, job.lost_after)


defaults = [Job()]
"""A stack of default jobs; the last one applies to calls without `job`. `install` pushes its own."""


def job_of(job: Job | None) -> Job:
    """Return the `job` argument of a call, or the default job. Raises BadInput if it is not a Job."""
    if job is None:
        return defaults[-1]
    if not isinstance(job, Job):
        raise BadInput(f"job must be a holdfast.Job, not {given(job)}.")
    return job


def stock(job: Job | None, process_group: ProcessGroup | None, no_dist: bool = False) -> Job:
    """Return the job of a call that also has torch DCP's arguments `process_group` and `no_dist`."""
    made = job_of(job)
    if process_group is not None:
        if made.participants is not None:
            raise BadInput("Give process_group=, or a job with participants, not both.")
        made = replace(made, participants=process_group)
    return replace(made, no_dist=True) if no_dist else made


def _is_group(value: object) -> bool:
    distributed = sys.modules.get("torch.distributed")
    return isinstance(value, getattr(distributed, "ProcessGroup", ()))


def _numbers(participants: object) -> tuple[int, ...]:
    with suppress(TypeError):
        ranks: tuple[object, ...] = tuple(participants)  # type: ignore[arg-type]
        # The items of bytes are integers, so bytes would pass as ranks.
        if not isinstance(participants, str | bytes):
            return tuple(map(operator.index, ranks))  # type: ignore[arg-type]
    raise BadInput(
        f"participants={given(participants)} must be ranks, which are whole numbers, or a process group that "
        "this rank is in."
    )


def _ranks_of(group: object) -> list[int]:
    from torch.distributed import get_process_group_ranks

    try:
        return get_process_group_ranks(group)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        raise BadInput(
            f"{group!r} is no process group that this rank is in.",
            hint="Give what torch.distributed.new_group returned, or ranks.",
        ) from None
