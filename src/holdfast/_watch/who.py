"""Which ranks wait, and for which: by sequence numbers if known, by stacks, or by lines of a log."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain

from holdfast._watch.evidence import GLOO_TIMEOUT, UNKNOWN, Ending, Evidence, Rank
from holdfast._watch.places import known_of
from holdfast._watch.positions import Position, is_held, may_be_at_its_gpu, positions_of
from holdfast._watch.verdict import Observation, RankPlace, Who, listed
from holdfast._watch.waits import Waits
from holdfast._watch.why import observed

SEEN = 8
"""Maximum number of waits listed with a result."""


def who_waits(evidence: Evidence, waits: Waits) -> Who | None:
    """Return the result of the first rule that applies, from the strongest to the weakest."""
    counts = _by_counts(evidence, waits), _nobody_is_missing(evidence, waits)
    logs = _opening(evidence), _by_stacks(evidence), _by_log(evidence), _by_gloo(evidence)
    return next(chain(_by_holdfast(evidence), *counts, *logs), None)


def _by_holdfast(evidence: Evidence) -> Iterator[Who]:
    """Rule: Holdfast has written to a log who waits for whom. It had all stacks, so only stacks tell more."""
    own = evidence.latest_own()
    if own is not None and own.summary and evidence.has_only_logs():
        yield Who(
            own.summary,
            own.absent if own.absent and own.is_whole else None,
            "holdfast",
            own.waiting,
            own.absent,
            known=tuple(RankPlace(ranks, text) for ranks, text in own.facts),
            seen=tuple(Observation(text, source) for text, source in own.lines[:SEEN]),
        )


def _by_counts(evidence: Evidence, waits: Waits) -> Iterator[Who]:
    if not waits.of:
        return
    circle, at, of = waits.cycle(), positions_of(evidence), waits.likely()
    if not of and any(is_held(evidence.ranks[rank], one) for rank, one in at.items()):
        return  # ranks that are blocked for certain, in what no record has, tell more
    of = of or waits.of
    # A cycle comes first, whichever other ranks are absent: it never resolves.
    roots = {rank for rank, _ in waits.roots()} if not circle else set[int]()
    opaque = {rank for rank in roots & at.keys() if is_held(evidence.ranks[rank], at[rank])}
    absent = roots - opaque or roots
    default = circle[0] if circle else next(iter(of.values()))
    first = next((wait for wait in of.values() if absent & wait.absent), default)
    waiting = {wait.rank for wait in of.values()} - absent
    same = [wait for wait in of.values() if wait.key == first.key]
    here = {wait.rank for wait in same}
    seconds = max((wait.operation.seconds for wait in same if wait.operation.seconds), default=None)
    text = f"{listed(here)} {_do(here, 'waits')} in {first.place}"
    text += f" for {seconds:.0f} s" if seconds else ""
    away = absent & first.absent
    if away and away == absent - waits.counted:
        text += "; " if first.operation.number == UNKNOWN else "; all others have come to it, and "
        text += f"{listed(away)} {_do(away, 'has')} not answered"
    elif away:
        text += f"; {listed(away)} {_do(away, 'has')} not come to it"
    if others := absent - away:
        text += f"; {listed(others)}, for which ranks wait elsewhere, {_do(others, 'has')} not come either"
    if not absent:
        wait_too = _do(first.absent, "waits") if circle else "may wait"
        text += f", for {listed(first.absent)}, which {wait_too}, too"
    if behind := waiting - here:
        text += f"; {listed(behind)} {_do(behind, 'waits')} in other operations"
    # A rank blocked in an operation that torch does not record may wait for another rank. That is unlikely
    # if few ranks are, and not in messages between two ranks.
    messages = _exchange((at[rank] for rank in opaque), _MESSAGES | {"wait"})
    clear = absent - opaque or (absent and not messages and 2 * len(opaque) < len(evidence.ranks))
    shown = sorted(absent & at.keys())
    yield Who(
        text,
        _to_look_at(evidence, waiting, absent) if clear else None,
        "counts",
        tuple(sorted(waiting)),
        tuple(sorted(absent)),
        first.group,
        first.operation.name,
        None if first.operation.number == UNKNOWN else first.operation.number,
        seconds,
        at[shown[0]].call if shown else next(iter(first.operation.calls), None),
        known_of(evidence, sorted(absent)),
        tuple(observed(wait.rank, wait.operation) for wait in same[:SEEN]),
    )


def _to_look_at(evidence: Evidence, waiting: set[int], absent: set[int]) -> tuple[int, ...] | None:
    """Return the absent ranks. If these have ended successfully, return the smaller of both sets: a rank that
    waits after the end of all others is the one to look at."""
    away = {rank for rank, ending in evidence.endings() if ending.is_clean}
    if absent <= away and len(waiting) <= len(absent):
        return tuple(sorted(waiting)) if len(waiting) < len(absent) else None
    return tuple(sorted(absent))


_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}


def _exchange(positions: Iterable[Position], functions: set[str]) -> bool:
    """Return whether a thread is in one of these functions, such as those of messages between two ranks, or
    waits for a handle of one."""
    at = list(positions)
    by_handle = any(one.stack.names.get("handle") in functions for one in at)
    return by_handle or any(call.function in functions for one in at for call in one.stack.calls[:4])


def _do(ranks: Collection[int], what: str) -> str:
    """Return a verb in singular or plural."""
    return what if len(ranks) == 1 else {"waits": "wait", "has": "have", "is": "are"}[what]


def _nobody_is_missing(evidence: Evidence, waits: Waits) -> Iterator[Who]:
    if not waits.whole:
        return
    group, number, ranks = waits.whole[0]
    first = ranks[min(ranks)]
    sizes = {one.sizes for one in ranks.values()}
    # Sizes that must be equal are checked as a mismatch (`why`); those of gathers usually differ.
    exchange = len(sizes) > 1 and first.kind == "all_to_all"
    differ = ", with different sizes, which only given splits allow" if exchange else ""
    # The log and the flight record may both have it; only the record shows whether it started.
    held = {
        rank
        for rank in ranks
        for one in evidence.ranks[rank].operations
        if (one.group, one.number, one.state) == (group, number, "scheduled")
    }
    started = {rank for rank, one in ranks.items() if one.state in ("started", "timed out")} - held
    if held and started:
        differ += f"; {listed(held)} {_do(held, 'has')} not started it on the device"
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
        seen=tuple(observed(rank, ranks[rank]) for rank in sorted(ranks)[:SEEN]),
    )


def _by_stacks(evidence: Evidence) -> Iterator[Who]:
    """Rule: some ranks are blocked, and others are elsewhere or have ended."""
    at, known = positions_of(evidence), evidence.ranks
    held = {rank for rank, one in at.items() if is_held(known[rank], one) and not _goes_on(known[rank], one)}
    away = (at.keys() | {rank.rank for rank in known.values() if rank.endings or rank.state}) - held
    if not held or not away:
        yield from _all_wait(evidence, at) if len(held) > 1 else ()
        return
    first, waiting = at[min(held)], tuple(sorted(held))
    text = f"{listed(held)} {_do(held, 'waits')} at {first.call}"
    uses_gpus = evidence.backends != {"gloo"}
    unclear = {rank for rank in away & at.keys() if uses_gpus and may_be_at_its_gpu(known[rank], at[rank])}
    away -= unclear
    if not away:
        text += f"; {listed(unclear)} {_do(unclear, 'is')} elsewhere, or at a GPU as in .item()"
        yield Who(text, None, "stacks", waiting, call=first.call, known=known_of(evidence, unclear))
        return
    if all(at[rank].is_at_its_gpu for rank in held) and not at.keys() - held:
        return  # the others have ended, and the operation that blocks the GPUs is unknown
    ranks = _to_look_at(evidence, held, away)
    yield Who(
        f"{text}; {listed(away)} {_do(away, 'is')} not there",
        ranks,
        "stacks",
        waiting,
        tuple(sorted(away)),
        call=next((at[rank].call for rank in ranks or () if rank in at), first.call),
        known=known_of(evidence, sorted(away)),
        seen=_seen(first),
    )


def _goes_on(rank: Rank, one: Position) -> bool:
    """Return whether a rank has ended, has completed an operation between the two samples, or is in a
    backward pass as seen by its own process."""
    over = any(other.seconds is not None and not other.is_pending for other in rank.operations)
    return bool(rank.endings) or over or (one.does == "differentiates" and bool(one.stack.ident))


def _seen(one: Position) -> tuple[Observation, ...]:
    return (Observation(" < ".join(map(str, one.stack.calls[:4])), one.stack.source),)


def _all_wait(evidence: Evidence, positions: dict[int, Position]) -> Iterator[Who]:
    """Rule: all ranks with known stacks are blocked, in one place or in several."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, one in positions.items():
        at[f"{one.does} at {one.call} {one.stack.names.get('group_name', '')}"].append(rank)
    few = min(at.values(), key=len)
    one = positions[few[0]]
    ranks: tuple[int, ...] | None = () if evidence.is_complete else None
    if len(at) == 1:
        text = f"{listed(positions)} wait at one place, {one.call}: of these, nobody is missing"
    else:
        others = listed(positions.keys() - set(few))
        text = f"all ranks wait, {listed(few)} at {one.call}, {others} elsewhere"
        messages = _exchange((positions[rank] for rank in few), _MESSAGES)
        clear = len(at) == 2 and 2 * len(few) < len(positions) and not messages and evidence.is_complete
        # Its GPU may merely be behind.
        ranks = tuple(few) if clear and not one.is_at_its_gpu else None
    yield Who(
        text,
        ranks,
        "stacks",
        tuple(sorted(positions)),
        call=one.call,
        known=known_of(evidence, few) if len(at) > 1 else (),
        seen=_seen(one),
    )


