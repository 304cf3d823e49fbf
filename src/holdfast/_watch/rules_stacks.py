"""Rules whose evidence is where the code of each rank is.

A stack of the host says where kernels are launched, not where the GPU is. So it decides only where the host
itself is blocked, or is in no collective at all. The odd one out is a suspect: the lines of the function in
which their ways part tell whether it is before the collective. A rank behind it may be in the round before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from holdfast._watch.evidence import Call, Evidence, Rank, Stack
from holdfast._watch.rules_counts import Waits
from holdfast._watch.verdict import Observation, Verdict, listed

_TORCH = re.compile(r"torch/(?:distributed|cuda|_tensor|csrc|_C)|^lib(?:cuda|cudart|nccl|torch)")
_BLOCKED = re.compile(
    r"^(?:synchronize|item|tolist|cpu|wait|barrier|monitored_barrier|_store_based_barrier|\w*_object(?:_list)?|"
    r"(?:cu|cuda)\w*Synchronize)$"
)
_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_to_all|barrier|scatter|gather|^reduce$|^send|^recv|"
    r"_sync_decision_cross_ranks"
)
_OPENING = re.compile(
    r"^(?:init_process_group|new_group|_new_process_group_helper|_store_based_barrier|split_group)$"
)
_LOADER = re.compile(r"^(?:_next_data|_get_data|_try_get_data|_next_index)$|^_get_batch")
_IDLE = re.compile(r"^(?:main_loop|<module>|_bootstrap\w*|run)$")
_OURS = re.compile(
    r"/torch/|^torch/|/ray/|^ray/|threading\.py|queue\.py|concurrent/|^lib\w*\.so|\.so(?:\.|$)"
)
_SAVE = re.compile(r"save|checkpoint|export|barrier", re.IGNORECASE)


BUSY = 0.2
"""The part of the time in which a thread uses the CPU that waits for nothing."""
MOVED = 1 << 16
"""Bytes that are more than signs of life."""


class Position(NamedTuple):
    """What a rank does, by its main thread."""

    stack: Stack
    does: str
    """`waits`, `opens`, `loads`, `idles` or `works`."""

    @property
    def call(self) -> Call:
        """The innermost call of the program's own code."""
        calls = self.stack.calls
        return next((call for call in calls if not _OURS.search(call.file)), calls[0])


def position_of(stack: Stack) -> Position:
    """Return what a thread does."""
    inner = [call for call in stack.calls[:8] if _TORCH.search(call.file)]
    if any(_OPENING.match(call.function) for call in stack.calls[:6] if "distributed" in call.file):
        return Position(stack, "opens")
    if any(_LOADER.match(call.function) for call in stack.calls):
        return Position(stack, "loads")
    in_collective = any(
        "distributed" in call.file and _COLLECTIVE.search(call.function) for call in inner[:3]
    )
    # A function of torch that calls back into Python, such as a plan of a save, is work, and no wait.
    innermost = stack.calls[0]
    blocked = bool(_TORCH.search(innermost.file)) and (
        _BLOCKED.match(innermost.function) is not None
        or ("distributed" in innermost.file and _COLLECTIVE.search(innermost.function) is not None)
    )
    helper = len(stack.calls) > 1 and innermost.function == "wrapper" and in_collective
    if blocked or helper:
        return Position(stack, "waits")
    return Position(stack, "idles" if _IDLE.match(innermost.function) else "works")


def position_of_rank(rank: Rank) -> Position:
    """Return what a rank does: its main thread or, if that does nothing, a thread that works for it."""
    positions = [position_of(stack) for stack in rank.stacks]
    busy = [one for one in positions if one.does in ("waits", "opens")]
    return busy[0] if positions[0].does == "idles" and busy else positions[0]


def parting(one: Stack, other: Stack) -> tuple[Call, Call] | None:
    """Return the calls at which two stacks part: the same function, at different lines, or None."""
    for mine, theirs in zip(reversed(one.calls), reversed(other.calls), strict=False):
        if mine != theirs:
            same = (mine.function, mine.file) == (theirs.function, theirs.file)
            return (mine, theirs) if same and mine.line and theirs.line else None
    return None


def by_stacks(evidence: Evidence) -> Iterator[Verdict]:
    """Some ranks wait, and others are elsewhere."""
    positions = {rank.rank: position_of_rank(rank) for rank in evidence.ranks.values() if rank.stacks}
    roots = Waits(evidence).roots()
    away = {rank.rank for rank in evidence.ranks.values() if rank.is_away}
    # Who waits for somebody else is no root of the hang.
    elsewhere = {
        rank for rank, one in positions.items() if one.does not in ("waits", "opens") and rank not in away
    }
    if roots & set(positions):
        elsewhere &= roots
    waiting = {rank for rank, one in positions.items() if one.does in ("waits", "opens")} - away - elsewhere
    if away and positions and not elsewhere:
        yield from _peers_have_ended(evidence, positions, away)
    elif waiting and elsewhere:
        yield from _elsewhere(evidence, positions, waiting, elsewhere)
    elif waiting and not roots:
        yield from _all_wait(positions)


def _peers_have_ended(
    evidence: Evidence, positions: dict[int, Position], away: set[int]
) -> Iterator[Verdict]:
    left = sorted(set(positions) - away)
    if len(left) != 1:
        return
    call = positions[left[0]].call
    in_a_step = not any(_SAVE.search(call.function) for call in positions[left[0]].stack.calls)
    yield Verdict(
        "branch",
        "absence" if in_a_step else "stacks",
        f"rank {left[0]} is in a collective at {call}, and {listed(away)} ended before it, with success",
        tuple(left),
        call=call,
        seen=(
            Observation(f"rank {left[0]}: {call}", positions[left[0]].stack.source),
            *(
                Observation(f"rank {rank} ended", evidence.ranks[rank].endings[0].source)
                for rank in sorted(away)[:8]
            ),
        ),
        others=("Rank-dependent code, or more batches on this rank: the numbers of batches tell.",)
        if in_a_step
        else (),
    )


