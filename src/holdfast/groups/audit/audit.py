"""`audit`: this process's groups and environment, and what in them is known to end in a hang."""

from __future__ import annotations

from holdfast.groups.audit.hazards import Hazard, hazards
from holdfast.groups.lifecycle.state import facts
from holdfast.protocol.call import Call, begin_call
from holdfast.protocol.operation import agree
from holdfast.roster.base import Roster
from holdfast.torch_private import groups_made


def audit(
    *,
    all_ranks: bool = False,
    timeout: float = 60.0,
    stall_timeout: float = 60.0,
    roster: Roster | None = None,
) -> list[Hazard]:
    """Hazards of this process's groups and environment: groups never warmed up, groups of one rank, other
    timeouts than the default group's, names that depend on a rank's history, leaked groups, and switches that
    hide a hang.

    all_ranks: call it on all ranks; they compare, over the roster, how many groups each has made.

    Each `Hazard` has `kind`, `what` and `remedy`. `holdfast doctor --pid` shows the same of a process that
    has called `open_groups`, `warm_up` or `session`.
    """
    found = hazards(facts())
    if all_ranks:
        found += _compared(begin_call(roster, timeout=timeout, stall_timeout=stall_timeout))
    return found


def _compared(call: Call) -> list[Hazard]:
    def differ(said: dict[int, int | None]) -> list[int | None] | None:
        first = min(said)
        other = next((rank for rank in sorted(said) if said[rank] != said[first]), None)
        return None if other is None else [first, said[first], other, said[other]]

    # Where torch does not tell the number it is None on all ranks, so nothing is reported.
    unequal = agree("comparison of groups", "groups://audit", differ, call, groups_made())
    if unequal is None:
        return []
    first, ours, other, theirs = unequal
    return [
        Hazard(
            "unequal numbers of groups",
            f"Rank {first} has made {ours} groups, rank {other} {theirs}: torch names groups by counting, so "
            f"the next group that both make "
            "has two names, and its ranks wait for each other until the timeout.",
            "Call new_group on all ranks of the world in one order, also for groups that a rank is not in.",
        )
    ]
