"""The rule about ranks that wait for each other in several groups."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._watch.evidence import Evidence
from holdfast._watch.positions import has_ended, is_in_its_program, kind_of_leaving, parting, position_of_rank
from holdfast._watch.rules_counts import Waits, observed
from holdfast._watch.verdict import Verdict, listed


def cycle(evidence: Evidence) -> Iterator[Verdict]:
    """Ranks wait for each other in several groups. If one of them has passed the line at which another waits,
    it has left that collective out."""
    waits = Waits(evidence)
    circle = waits.cycle()
    if len({group for _, group, _ in circle}) < 2:
        return
    one, other = circle[0][0], next(rank for rank, group, _ in circle if group != circle[0][1])
    kind, basis = _kind_of_cycle(evidence, one, other)
    at = [{rank for rank, key in waits.at.items() if key == waits.at[end]} for end in (one, other)]
    few = min(at, key=len)
    clear = kind != "cycle" and 2 * len(few) < len(waits.at)
    what = f"{listed(few)} on another way" if clear else "a cycle"
    parts = [f"rank {rank} waits in number {number} of group {group}" for rank, group, number in circle[:6]]
    yield Verdict(
        kind,
        basis,
        f"{what}: {', '.join(parts)}; each for the next",
        tuple(sorted(few)) if clear else None,
        waiting=tuple(sorted(waits.operations)),
        group=circle[0][1],
        number=circle[0][2],
        operation=waits.operations[one].name,
        call=next(iter(waits.operations[one].calls), None),
        seen=tuple(observed(rank, waits.operations[rank]) for rank, _, _ in circle[:8]),
        others=(
            "A rank that skips a collective of one group shows the same: compare what they execute before.",
        )
        if kind == "cycle"
        else (),
    )


def _kind_of_cycle(evidence: Evidence, one: int, other: int) -> tuple[str, str]:
    """Return the class and the basis, by where two ranks of the cycle part."""
    stacks = [evidence.ranks[rank].stacks for rank in (one, other)]
    if not all(stacks):
        return "cycle", "counts"
    pair = [position_of_rank(evidence.ranks[rank]).stack for rank in (one, other)]
    if any(map(has_ended, pair)) and any(map(is_in_its_program, pair)):
        return "data", "absence"  # one has left the program early, and with it all loops
    parted = parting(*pair)
    if parted is None or parted.way is None or parted.other is None:
        return "cycle", "counts"
    if parted.relation() == "outside":
        return kind_of_leaving(parted)
    if parted.turned().relation() == "outside":
        return kind_of_leaving(parted.turned())
    if parted.way.comes_to(parted.theirs.line or 0) or parted.other.comes_to(parted.mine.line or 0):
        return "branch", "counts"
    # In two arms of one condition, where anything may follow.
    return "cycle", "absence"


RULES = (cycle,)
