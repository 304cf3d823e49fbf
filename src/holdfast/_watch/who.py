"""Who waits, and for whom: by counts where ranks have any, by their stacks, or by what a log tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from holdfast._watch.evidence import UNKNOWN, Evidence, Rank
from holdfast._watch.places import known_of
from holdfast._watch.positions import Position, is_held, may_be_at_its_gpu, position_of_rank
from holdfast._watch.verdict import Observation, Who, listed
from holdfast._watch.waits import Wait, Waits
from holdfast._watch.why import observed


def who_waits(evidence: Evidence, waits: Waits) -> Who | None:
    """Return the first that the evidence tells, from the strongest to the weakest."""
    return next(iter(_all(evidence, waits)), None)


def _all(evidence: Evidence, waits: Waits) -> Iterator[Who]:
    yield from _by_counts(evidence, waits)
    yield from _nobody_is_missing(evidence, waits)
    yield from _opening(evidence)
    yield from _by_stacks(evidence)
    yield from _by_log(evidence)


def _by_counts(evidence: Evidence, waits: Waits) -> Iterator[Who]:
    if not waits.of:
        return
    circle = waits.cycle()
    # Whoever else is missing: those of a cycle wait for ever.
    roots = {rank for rank, _ in waits.roots()} if not circle else set[int]()
    opaque = {rank for rank in roots if _is_blocked(evidence, rank)}
    absent = roots - opaque or roots
    first = next((wait for wait in waits.of.values() if absent & wait.absent), None)
    if first is None:
        first = circle[0] if circle else next(iter(waits.of.values()))
    waiting = tuple(sorted({wait.rank for wait in waits.of.values()} - absent))
    same = [wait for wait in waits.of.values() if wait.key == first.key]
    seconds = max((wait.operation.seconds for wait in same if wait.operation.seconds), default=None)
    behind = set(waiting) - {one.rank for one in same}
    what = f"{first.operation.label}" + (f" of group {first.group}" if first.group else "")
    text = f"{listed({one.rank for one in same})} {_wait(len(same))} in {what}"
    text += f" for {seconds:.0f} s" if seconds else ""
    here, unheard = absent & first.absent, absent - evidence.ranks.keys()
    if here and here == unheard:
        text += f"; all others have come to it, and {listed(here)} {_has(here)} not answered"
    elif here:
        text += f"; {listed(here)} {_has(here)} not come to it"
    if others := absent - first.absent:
        text += f"; {listed(others)}, for which ranks wait elsewhere, {_has(others)} not come either"
    if not absent:
        wait_too = _wait(len(first.absent)) if circle else "may wait"
        text += f", for {listed(first.absent)}, which {wait_too}, too"
    text += f"; {listed(behind)} {_wait(len(behind))} in other operations" if behind else ""
    calls = {rank: position_of_rank(evidence.ranks[rank]).call for rank in absent & evidence.shown().keys()}
    yield Who(
        text,
        # One that waits in an operation that torch does not record may wait for another one.
        _to_look_at(evidence, set(waiting), absent)
        if absent and (absent - opaque or _is_alone(evidence, opaque))
        else None,
        "counts",
        waiting,
        tuple(sorted(absent)),
        first.group,
        first.operation.name,
        None if first.operation.number == UNKNOWN else first.operation.number,
        seconds,
        calls[min(calls)] if calls else next(iter(first.operation.calls), None),
        known_of(evidence, sorted(absent)),
        _seen(same),
    )


def _to_look_at(evidence: Evidence, waiting: set[int], absent: set[int]) -> tuple[int, ...] | None:
    """Return the ranks that are not there. If these have ended with success, the fewer of both are unlike the
    others: one that waits after the end of all others is the one to look at."""
    away = all(rank in evidence.ranks and evidence.ranks[rank].is_away for rank in absent)
    if away and len(waiting) <= len(absent):
        return tuple(sorted(waiting)) if len(waiting) < len(absent) else None
    return tuple(sorted(absent))


def _is_alone(evidence: Evidence, ranks: set[int]) -> bool:
    """Return whether ranks that wait in an operation without a number are few, and none of two ranks."""
    positions = [position_of_rank(evidence.ranks[rank]) for rank in ranks]
    messages = any(call.function in _MESSAGES for one in positions for call in one.stack.calls[:4])
    return not messages and 2 * len(ranks) < len(evidence.ranks)


_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "wait"}


def _is_blocked(evidence: Evidence, rank: int) -> bool:
    seen = evidence.ranks.get(rank)
    return bool(seen and seen.stacks) and is_held(seen, position_of_rank(seen))  # type: ignore[arg-type]


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _has(ranks: set[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _seen(waits: list[Wait]) -> tuple[Observation, ...]:
    return tuple(observed(wait.rank, wait.operation) for wait in waits[:8])


def _nobody_is_missing(evidence: Evidence, waits: Waits) -> Iterator[Who]:
    if not waits.whole:
        return
    group, number, ranks = waits.whole[0]
    first = ranks[min(ranks)]
    sizes = {one.sizes for one in ranks.values()}
    # Of operations whose sizes must not differ, it is a mismatch; those of gathers mostly do.
    exchange = len(sizes) > 1 and first.kind == "all_to_all"
    differ = ", with different sizes, which only given splits allow" if exchange else ""
    # The log and the flight record may both tell of it, and only the record says whether it started.
    held = {
        rank
        for rank in ranks
        for one in evidence.ranks[rank].operations
        if (one.group, one.number, one.state) == (group, number, "scheduled")
    }
    started = {rank for rank, one in ranks.items() if one.state in ("started", "timed out")} - held
    if held and started:
        differ += f"; {listed(held)} {_has(held)} not started it on the device"
    yield Who(
        f"all {len(ranks)} ranks of group {group} have come to {first.label}: nobody is missing{differ}",
        tuple(sorted(held)) if held and started and 2 * len(held) < len(ranks) else (),
        "counts",
        tuple(sorted(ranks)),
        (),
        group,
        first.name,
        number,
        max((one.seconds for one in ranks.values() if one.seconds), default=None),
        next(iter(first.calls), None),
        seen=tuple(observed(rank, ranks[rank]) for rank in sorted(ranks)[:8]),
    )


def _by_stacks(evidence: Evidence) -> Iterator[Who]:
    """Some ranks are blocked, and others are elsewhere or have ended."""
    positions = {rank: position_of_rank(evidence.ranks[rank]) for rank in evidence.shown()}
    gone = {rank.rank for rank in evidence.ranks.values() if rank.endings or rank.state} - positions.keys()
    held = {rank for rank, one in positions.items() if is_held(evidence.ranks[rank], one)}
    held = {rank for rank in held if not _goes_on(evidence.ranks[rank], positions[rank])}
    held -= {rank for rank in held if evidence.ranks[rank].endings}
    elsewhere = positions.keys() - held | gone
    if not held:
        return
    if not elsewhere:
        yield from _all_wait(evidence, positions)
        return
    first = positions[min(held)]
    text = f"{listed(held)} {_wait(len(held))} at {first.call}"
    uses_gpus = evidence.backends != {"gloo"}
    unclear = {
        rank
        for rank in elsewhere & positions.keys()
        if uses_gpus and may_be_at_its_gpu(evidence.ranks[rank], positions[rank])
    }
    elsewhere = elsewhere - unclear
    if not elsewhere:
        text += (
            f"; {listed(unclear)} {'is' if len(unclear) == 1 else 'are'} elsewhere, or at a GPU as in .item()"
        )
        yield Who(
            text, None, "stacks", tuple(sorted(held)), call=first.call, known=known_of(evidence, unclear)
        )
        return
    if all(positions[rank].is_at_its_gpu for rank in held) and not positions.keys() - held:
        return  # the others have ended, and what a GPU waits for is not known
    ranks = _to_look_at(evidence, held, elsewhere)
    text += f"; {listed(elsewhere)} {'is' if len(elsewhere) == 1 else 'are'} not there"
    calls = [positions[rank].call for rank in ranks or () if rank in positions]
    yield Who(
        text,
        ranks,
        "stacks",
        tuple(sorted(held)),
        tuple(sorted(elsewhere)),
        call=next(iter(calls), first.call),
        known=known_of(evidence, sorted(elsewhere)),
        seen=(Observation(_stack(first), first.stack.source),),
    )


def _goes_on(rank: Rank, one: Position) -> bool:
    """Return whether a rank has completed an operation between the two looks, or computes gradients and has
    issued none that is pending."""
    over = any(other.seconds is not None and not other.is_pending for other in rank.operations)
    return over or (one.does == "differentiates" and bool(one.stack.ident))


def _stack(one: Position) -> str:
    return " < ".join(map(str, one.stack.calls[:4]))


def _all_wait(evidence: Evidence, positions: dict[int, Position]) -> Iterator[Who]:
    """All ranks whose stacks are known are blocked: at one place, or at several."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, one in positions.items():
        at[f"{one.does} at {one.call} {one.stack.names.get('group_name', '')}"].append(rank)
    few = min(at.values(), key=len)
    messages = any(
        call.function in _MESSAGES - {"wait"} for rank in few for call in positions[rank].stack.calls[:4]
    )
    clear = len(at) == 2 and 2 * len(few) < len(positions) and not messages and evidence.is_complete
    # Its GPU may only not have come through.
    clear = clear and not positions[few[0]].is_at_its_gpu
    one = positions[few[0]]
    if len(positions) < 2:
        return
    text = (
        f"{listed(set(positions))} wait at one place, {one.call}: of these, nobody is missing"
        if len(at) == 1
        else f"all ranks wait, {listed(few)} at {one.call}, {listed(positions.keys() - set(few))} elsewhere"
    )
    yield Who(
        text,
        tuple(few) if clear else () if len(at) == 1 and evidence.is_complete else None,
        "stacks",
        tuple(sorted(positions)),
        call=one.call,
        known=known_of(evidence, few) if len(at) > 1 else (),
        seen=(Observation(_stack(one), one.stack.source),),
    )


