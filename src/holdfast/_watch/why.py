"""Causes of waits that the evidence proves. The code position of a rank alone proves no cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from holdfast._watch.evidence import CUT_OFF, GLOO_TIMEOUT, UNKNOWN, Ending, Evidence, GroupOperation, Rank
from holdfast._watch.names import SAME_SIZES, WAITS_FOR_ALL, plain
from holdfast._watch.positions import (
    has_ended,
    is_held,
    is_in_its_program,
    may_be_at_its_gpu,
    may_wait_in,
    position_among,
    position_of,
    positions_of,
)
from holdfast._watch.verdict import Observation, Why, listed
from holdfast._watch.waits import Table, Waits

Kind = tuple[str, tuple[int, ...], str, str]
"""Properties that must be equal on all ranks: the operation, its sizes, its types, and its source."""


def causes(evidence: Evidence, waits: Waits, absent: frozenset[int]) -> Iterator[Why]:
    """Yield all proven causes, the one that explains most first.

    Args:
        absent: the ranks, as far as known, that others wait for and that are not waiting themselves.
    """
    # What has happened to a rank for which no rank of a cycle waits does not explain the cycle.
    awaited = absent or frozenset(rank for wait in waits.cycle() for rank in wait.absent)
    yield from _by_holdfast(evidence)
    yield from _died(evidence, _known_to_be_awaited(evidence, waits, awaited))
    yield from _held(evidence, awaited)
    yield from _fingerprints(evidence)
    yield from _sizes(evidence)
    yield from _mismatch(evidence, waits.table)
    yield from _desynchronized(evidence, waits.table)
    if not absent:
        yield from _cycle(waits)
    yield from _ended(evidence, absent)
    if awaited and all(_may_wait_for_any(evidence, rank) for rank in awaited):
        yield from _died(evidence, frozenset())


def _by_holdfast(evidence: Evidence) -> Iterator[Why]:
    """Rule: a roll call in a log has proven it."""
    own = evidence.latest_own()
    if own is not None and own.cause is not None and evidence.has_only_logs():
        failed = {rank for rank, one in evidence.endings() if one.is_fatal and not one.is_clean}
        if own.is_wait and own.cause[0] == "ended" and not failed.isdisjoint(own.absent):
            return  # its error is known
        yield Why(*own.cause, seen=tuple(Observation(text, source) for text, source in own.lines[:8]))


def _died(evidence: Evidence, absent: frozenset[int]) -> Iterator[Why]:
    """Rule: a rank raised an error or was killed before the first timeout, and had no timeout itself.

    A traceback in a log proves no death if nobody knows whether the error was caught: a program may print one
    and go on, or end a thread by it.
    """
    first_timeout = evidence.first_timeouts()
    found: list[tuple[int, Ending]] = []
    for rank, ending in evidence.endings():
        seen, (file, line) = evidence.ranks[rank], ending.source
        lived = seen.timeouts or any(one.is_fatal and GLOO_TIMEOUT.search(one.what) for one in seen.endings)
        known = ending.is_cause and not ending.is_clean and ending.is_fatal
        if known and line <= first_timeout.get(file, line) and not lived:
            found.append((rank, ending))
    # Other ranks may be waiting for a live rank instead of this one.
    if not found or (absent and not any(rank in absent for rank, _ in found)):
        return
    # The first error counts; different errors on other ranks usually follow from it.
    found.sort(key=lambda one: one[1].source.line)
    first = found[0][1]
    kind = first.what.partition(":")[0]
    same = {rank: one for rank, one in reversed(found) if one.what.partition(":")[0] == kind}
    seen_of = (Observation(f"rank {rank}: {one.what}", one.source) for rank, one in sorted(same.items()))
    yield Why("died", f"{listed(same)} ended: {first.what}", tuple(sorted(same)), first.call, tuple(seen_of))


def _known_to_be_awaited(evidence: Evidence, waits: Waits, absent: frozenset[int]) -> frozenset[int]:
    """Return the absent ranks, without those that have ended if nothing shows for which of them the others
    wait, and one that lives is elsewhere."""
    ended = {rank for rank, _ in evidence.endings()}
    elsewhere = [rank for rank in absent & evidence.shown().keys() if rank not in ended]
    is_unclear = elsewhere and not waits.of and not all(_may_wait_for_any(evidence, one) for one in elsewhere)
    return absent - ended if is_unclear else absent


def _may_wait_for_any(evidence: Evidence, rank: int) -> bool:
    """Return whether a rank is known to wait for others in a way that does not show for which: at the message
    store, in an operation that no record has, or at its GPU."""
    seen = evidence.ranks.get(rank)
    if seen is None or not seen.stacks:
        return False
    one = position_among(seen.stacks)
    uses_gpus = bool(evidence.backends - {"gloo"})
    at_the_store = "store" in (one.stack.names.get("on"), one.stack.names.get("polls"))
    return at_the_store or is_held(seen, one) or (uses_gpus and may_be_at_its_gpu(seen, one))


def _held(evidence: Evidence, absent: frozenset[int]) -> Iterator[Why]:
    """Rule: a rank is stopped, or its host unreachable. Not one in storage I/O: that may end at any time."""
    states = {
        rank.rank: rank.state
        for rank in evidence.ranks.values()
        if rank.state == CUT_OFF or rank.state.startswith("stopped")
    }
    if states and (not absent or absent & states.keys()):
        state = min(states.values())
        ranks = tuple(sorted(rank for rank, other in states.items() if other == state))
        yield Why(
            "unreachable" if state == CUT_OFF else "stopped",
            f"{listed(ranks)}: {state}",
            ranks,
            seen=tuple(Observation(f"rank {rank}: {state}", evidence.ranks[rank].last) for rank in ranks),
        )


def _ended(evidence: Evidence, absent: frozenset[int]) -> Iterator[Why]:
    """Rule: others wait for a rank that has ended without a known error, or has left its program."""
    shown, at = evidence.shown(), positions_of(evidence)
    waiting = {rank for rank, one in at.items() if one.is_blocked and not one.is_at_its_gpu}
    if not waiting and not absent:
        return
    gone = {
        rank: ending.what
        for rank, ending in evidence.endings()
        if ending.is_clean or (ending.source.file == "kernel" and not ending.is_cause)
    }
    if any(is_in_its_program(shown[rank]) for rank in waiting):
        left = {rank for rank in shown.keys() - waiting if has_ended(shown[rank])}
        left -= {rank for rank, _ in evidence.endings()}
        gone |= dict.fromkeys(left, "its program has ended, and it is at its exit")
    if absent:
        gone = {rank: how for rank, how in gone.items() if rank in absent}
        if gone.keys() != absent:
            return
    elif shown.keys() - gone.keys() - waiting:
        return  # a live rank is elsewhere, and they may be waiting for it
    if gone and len(gone) < len(evidence.ranks):
        yield Why(
            "ended",
            f"{listed(gone)}: {gone[min(gone)]}",
            seen=tuple(Observation(f"rank {rank}: {how}") for rank, how in sorted(gone.items())[:8]),
        )


def _fingerprints(evidence: Evidence) -> Iterator[Why]:
    """Rule: torch (TORCH_DISTRIBUTED_DEBUG=DETAIL) has found different calls on two ranks."""
    for remark in evidence.of("fingerprint")[:1]:
        rank, number, name, shape, other, other_number, other_name, other_shape = remark.values
        yield Why(
            "mismatch",
            f"rank {rank} calls {name} of [{shape}] as number {number or '?'}, and rank {other} {other_name} "
            f"of [{other_shape}] as number {other_number or '?'}",
            seen=(Observation(remark.text[:200], remark.source),),
        )


def _sizes(evidence: Evidence) -> Iterator[Why]:
    """Rule: gloo has got more bytes under one number than the operation there can receive."""
    for remark in evidence.of("size")[:1]:
        rank, got, room = remark.values
        whose = f"rank {rank}" if rank else "a rank"
        yield Why(
            "mismatch",
            f"{whose} has received {got} bytes in gloo for an operation that can receive {room}: another "
            "rank has issued another operation, or one of another size",
            seen=(Observation(remark.text[:200], remark.source),),
        )


def _mismatch(evidence: Evidence, table: Table) -> Iterator[Why]:
    """Rule: ranks have different operations, sizes, types or sources under one sequence number."""
    for group, numbers in table.items():
        for number, ranks in sorted(numbers.items()):
            # Logs lack the types.
            typed = all(one.types for one in ranks.values())
            sized = {plain(one.name) for one in ranks.values()} <= SAME_SIZES
            sources = {rank: _source(evidence.ranks[rank], one) for rank, one in ranks.items()}
            if len(set(sources.values()) - {""}) > 1:  # unknown sources don't count as different
                ranks = {rank: one for rank, one in ranks.items() if sources[rank]}
            else:
                sources = dict.fromkeys(ranks, "")
            kinds = {
                rank: (one.kind, one.sizes if sized else (), one.types if typed else "", sources[rank])
                for rank, one in ranks.items()
            }
            counted = Counter(kinds.values()).most_common()
            if len(counted) < 2:
                if unequal := _unequal_exchange(ranks, evidence.members.get(group, ())):
                    what = f"under number {number} of group {group}, {unequal}"
                    yield Why("mismatch", what, seen=_seen(ranks))
                continue
            # A majority, and all others equal: then the others are the odd ones.
            clear = len(counted) == 2 and counted[0][1] > max(1, counted[1][1]) and len(ranks) > 2
            odd = tuple(sorted(rank for rank, kind in kinds.items() if kind != counted[0][0]))
            said = ", and ".join(_said(kinds, kind) for kind, _ in counted[:3])
            yield Why(
                "mismatch",
                f"under number {number} of group {group}, {said}{_on_two_threads(evidence, group)}",
                odd if clear else None,
                next((ranks[rank].calls[0] for rank in odd if ranks[rank].calls), None),
                _seen(ranks),
            )


def _seen(ranks: dict[int, GroupOperation]) -> tuple[Observation, ...]:
    return tuple(observed(rank, ranks[rank]) for rank in sorted(ranks)[:16])


def _unequal_exchange(ranks: dict[int, GroupOperation], members: tuple[int, ...]) -> str:
    """Format a difference between the total sent and received in an all_to_all; "" if there is none."""
    exchange = all(one.kind == "all_to_all" and len(one.sizes) == 2 for one in ranks.values())
    if not exchange or set(ranks) != set(members):
        return ""
    sent, received = (sum(one.sizes[way] for one in ranks.values()) for way in (0, 1))
    differ = f"the ranks of an all_to_all send {sent} elements and receive {received}"
    return differ if sent != received else ""


def _on_two_threads(evidence: Evidence, group: str) -> str:
    """Format that a rank has issued operations of one group on two threads, so that their order varies."""
    for rank in evidence.ranks.values():
        pending = [one for one in rank.operations if one.group == group and one.is_pending and one.thread]
        if len({one.thread for one in pending}) > 1:
            return f"; rank {rank.rank} has issued operations of this group on two threads"
    return ""


def _source(rank: Rank, one: GroupOperation) -> str:
    """Return the source of a broadcast, which a roll call reads from the stack of the waiting thread."""
    pending = [other for other in rank.operations if other.is_pending and other.thread == one.thread]
    if one.kind != "broadcast" or not one.thread or pending != [one]:
        return ""
    at = (position_of(stack) for stack in rank.stacks if stack.ident == one.thread)
    return next((each.stack.names.get("peer", "") for each in at if may_wait_in(rank, each, one)), "")


def _said(kinds: dict[int, Kind], kind: Kind) -> str:
    ranks = {rank for rank, other in kinds.items() if other == kind}
    name, sizes, types, source = kind
    parts = (
        f"{listed(ranks)} issued {name}",
        f"of {' to '.join(map(str, sizes))} elements" if sizes else "",
        f"of {types}" if types else "",
        f"from rank {source}" if source else "",
    )
    return " ".join(filter(None, parts))


def observed(rank: int, one: GroupOperation) -> Observation:
    sizes = f" ({' to '.join(map(str, one.sizes))} elements)" if one.sizes else ""
    state = "pending" if one.is_pending and one.state != "timed out" else one.state
    return Observation(f"rank {rank}: {one.label}{sizes} {state}", one.source)


def _desynchronized(evidence: Evidence, table: Table) -> Iterator[Why]:
    """Rule: a rank has timed out in an operation that another rank of the group has long completed."""
    farthest: dict[str, tuple[int, int]] = {}
    for rank, progress in evidence.progress():
        if progress.completed > farthest.get(progress.group, (0, -1))[1]:
            farthest[progress.group] = rank, progress.completed
    for group, numbers in table.items():
        other, completed = farthest.get(group, (0, -1))
        for number, ranks in sorted(numbers.items()):
            stuck = [rank for rank, one in ranks.items() if one.state == "timed out" and rank != other]
            # More than one number ahead: after a broken connection, some ranks may complete an operation.
            if stuck and completed > number and ranks[stuck[0]].kind in WAITS_FOR_ALL:
                yield Why(
                    "mismatch",
                    f"in group {group}, rank {stuck[0]} waits in number {number}, which rank {other} has "
                    "completed: their numbers stand for different calls, since before that number",
                    seen=(
                        observed(stuck[0], ranks[stuck[0]]),
                        Observation(f"rank {other} has completed {completed}"),
                    ),
                )


def _cycle(waits: Waits) -> Iterator[Why]:
    """Rule: ranks wait for each other across groups or threads."""
    circle = waits.cycle()
    if len({wait.key for wait in circle}) < 2:
        return
    sides: dict[tuple[str, int], set[int]] = {wait.key: set() for wait in circle}
    for wait in waits.of.values():
        sides.setdefault(wait.key, set()).add(wait.rank)
    few = min((sides[wait.key] for wait in circle), key=len)
    between_two = all(wait.operation.number == UNKNOWN for wait in circle)
    few = {wait.rank for wait in circle} if between_two else few
    waiting = {wait.rank for wait in waits.of.values()}
    clear = between_two or (len(sides) == 2 and 2 * len(few) < len(waiting))
    parts = [f"rank {wait.rank} waits in {wait.place}" for wait in circle[:6]]
    yield Why(
        "cycle",
        f"{', '.join(parts)}; each for the next, and the last for the first",
        tuple(sorted(few)) if clear else None,
        call=next(iter(circle[0].operation.calls), None),
        seen=tuple(observed(wait.rank, wait.operation) for wait in circle[:8]),
    )