def _elsewhere(
    evidence: Evidence, positions: dict[int, Position], waiting: set[int], elsewhere: set[int]
) -> Iterator[Verdict]:
    waiter = positions[min(waiting)]
    judged = {rank: _judge(evidence.ranks[rank], positions[rank], waiter) for rank in sorted(elsewhere)}
    rank = min(elsewhere)
    one, (kind, basis, what) = positions[rank], judged[rank]
    if len({kind for kind, _, _ in judged.values()}) > 1:
        basis = "absence"  # more than one thing at once
    later = evidence.ranks[rank].later[:1]
    yield Verdict(
        kind,
        basis,
        f"{listed(elsewhere)}: {what} at {one.call}, while {listed(waiting)} "
        f"{'waits' if len(waiting) == 1 else 'wait'} at {waiter.call}",
        tuple(sorted(elsewhere)),
        waiting=tuple(sorted(waiting)),
        call=one.call,
        seen=(
            Observation(f"rank {rank}: {_said(one.stack)}", one.stack.source),
            *(Observation(f"rank {rank}, later: {_said(stack)}", stack.source) for stack in later),
            Observation(f"rank {min(waiting)}: {_said(waiter.stack)}", waiter.stack.source),
        ),
        others=()
        if later
        else ("Moving is late, still is stuck: take the stacks of this rank again, 10 s later.",),
    )


def _said(stack: Stack) -> str:
    return " < ".join(map(str, stack.calls[:4]))


def _judge(rank: Rank, one: Position, waiter: Position) -> tuple[str, str, str]:
    """Return the class, the basis, and what a rank does that is not where the others wait."""
    ways = parting(one.stack, waiter.stack)
    if one.does == "idles" and len(one.stack.calls) < len(waiter.stack.calls):
        return "branch", "stacks", "has left the call, and does nothing"
    if not rank.later or ways is None:
        return "late", "absence", "elsewhere"
    if rank.later[0].calls != one.stack.calls:
        if (ways[0].line or 0) > (ways[1].line or 0):
            # Of this round, and then it has left the collective out, or still of the round before?
            return "branch", "absence", "at work behind the collective, or in the round before it"
        return "late", "stacks", "at work before the collective, and moves"
    if rank.busy is not None and rank.busy > BUSY:
        # Perhaps a long loop of one line, perhaps one that waits for ever.
        return "late", "absence", "uses the CPU on one line"
    if rank.moved > MOVED:
        return "late", "absence", "moves bytes on one line"
    if one.does == "loads":
        return "data", "stacks", "waits for its loader"
    return "stuck", "stacks", "stands still"


def _all_wait(positions: dict[int, Position]) -> Iterator[Verdict]:
    """All ranks are blocked: at one place, or in two parts of the program."""
    sets: dict[tuple[tuple[str, str, int | None], ...], list[int]] = defaultdict(list)
    for rank, one in positions.items():
        sets[tuple(tuple(call) for call in reversed(one.stack.calls))].append(rank)  # type: ignore[misc]
    opens = [rank for rank, one in positions.items() if one.does == "opens"]
    names = {one.stack.names.get("group_name") for one in positions.values()} - {None}
    if len(opens) == len(positions) > 1 and (len(sets) == 1 or len(names) > 1):
        several = len(names) > 1
        one = positions[opens[0]]
        yield Verdict(
            "cycle" if several else "lifecycle",
            "stacks",
            f"ranks open different groups at once: {', '.join(sorted(map(str, names)))}"
            if several
            else f"all {len(opens)} ranks are opening a group at {one.call}",
            # Of the default group nobody is missing; of others, some may make one that the rest does not.
            ()
            if not several and "init_process_group" in {call.function for call in one.stack.calls}
            else None,
            waiting=tuple(sorted(opens)),
            call=one.call,
            seen=tuple(
                Observation(f"rank {rank}: {positions[rank].call}", positions[rank].stack.source)
                for rank in opens[:8]
            ),
        )
        return
    if len(sets) != 2 or opens:
        return
    first, second = sorted(sets.values(), key=len)
    one, other = positions[first[0]], positions[second[0]]
    ways = parting(one.stack, other.stack)
    if ways is not None:
        yield Verdict(
            "branch",
            "stacks",
            f"in {ways[0].function}, {listed(first)} took the way to {one.call}, and {listed(second)} to "
            f"{other.call}",
            waiting=tuple(sorted(positions)),
            call=ways[0],
            seen=tuple(
                Observation(f"rank {rank}: {positions[rank].call}", positions[rank].stack.source)
                for rank in (first[0], second[0])
            ),
            others=(
                "Two groups in other order, or a connection that broke, show the same: flight records tell.",
            ),
        )


def held(evidence: Evidence) -> Iterator[Verdict]:
    """The kernel shows that a rank can't go on."""
    ranks = {rank.rank: rank.state for rank in evidence.ranks.values() if rank.state}
    if ranks:
        one = evidence.ranks[min(ranks)]
        yield Verdict(
            "stuck",
            "order",
            f"{listed(set(ranks))}: {one.state}",
            tuple(sorted(ranks)),
            call=position_of(one.stacks[0]).call if one.stacks else None,
            seen=tuple(
                Observation(f"rank {rank}: {state}", evidence.ranks[rank].last)
                for rank, state in ranks.items()
            ),
        )


RULES = (held, by_stacks)
