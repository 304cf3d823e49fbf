"""Ranks that a save can do without: they have not come, and the others hold all that they hold.

An idle rank and a late one look alike until the late one comes. A save whose ranks say who holds the same
values (`RowDigest.copies`) need not tell them apart: after `report_after` it ends with `IdleRanks` on all
ranks, and begins again among the others. A rank that comes later gets the same error, and nothing is lost by
that. The lowest participant takes part in both, and only believes what it has decided itself: an error that
somebody else writes into the message store makes the save fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast._layout.ranks import from_progressions, ranks_text
from holdfast._protocol.effects import Context, Look, Steps
from holdfast._protocol.messages import RowDigest
from holdfast._roster.presence import Seen
from holdfast.errors import IdleRanks, RankInfo

LISTED = 8
"""Ranks that the error describes; its details have all."""
_DETAIL = "idle"


def do_without(context: Context, heard: Mapping[int, RowDigest], ranks: Iterable[int]) -> Steps:
    """Committer: end the call with `IdleRanks` if none of the missing ranks has entered it, and those that
    have entered hold all their values."""
    absent = sorted(set(ranks) - heard.keys())
    if not _hold_all(heard, absent):
        return
    seen: dict[int, Seen] = yield Look(absent)
    # One that has entered comes; of one that has ended, the wait says so.
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
    """Return whether for each kind of values each absent rank is in a group of which the first rank is
    here: values that are no tensors are that rank's to write. A rank that says nothing may hold a part of
    something of which the absent ones hold the rest."""
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
