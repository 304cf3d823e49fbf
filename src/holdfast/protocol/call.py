"""One call on this rank: the participants, the roster, the deadline, and the stall timeout.

A public function makes it once and hands it on whole, so nothing in between can renew the deadline. The
checks of arguments that public functions share are here, too.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import ref

from holdfast.deadline import REAL_CLOCK, Clock, Deadline, check_seconds
from holdfast.errors import BadInput
from holdfast.layout.grid import Grid
from holdfast.options import Options, read_environment
from holdfast.roster.base import Roster
from holdfast.roster.memory import MemoryRoster
from holdfast.store.run_folder import STEPS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_default: list[tuple[ref[object], Roster]] = []
"""A weak reference to the default process group's store, and the roster over it."""


@dataclass(frozen=True)
class Call:
    """The participants, roster and deadline of one call. This rank is a participant."""

    roster: Roster
    participants: tuple[int, ...]
    """Ranks of the roster's world, ascending."""
    deadline: Deadline
    stall_timeout: float
    """Seconds without progress after which a rank is given up."""

    @property
    def rank(self) -> int:
        return self.roster.rank

    def lane(self, name: str) -> Call:
        """Return the same call on a lane of its roster."""
        return replace(self, roster=self.roster.lane(name))


def begin_call(
    roster: Roster | None = None,
    *,
    no_dist: bool = False,
    participants: Iterable[int] | None = None,
    process_group: ProcessGroup | None = None,
    timeout: float,
    stall_timeout: float,
    clock: Clock = REAL_CLOCK,
) -> Call:
    """Determine the participants and start the deadline: `timeout` seconds from now.

    Raises BadInput if the participants are not valid ranks, or if this rank is not one of them.
    """
    check_seconds("timeout", timeout)
    check_seconds("stall_timeout", stall_timeout)
    roster = find_roster(roster, no_dist)
    ranks = find_participants(roster, participants, process_group)
    return Call(roster, ranks, Deadline(timeout, clock), stall_timeout)


def find_roster(roster: Roster | None, no_dist: bool) -> Roster:
    """Return the given roster, or that of torch.distributed, or a roster of one rank."""
    if roster is not None:
        # Duck typing: a user's own class can be a roster (`testing.RosterContract`).
        if not hasattr(roster, "world_size"):
            raise BadInput(
                f"roster={roster!r} is no roster.", hint="Leave it out: torch.distributed has one."
            )
        return roster
    if no_dist:
        return MemoryRoster()
    import torch.distributed as dist  # here: the command line needs no ranks, and must not import torch

    if dist.is_available() and dist.is_initialized():
        return _roster_of_the_default_group()
    if read_environment().world_size > 1:
        raise BadInput(
            f"WORLD_SIZE is {read_environment().world_size}, but torch.distributed is not initialised, so "
            "ranks can't find each other.",
            hint="Call torch.distributed.init_process_group first, or pass no_dist=True if this process "
            "saves alone.",
        )
    return MemoryRoster()


def _roster_of_the_default_group() -> Roster:
    from holdfast.roster.torch_store import TorchRoster
    from holdfast.torch_private import default_store

    # A weak reference, because a destroyed group must free its store, and with it the store's server.
    store = default_store()
    # One roster per store: call counters and beacons belong to a roster.
    if not _default or _default[0][0]() is not store:
        _default[:] = [(ref(store), TorchRoster())]  # first call, or the process group was created again
    return _default[0][1]


def check_participants(participants: Iterable[int] | None) -> tuple[int, ...] | None:
    """Return the ranks as a tuple. Raises BadInput if they are not a list of integers."""
    if participants is None:
        return None
    with suppress(TypeError):
        ranks = tuple(participants)
        # The items of bytes are integers, so bytes would pass as ranks.
        if not isinstance(participants, str | bytes):
            return tuple(map(operator.index, ranks))
    raise BadInput(f"participants={participants!r} must be a list of ranks, which are whole numbers.")


def find_participants(
    roster: Roster, participants: Iterable[int] | None, process_group: ProcessGroup | None
) -> tuple[int, ...]:
    """Return the participating ranks in ascending order. Raises BadInput if this rank is not one of them."""
    if participants is not None and process_group is not None:
        raise BadInput("Give participants= or process_group=, not both.")
    if process_group is not None:
        participants = _ranks_of(process_group)
    given = check_participants(participants)
    if given is None:
        return tuple(range(roster.world_size))
    # Sorted, because the call's signature contains the ranks: it must be the same on all of them.
    ranks = tuple(sorted(given))
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= roster.world_size:
        raise BadInput(f"participants={ranks} must be different ranks of a world of {roster.world_size}.")
    # Raised before any message is sent, so the participants are not affected.
    if roster.rank not in ranks:
        listed = ", ".join(map(str, ranks[:16])) + ("…" if len(ranks) > 16 else "")
        raise BadInput(
            f"Rank {roster.rank} called, but the participants are {listed}; nothing was done on this rank "
            f"and the others are not affected.",
            rank=roster.rank,
            hint="Call only on participants, or add this rank to participants= on every rank.",
        )
    return ranks


def _ranks_of(process_group: ProcessGroup) -> list[int]:
    from torch.distributed import get_process_group_ranks

    try:
        return get_process_group_ranks(process_group)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise BadInput(
            f"process_group={process_group!r} is no process group that this rank is in.",
            hint="Give what torch.distributed.new_group returned, or participants=.",
        ) from None


def check_arguments(
    *, options: object = None, grid: object = None, host_memory_budget: object = None, **names: object
) -> None:
    """Raise BadInput if an argument has the wrong type.

    names: by argument, a str, a collection of str, or None.
    """
    if options is not None and not isinstance(options, Options):
        raise BadInput(f"options must be a holdfast.Options, not {options!r}.")
    if grid is not None and not isinstance(grid, Grid):
        raise BadInput(f"grid must be a holdfast.Grid, not {grid!r}.")
    budget = host_memory_budget
    # bool is a subclass of int, but True is not a number of bytes.
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 1):
        raise BadInput(f"host_memory_budget must be bytes from 1 on, or None, not {budget!r}.")
    for argument, given in names.items():
        # A str is checked where it is used: `expected` accepts "previous", `include` accepts none.
        if given is None or isinstance(given, str):
            continue
        if not isinstance(given, Collection) or not all(isinstance(one, str) for one in given):
            raise BadInput(f"{argument} must be a list of names or patterns, which are texts, not {given!r}.")


def whole_step(step: object) -> int:
    """Return a step as an int. Integers of NumPy and others are accepted, booleans are not."""
    if not isinstance(step, bool) and hasattr(step, "__index__"):
        with suppress(TypeError):  # a tensor of several elements
            number = operator.index(step)
            if 0 <= number < STEPS:
                return number
    raise BadInput(
        f"step must be a whole number from 0 on, below {STEPS:.0e}, not {step!r}.",
        hint="Count steps; a time in nanoseconds is too large." if hasattr(step, "__index__") else "",
    )


def one_folder(
    path: str | os.PathLike[str] | None, checkpoint_id: str | os.PathLike[str] | None
) -> str | os.PathLike[str]:
    """Return the folder that the call names. Raises BadInput if it names none, or two."""
    given = path if path is not None else checkpoint_id
    if given is None or (path is not None and checkpoint_id is not None):
        raise BadInput("Give the folder once: as path, or as checkpoint_id=.")
    return given
