"""One call on this rank: the participants, the roster, the deadline, and the stall timeout.

A public function creates it once and passes it on unchanged, so no inner code can restart the deadline.
Argument checks that public functions share are here, too.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import ref

import torch.distributed as dist

from holdfast._core.base.deadline import REAL_CLOCK, Clock, Deadline, Limits
from holdfast._core.base.options import read_place
from holdfast._core.base.values import given
from holdfast._core.process.exits import is_over
from holdfast._core.protocol.job import Job, job_of, limits_of
from holdfast._core.roster.base import Roster
from holdfast._core.roster.memory import MemoryRoster
from holdfast._core.roster.torch_store import TorchRoster
from holdfast._core.store.run_folder import STEPS
from holdfast._core.torch_private import default_store, timeout_of
from holdfast.errors import BadInput

_default: list[tuple[ref[object], Roster]] = []
"""A weak reference to the default process group's store, and the roster over it."""


class Line(NamedTuple):
    """A line of saves: each rank starts them in order, so a skipped one is never started later."""

    name: str
    pending: tuple[int | None, ...]
    """The steps whose saves are still pending on this rank when this save begins."""


@dataclass(frozen=True)
class Call:
    """The participants, roster and deadline of one call. This rank is a participant."""

    roster: Roster
    participants: tuple[int, ...]
    """Ranks of the roster's world, ascending."""
    deadline: Deadline
    limits: Limits
    line: Line | None = None
    place: str = ""
    """Names the folder of the call, if ranks have it under different paths; "": its URL does."""
    is_part: bool = False
    """Whether that folder has only what some ranks have saved: a name that it lacks may be elsewhere."""

    @property
    def rank(self) -> int:
        return self.roster.rank

    def lane(self, name: str) -> Call:
        """Return the same call on a lane of its roster."""
        return replace(self, roster=self.roster.lane(name))

    def in_line(self, name: str, pending: Iterable[int | None] = ()) -> Call:
        """Return the same call as one of a line."""
        return replace(self, line=Line(name, tuple(pending)))


def begin_call(
    job: Job | None = None,
    *,
    at_least: float = 0.0,
    while_alive: bool = False,
    past_end: bool = False,
    clock: Clock = REAL_CLOCK,
) -> Call:
    """Determine the participants and start the deadline.

    at_least: minimum timeout in seconds, whatever the job's `timeout` is. while_alive: other ranks being
        alive extends the deadline. past_end: ranks whose program has ended may still enter the call.

    Raises BadInput if the participants are not valid ranks, or if this rank is not one of them.
    """
    job = job_of(job)
    roster = find_roster(job)
    ranks = find_participants(roster, job.ranks())
    # By default, a call waits as long as a collective of that group would.
    if job.timeout is None and job.roster is None and not isinstance(roster, MemoryRoster):
        at_least = max(at_least, own_timeout(job.participants))
    # In an `atexit` handler, the other ranks make this call after announcing that their programs have ended.
    past_end = past_end or is_over()
    limits = replace(limits_of(job), at_least=at_least, while_alive=while_alive, past_end=past_end)
    return Call(roster, ranks, limits.deadline(clock), limits)


def own_timeout(group: object) -> float:
    """Return the timeout in seconds of the collectives of a group (default: of the world); 0 if unknown."""
    return timeout_of(group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD) or 0.0  # type: ignore[arg-type]


def find_roster(job: Job) -> Roster:
    """Return the job's roster, or that of torch.distributed, or a roster of one rank."""
    if job.roster is not None:
        return job.roster
    if job.no_dist:
        return MemoryRoster()
    if dist.is_available() and dist.is_initialized():
        return _roster_of_the_default_group()
    _, world_size = read_place()
    if world_size > 1:
        raise BadInput(
            f"WORLD_SIZE is {world_size}, but torch.distributed is not initialised, so "
            "ranks can't find each other.",
            hint="Call torch.distributed.init_process_group first, or give job=holdfast.Job(no_dist=True) if "
            "this process is alone.",
        )
    return MemoryRoster()


def _roster_of_the_default_group() -> Roster:
    # A weak reference, because a destroyed group must free its store, and with it the store's server.
    store = default_store()
    # One roster per store: call counters and beacons belong to a roster.
    if not _default or _default[0][0]() is not store:
        _default[:] = [(ref(store), TorchRoster())]  # first call, or the process group was created again
    return _default[0][1]


def find_participants(roster: Roster, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the participating ranks in ascending order. Raises BadInput if this rank is not one of them."""
    if given is None:
        return tuple(range(roster.world_size))
    ranks = given
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= roster.world_size:
        raise BadInput(f"participants={ranks} must be different ranks of a world of {roster.world_size}.")
    # Raised before any message is sent, so the participants are not affected.
    if roster.rank not in ranks:
        listed = ", ".join(map(str, ranks[:16])) + ("…" if len(ranks) > 16 else "")
        raise BadInput(
            f"Rank {roster.rank} called, but the participants are {listed}; nothing was done on this rank "
            f"and the others are not affected.",
            rank=roster.rank,
            hint="Call only on participants, or add this rank to the participants of the job on every rank.",
        )
    return ranks


def check_names(**names: object) -> None:
    """Raise BadInput unless each argument is a str, a collection of str, or None."""
    for argument, value in names.items():
        # A str is checked where it is used: `expected` accepts "previous", `include` accepts none.
        if value is None or isinstance(value, str):
            continue
        if not isinstance(value, Collection) or not all(isinstance(one, str) for one in value):
            raise BadInput(
                f"{argument} must be a list of names or patterns, which are texts, not {given(value)}."
            )


def whole_step(step: object) -> int:
    """Return a step as an int. Integers of NumPy and others are accepted, booleans are not."""
    if not isinstance(step, bool) and hasattr(step, "__index__"):
        with suppress(TypeError):  # a tensor of several elements
            number = operator.index(step)
            if 0 <= number < STEPS:
                return number
    raise BadInput(
        f"step must be a whole number from 0 on, below {STEPS:.0e}, not {given(step)}.",
        hint="Count steps; a time in nanoseconds is too large."
        if isinstance(step, int) and step >= STEPS
        else "The order is Checkpoints.save(step, state) and Checkpoints.restore(state, step)."
        if isinstance(step, Mapping) or hasattr(step, "state_dict")
        else "",
    )
