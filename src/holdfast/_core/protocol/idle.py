"""Saving without idle ranks: absent ranks whose data is held by other ranks as well.

An idle rank can't be told from a late one. If the ranks of a save know which of them hold the same values
(`RowDigest.copies`), it makes no difference: after `report_after` the save ends with `IdleRanks` on all ranks
and restarts among the others. A rank that arrives later gets the same error, and no data is lost. The lowest
participant takes part in both attempts and only trusts its own decision: an `IdleRanks` error that another
party writes into the message store makes the save fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast._core.layout.ranks import from_progressions, ranks_text
from holdfast._core.protocol.effects import Context, Look, Steps
from holdfast._core.protocol.messages import RowDigest
from holdfast._core.roster.lost import Seen
from holdfast.errors import IdleRanks, RankInfo

LISTED = 8
"""Number of ranks that the error describes; its details list all."""
_DETAIL = "idle"


def do_without(context: Context, heard: Mapping[int, RowDigest], ranks: Iterable[int]) -> Steps:
    """Committer: end the call with `IdleRanks` if none of the missing ranks has entered it, and those that
    have entered hold all their values."""
    absent = sorted(set(ranks) - heard.keys())
    if not _hold_all(heard, absent):
        return
    seen: dict[int, Seen] = yield Look(absent)
    # A rank that has entered will arrive; for a rank that has ended, the wait itself raises an error.
    if any(one.is_in(context.key) or one.ended for one in seen.values()):
        return
    context.idle = tuple(absent)
    waited, who = context.deadline.elapsed(), "rank" if len(absent) == 1 else "ranks"
    raise IdleRanks(
        f"{context.title}: after {waited:.0f} s {who} {ranks_text(absent)} had not entered it. Other ranks "
        "hold the same values, so the save is made without them.",
        step=context.step,
        rank=absent[0],
        missing=tuple(RankInfo(rank, note="it has not entered the save") for rank in absent[:LISTED]),
        details={_DETAIL: absent},
    )


def idle_of(error: IdleRanks, participants: Sequence[int]) -> tuple[int, ...]:
    """Return the participants that the save is made without; never the lowest, which decides."""
    named = error.details.get(_DETAIL)
    return tuple(rank for rank in participants[1:] if isinstance(named, list) and rank in named)


def _hold_all(heard: Mapping[int, RowDigest], absent: Sequence[int]) -> bool:
    """Return whether, for each kind of values, each absent rank is in a replica group whose first rank is
    present (it writes the values that are not tensors). False if a rank sends no groups: it may hold one part
    of a value of which absent ranks hold the rest."""
    kinds = min((len(report.copies) for report in heard.values()), default=0)
    for kind in range(kinds):
        groups = {tuple(report.copies[kind]) for report in heard.values()}
        held: set[int] = set()
        for group in groups:
            if group and group[0][0] in heard:
                held.update(from_progressions(group))
        if not held.issuperset(absent):
            return False
    return kinds > 0
