"""Find the ranks that delay a warm-up, from each rank's published position in groups and collectives."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

from holdfast._core.base.values import Message, size_text
from holdfast._core.protocol.liveness import STALLED
from holdfast._core.roster.lost import Seen, describe
from holdfast._groups.lifecycle.claims import label, listed
from holdfast.errors import DeadlineExceeded, HoldfastError, RankFailed


@dataclass(frozen=True)
class WarmUpPlace:
    """The position of a rank in a warm-up, from its presence message."""

    position: int = -1
    """The index of its current group, in its own order."""
    round: int = 0
    """The round of that group, by which ranks compare."""
    operation: int = 0
    """The index of its current collective in that group."""
    issued: bool | None = None
    """Whether it has issued its current collective; None if the backend does not tell."""
    free: int | None = None
    """Free bytes of GPU memory."""

    @classmethod
    def of(cls, record: Message) -> WarmUpPlace:
        issued, free = record.get("issued"), record.get("free")
        numbers = [record.get(name) for name in ("position", "round", "operation")]
        position, number, operation = (one if isinstance(one, int) else -1 for one in numbers)
        return cls(
            position,
            number,
            operation,
            issued if isinstance(issued, bool) else None,
            free if isinstance(free, int) else None,
        )


class Plan(NamedTuple):
    """The plan of a warm-up: description and ranks of each group by name, the order of groups on each rank,
    and the round of each group."""

    groups: dict[str, tuple[str, list[int]]]
    order: dict[int, list[str]]
    rounds: dict[str, int]


def places_of(seen: dict[int, Seen], key: str) -> dict[int, WarmUpPlace]:
    """Return the positions of ranks in the warm-up with this key; ranks outside of it are omitted."""
    return {
        rank: WarmUpPlace.of(one.vitals.operations[key])
        for rank, one in seen.items()
        if one.vitals is not None and key in one.vitals.operations
    }


def may_be_explained(error: RankFailed) -> bool:
    """Return whether the warm-up ended by a timeout; other errors already contain the cause."""
    return isinstance(error, DeadlineExceeded) or STALLED in error.details


def who_did_not_come(
    error: RankFailed,
    seen: dict[int, Seen],
    key: str,
    places: dict[int, WarmUpPlace],
    plan: Plan,
    seconds: float,
) -> HoldfastError | None:
    """Return an error that lists arrived and missing ranks of the earliest unfinished group."""
    stuck = []
    for name, (_, ranks) in plan.groups.items():
        # Below 0: the rank has not come to the group. 0: it is in it. Above 0: it is done with it.
        ahead = {
            rank: places.get(rank, WarmUpPlace()).position - plan.order[rank].index(name) for rank in ranks
        }
        absent = [rank for rank in ranks if ahead[rank] < 0]
        if len(absent) < len(ranks) and any(count <= 0 for count in ahead.values()):
            inside = [rank for rank in ranks if ahead[rank] == 0]
            stuck.append((plan.rounds[name], not absent, name, absent, inside))
    if not stuck:
        return None
    # The earliest round, because later rounds wait for it; in it first a group with an absent rank.
    _, _, name, absent, inside = min(stuck)
    description, ranks = plan.groups[name]
    arrived = [rank for rank in ranks if rank not in absent]
    # If all ranks have reached the group, the culprits are ranks that can't continue, or else ranks that have
    # not issued the collective.
    why = {rank: seen[rank].ended or seen[rank].held() for rank in ranks}
    held = [rank for rank in arrived if why[rank]]
    # With several collectives on the group, the earliest counts: a rank at a later one has issued it.
    first = min((places[rank].operation for rank in inside), default=0)
    later = [rank for rank in inside if places[rank].operation > first]
    issued = [rank for rank in inside if rank in later or places[rank].issued]
    not_issued = [rank for rank in inside if rank not in later and places[rank].issued is False]
    behind = [rank for rank in inside if rank not in later] if later else []
    culprits = absent or held or (not_issued if issued else []) or behind or arrived
    infos = tuple(describe(rank, seen[rank], time.time(), why[rank], key) for rank in culprits[:8])
    free = places.get(culprits[0], WarmUpPlace()).free
    memory = "" if free is None else f", with {size_text(free)} of GPU memory free"
    them = f"{'; '.join(map(str, infos))}{memory}"
    if absent:
        where = f"{listed(arrived)} arrived, {listed(absent)} did not: {them}"
    elif not_issued and issued:
        where = f"{listed(issued)} issued the collective, {listed(not_issued)} did not: {them}"
    else:
        where = f"all its ranks arrived, and its collective did not end: {them}"
    given_up = (
        "" if isinstance(error, DeadlineExceeded) else ", without progress on any rank (stall_timeout),"
    )
    return type(error)(
        f"The warm-up of process groups failed after {seconds:.1f} s{given_up} in "
        f"{label(name, description, ranks)}: {where}.",
        rank=culprits[0] if len(culprits) == 1 else None,
        missing=infos or error.missing,
        hint="A stack of that rank (py-spy dump --pid) shows more.",
    )
