"""`audit`: list known causes of hangs in this process's groups and environment."""

from __future__ import annotations

from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.operation import agree
from holdfast._core.torch_private import groups_made
from holdfast._groups.audit.hazards import Hazard, hazards
from holdfast._groups.lifecycle.state import facts


def audit(*, all_ranks: bool = False, job: Job | None = None) -> list[Hazard]:
    """List the hazards of this process's groups and environment.

    Hazards are groups that were never warmed up, groups of one rank, timeouts other than the default group's,
    names that depend on a rank's history, leaked groups, and environment variables that hide a hang.

    all_ranks: also compare the number of groups that each rank has made, over the roster. All ranks must
        call.
    job: the job of that comparison; its timeout is 60 s by default.

    Each `Hazard` has `kind`, `what` and `remedy`. `holdfast doctor --pid` shows the same list for a process
    that has called `open_groups`, `warm_up` or `session`.
    """
    findings = hazards(facts())
    if all_ranks:
        findings += _compared(begin_call(job_of(job).within(60.0)))
    return findings


def _compared(call: Call) -> list[Hazard]:
    """Compare on all ranks how many groups each has made."""

    def differ(counts: dict[int, int | None]) -> list[int | None] | None:
        first = min(counts)
        other = next((rank for rank in sorted(counts) if counts[rank] != counts[first]), None)
        return None if other is None else [first, counts[first], other, counts[other]]

    # Where torch does not expose the number it is None on all ranks, so nothing is reported.
    unequal = agree("comparison of groups", "groups://audit", differ, call, groups_made())
    if unequal is None:
        return []
    first, ours, other, theirs = unequal
    return [
        Hazard(
            "unequal numbers of groups",
            f"Rank {first} has made {ours} groups, rank {other} {theirs}: torch names groups by counting, so "
            "the next group that both make has two names, and its ranks wait for each other until the "
            "timeout.",
            "Call new_group on all ranks of the world in one order, also for groups that a rank is not in.",
        )
    ]
