"""Rules whose evidence is where the code of each rank is (`positions`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from holdfast._watch.evidence import CUT_OFF, Evidence, Rank, Stack
from holdfast._watch.positions import (
    Position,
    has_ended,
    in_one_loop,
    is_in_its_program,
    kind_of_leaving,
    parting,
    position_of,
    position_of_rank,
)
from holdfast._watch.rules_counts import Waits
from holdfast._watch.verdict import Observation, Verdict, listed

_SAVE = re.compile(r"save|checkpoint|export|barrier", re.IGNORECASE)
BUSY = 0.2
"""The part of the time in which a thread uses the CPU that waits for nothing."""
POLLS = 0.05
"""The part of the time that a loop uses the CPU which only looks for something, and sleeps."""
WOKEN = 4
"""A thread that is blocked does not go on even once; one more or less is a signal."""
MOVED = 1 << 16
"""Bytes that are more than signs of life."""


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
    elif elsewhere and all(positions[rank].does == "exits" for rank in elsewhere) and not waiting:
        yield _only_exits(evidence, positions, elsewhere)
    elif waiting and not roots:
        yield from _all_wait(positions, evidence.world_size in (None, len(positions) + len(away)))


def _peers_have_ended(
    evidence: Evidence, positions: dict[int, Position], away: set[int]
) -> Iterator[Verdict]:
    left = sorted(set(positions) - away)
    if len(left) != 1 or positions[left[0]].is_at_its_gpu:
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


def _only_exits(evidence: Evidence, positions: dict[int, Position], exits: set[int]) -> Verdict:
    """All ranks that are left are at their exit, and wait for no other rank."""
    one = positions[min(exits)]
    ranks = [evidence.ranks[rank] for rank in sorted(exits)]
    still = evidence.is_complete and all(
        rank.later and rank.later[0].calls == positions[rank.rank].stack.calls for rank in ranks
    )
    return Verdict(
        "lifecycle",
        "stacks" if still else "absence",
        f"{listed(exits)}: the program has ended, and its exit has not, at {one.call}; all others are gone",
        tuple(sorted(exits)),
        call=one.call,
        seen=tuple(
            Observation(f"rank {rank.rank}: {_said(positions[rank.rank].stack)}", rank.stacks[0].source)
            for rank in ranks[:8]
        ),
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
    others: tuple[str, ...] = ()
    if not later:
        others = ("Moving is late, still is stuck: take the stacks of this rank again, 10 s later.",)
    elif later[0].calls == one.stack.calls and evidence.ranks[rank].busy is None:
        others = ("py-spy dump tells whether it uses the CPU (active), as for a GPU, or rests (idle).",)
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
        others=others,
    )


def _said(stack: Stack) -> str:
    return " < ".join(map(str, stack.calls[:4]))


def _judge(rank: Rank, one: Position, waiter: Position) -> tuple[str, str, str]:
    """Return the class, the basis, and what a rank does that is not where the others wait."""
    parted = parting(one.stack, waiter.stack)
    relation = parted.relation() if parted is not None else ""
    later = rank.later[0] if rank.later else None
    if one.does == "idles" and len(one.stack.calls) < len(waiter.stack.calls):
        return "branch", "stacks", "has left the call, and does nothing"
    if one.does == "exits":
        # If the others still are in the program, it may have left that early, and its exit is not the cause.
        still = later is not None and later.calls == one.stack.calls and has_ended(waiter.stack)
        return "lifecycle", "stacks" if still else "absence", "has come to its end, and does not exit"
    if parted is not None and relation == "outside":
        return *kind_of_leaving(parted), "has left the loop in which the others are"
    if relation == "past":
        return "branch", "stacks", "has taken a way that does not come to the collective"
    comes_to_its_end = has_ended(waiter.stack) and is_in_its_program(one.stack)
    if later is None or (parted is None and not comes_to_its_end):
        return "late", "absence", "elsewhere"
    if later.calls != one.stack.calls:
        if relation == "behind":
            # Of this round, and then it has left the collective out, or still of the round before?
            return "branch", "absence", "at work behind the collective, or in the round before it"
        if _polls(rank, one.stack, later):
            # What it looks for may come.
            return "stuck", "absence", "looks for something again and again, and does nothing else"
        if _is_tight(one.stack, later):
            return "late", "absence", "runs in one small loop, perhaps for ever"
        return "late", "stacks", "at work before the collective, and moves"
    if rank.busy is not None and rank.busy > BUSY:
        # Perhaps a long loop of one line, perhaps one that waits for ever.
        return "late", "absence", "uses the CPU on one line"
    if rank.moved > MOVED:
        return "late", "absence", "moves bytes on one line"
    if one.does == "loads":
        return "data", "stacks", "waits for its loader"
    if rank.busy is None and one.may_be_at_its_gpu:
        return "stuck", "absence", "stands still, or waits for its GPU, as in .item() or .cpu(),"
    if rank.woken > WOKEN:
        return "stuck", "absence", "waits for something again and again on one line, which may come"
    return "stuck", "stacks", "stands still"


def _polls(rank: Rank, stack: Stack, later: Stack) -> bool:
    """Return whether a rank moves in one loop only, without work: it waits as one that stands still."""
    idle = rank.busy is not None and rank.busy <= POLLS and rank.moved <= MOVED
    return idle and in_one_loop(stack, later) is not None


def _is_tight(stack: Stack, later: Stack) -> bool:
    """Return whether a rank was seen in a loop that calls nothing."""
    moves = in_one_loop(stack, later)
    return moves is not None and (moves.mine, moves.theirs) == (stack.calls[0], later.calls[0])


def _all_wait(positions: dict[int, Position], is_complete: bool) -> Iterator[Verdict]:
    """All ranks whose stacks are known are blocked: at one place, or in two parts of the program."""
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
    parted = parting(one.stack, other.stack)
    if parted is not None:
        few_wait_for_gpus = one.is_at_its_gpu and parted.relation() == "before"
        yield Verdict(
            "branch",
            # The few at their GPUs before the others may take the same way, if a GPU came through.
            "absence" if few_wait_for_gpus or not is_complete else "stacks",
            f"in {parted.mine.function}, {listed(first)} took the way to {one.call}, and {listed(second)} to "
            f"{other.call}",
            waiting=tuple(sorted(positions)),
            call=parted.mine,
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
    states = {rank.rank: rank.state for rank in evidence.ranks.values() if rank.state}
    for state in sorted(set(states.values())):
        ranks = {rank: other for rank, other in states.items() if other == state}
        one = evidence.ranks[min(ranks)]
        yield Verdict(
            "unreachable" if one.state == CUT_OFF else "stuck",
            "order",
            f"{listed(set(ranks))}: {one.state}",
            tuple(sorted(ranks)),
            call=position_of(one.stacks[0]).call if one.stacks else None,
            seen=tuple(
                Observation(f"rank {rank}: {state}", evidence.ranks[rank].last)
                for rank, state in ranks.items()
            ),
        )


def starved(evidence: Evidence) -> Iterator[Verdict]:
    """What a machine does that waits for memory is slow, wherever it is found."""
    if short := evidence.short_of_memory():
        yield Verdict(
            "late",
            "absence",
            f"{listed(set(short))}: {waited_for_memory(short)}",
            tuple(sorted(short)),
            others=("Its memory, or that of its cgroup, is full: `free`, `memory.max` and swap tell.",),
        )


def waited_for_memory(short: Mapping[int, float]) -> str:
    return f"waited for memory up to {max(short.values()):.0%} of the time between the two looks"


RULES = (held, by_stacks, starved)
