"""`Job`: what all calls of a program have in common. It is made once, and handed to every call."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from holdfast._deadline import Limits
from holdfast._layout.grid import Grid
from holdfast._options import Options
from holdfast._roster.base import Roster
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Participants: TypeAlias = "Iterable[int] | ProcessGroup | Callable[[], Iterable[int] | None] | None"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Who takes part in the calls of a program, how long they wait, and what they may use.

        job = holdfast.Job(timeout=600, participants=range(8))
        holdfast.save(state, "run/step-100", job=job)

    Raises BadInput for a value that is none of these.
    """

    participants: Participants = None
    """Ranks of the default process group; a group of torch.distributed; or a function that returns ranks and
    is called at each call. Default all. Other ranks must not call."""
    no_dist: bool = False
    """This process is alone, whether or not torch.distributed is initialised."""
    timeout: float | None = None
    """Seconds from the begin of a call until it fails, even if it makes progress. By default a call fails
    after 1800 s without progress, or after the timeout of the process group, if that is longer."""
    stall_timeout: float | None = None
    """Seconds without progress after which a rank is given up although its process is there; by default it
    never is."""
    report_after: float = 30.0
    """Seconds after which a wait is told: for whom, since when, and where that rank is."""
    lost_after: float = 120.0
    """Seconds after which a host that does not answer counts as gone."""
    grid: Grid | None = None
    """The layout, stored in the index of each checkpoint."""
    options: Options = field(default_factory=Options)
    """How to write and read, and how much memory that may take."""
    roster: Roster | None = None
    """A coordination store to use in place of torch.distributed's."""

    def __post_init__(self) -> None:
        limits_of(self)  # refuses seconds that are none
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
        """Return the participants as they are now, ascending; None for all."""
        given = self.participants() if callable(self.participants) else self.participants
        if given is None:
            return None
        # Sorted, because the call's signature contains the ranks: it must be the same on all of them.
        return tuple(sorted(_ranks_of(given) if _is_group(given) else _numbers(given)))

    def within(self, seconds: float) -> Job:
        """Return the same job; its `timeout` is `seconds` if it has none."""
        return self if self.timeout is not None else replace(self, timeout=seconds)


def limits_of(job: Job) -> Limits:
    """Return the limits of the waits of a job's calls."""
    return Limits(job.timeout, job.stall_timeout, job.report_after, job.lost_after)


defaults = [Job()]
"""The last of these is that of calls to which none is given. `install` adds one."""


def job_of(job: Job | None) -> Job:
    """Return the job of a call. Raises BadInput if it is none."""
    if job is None:
        return defaults[-1]
    if not isinstance(job, Job):
        raise BadInput(f"job must be a holdfast.Job, not {job!r}.")
    return job


def stock(job: Job | None, process_group: ProcessGroup | None, no_dist: bool = False) -> Job:
    """Return the job of a call that has these two arguments of torch DCP, too."""
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
        f"participants={participants!r} must be ranks, which are whole numbers, or a process group that this "
        "rank is in."
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