def _opening(evidence: Evidence) -> Iterator[Who]:
    """A communicator began to open, and not all of its ranks have come through, by lines of NCCL."""
    for one in evidence.opening[:1]:
        missing = one.begun.keys() - set(one.ready)
        # Who waits in a collective later has come through: that line of NCCL is lost, or was left out.
        some = len(missing) < len(one.begun) and not evidence.hidden and not evidence.loose
        some = some and not any(rank.timeouts for rank in evidence.ranks.values())
        source = next(iter(one.begun.values()))
        failed = [remark for remark in evidence.of("nccl memory") if remark.source.line >= source.line]
        known = {int(remark.values[0]) for remark in failed if remark.values[0]}
        yield Who(
            f"communicator {one.name} of {one.size} ranks does not open on {listed(missing)}"
            + (f"; {listed(known)} could not allocate memory" if known else ""),
            tuple(sorted(known or missing)) if known or some else None,
            "log",
            seen=(
                Observation(f"Init START on {listed(set(one.begun))}", source),
                *(Observation(remark.text[:200], remark.source) for remark in failed[:1]),
            ),
        )


def _by_log(evidence: Evidence) -> Iterator[Who]:
    """Ranks that did not come, by lines of torch."""
    told = max(evidence.of("barrier"), key=lambda one: len(one.values[0]), default=None)
    if told is not None:
        ranks = tuple(map(int, told.values[0].split(",")))
        seen = (Observation(told.text[:200], told.source),)
        yield Who(f"{listed(ranks)} did not come to a monitoredBarrier", ranks, "log", seen=seen)
    timed_out = {rank.rank: rank.timeouts[0] for rank in evidence.ranks.values() if rank.timeouts}
    silent = set(range(evidence.world_size or 0)) - timed_out.keys()
    if timed_out and silent and not evidence.hidden and len({one.label for one in timed_out.values()}) == 1:
        first = timed_out[min(timed_out)]
        yield Who(
            f"{listed(set(timed_out))} timed out in {first.label}; the log has none of {listed(silent)}",
            tuple(sorted(silent)) if 2 * len(silent) < len(timed_out) else None,
            "log",
            tuple(sorted(timed_out)),
            tuple(sorted(silent)) if 2 * len(silent) < len(timed_out) else (),
            operation=first.name,
            number=None if first.number == UNKNOWN else first.number,
            seconds=first.seconds,
            known=known_of(evidence, sorted(silent)[:64]),
            seen=tuple(observed(rank, one) for rank, one in sorted(timed_out.items())[:8]),
        )