def _opening(evidence: Evidence) -> Iterator[Who]:
    """Rule: NCCL's log lines show a communicator that has not opened on all of its ranks."""
    for one in evidence.opening[:1]:
        missing = one.begun.keys() - one.ready
        # A rank that timed out in a later collective had opened it: NCCL's line was lost or suppressed.
        some = len(missing) < len(one.begun) and not evidence.hidden and not evidence.first_timeouts()
        source = next(iter(one.begun.values()))
        failed = [remark for remark in evidence.of("nccl memory") if remark.source.line >= source.line]
        known = {int(remark.values[0]) for remark in failed if remark.values[0]}
        yield Who(
            f"communicator {one.name} of {one.size} ranks does not open on {listed(missing)}"
            + (f"; {listed(known)} could not allocate memory" if known else ""),
            tuple(sorted(known or missing)) if known or some else None,
            "log",
            seen=(
                Observation(f"Init START on {listed(one.begun)}", source),
                *(Observation(remark.text[:200], remark.source) for remark in failed[:1]),
            ),
        )


def _by_log(evidence: Evidence) -> Iterator[Who]:
    """Rule: torch's log lines show ranks that did not come."""
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
            f"{listed(timed_out)} timed out in {first.label}; the log has none of {listed(silent)}",
            tuple(sorted(silent)) if 2 * len(silent) < len(timed_out) else None,
            "log",
            tuple(sorted(timed_out)),
            tuple(sorted(silent)) if 2 * len(silent) < len(timed_out) else (),
            operation=first.name,
            number=None if first.number == UNKNOWN else first.number,
            seconds=first.seconds,
            known=known_of(evidence, sorted(silent)[:64]),
            seen=tuple(observed(rank, one) for rank, one in sorted(timed_out.items())[:SEEN]),
        )


_PEER_LOST = re.compile("Connection (?:closed|reset) by peer")


def _by_gloo(evidence: Evidence) -> Iterator[Who]:
    """Rule: gloo's errors, which have no sequence number, show ranks that timed out in one call, and ranks
    that did not."""
    found: dict[int, Ending] = {}
    for rank, ending in evidence.endings():
        if ending.is_fatal and GLOO_TIMEOUT.search(ending.what):
            found.setdefault(rank, ending)
    calls = {one.call for one in found.values()}
    # A rank that has lost its peer was in a collective, too, perhaps in the same.
    lost = {rank for rank, one in evidence.endings() if _PEER_LOST.search(one.what)}
    silent = set(range(evidence.world_size or max(evidence.ranks, default=-1) + 1)) - found.keys() - lost
    if not silent or not found or evidence.hidden or len(calls) > 1:
        return
    call = found[min(found)].call
    ranks = tuple(sorted(silent)) if 2 * len(silent) < len(found) else None
    yield Who(
        f"{listed(found)} timed out in gloo{f' at {call}' if call else ''}; the log has no timeout of "
        f"{listed(silent)}",
        ranks,
        "log",
        tuple(sorted(found)),
        ranks or (),
        call=call,
        known=known_of(evidence, sorted(silent)[:64]),
        seen=tuple(
            Observation(f"rank {rank}: {one.what}", one.source) for rank, one in list(found.items())[:SEEN]
        ),
    )
