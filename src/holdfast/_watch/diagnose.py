"""Makes a diagnosis from evidence: which ranks wait for which, and the cause if it is proven."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import msgspec

from holdfast._watch.advice import advice
from holdfast._watch.evidence import Evidence
from holdfast._watch.looks_like import looks_like
from holdfast._watch.places import known_of, places
from holdfast._watch.verdict import IN_A_SAVE, Diagnosis, Observation, Who, Why, listed
from holdfast._watch.waits import Waits
from holdfast._watch.who import who_waits
from holdfast._watch.why import causes

_SAVE = re.compile("(?:save|load)(?:_checkpoint)?|sync_all_async_calls|validate_uneven_dtensor")
SHOWN = 200
"""Maximum number of observations in a diagnosis."""
STARVED = 0.5
"""Share of the time spent waiting for memory above which that explains a slow rank."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Diagnose which ranks wait for which, and why, as far as the evidence shows it."""
    waits = Waits(evidence)
    who = who_waits(evidence, waits)
    why = next(iter(causes(evidence, waits, frozenset(who.absent if who is not None else ()))), None)
    # Those of a roll call in a log have answered it, whatever other lines there are.
    own = evidence.own.heard_of if evidence.own is not None else ()
    heard_of = tuple(sorted({*evidence.ranks, *own}))
    all_answered = not evidence.hidden and len(own) == evidence.world_size
    return Diagnosis(
        _with_cause(evidence, who, why),
        why,
        places(evidence),
        looks_like(evidence),
        advice(evidence),
        tuple(islice(_observed(evidence), SHOWN)),
        tuple(_to_collect(evidence, who, why)),
        heard_of,
        evidence.world_size,
        evidence.is_complete or all_answered,
        IN_A_SAVE if _waits_in_a_save(evidence, who.waiting if who is not None else ()) else "",
    )


def _with_cause(evidence: Evidence, who: Who | None, why: Why | None) -> Who | None:
    """Take the ranks from a proven cause: counts and stacks may not show which ranks are to blame."""
    if why is None:
        return who
    if who is None or why.kind == "mismatch":  # after it, numbers stand for different calls
        waiting = who.waiting if who is not None else ()
        waiting = waiting or tuple(dict(evidence.timeouts()))
        known = known_of(evidence, why.ranks or ())
        return Who(why.summary, why.ranks, "cause", waiting, call=why.call, known=known, seen=why.seen)
    if why.ranks is None or (who.ranks and set(why.ranks) <= set(who.ranks)):
        return who
    return msgspec.structs.replace(who, ranks=why.ranks, known=known_of(evidence, why.ranks))


def _waits_in_a_save(evidence: Evidence, waiting: tuple[int, ...]) -> bool:
    """Return whether ranks wait in a collective of a save or load of a checkpoint."""
    ranks = [evidence.ranks[rank] for rank in waiting if rank in evidence.ranks]
    stacks = [stack.calls for rank in ranks for stack in rank.stacks[:1]]
    stacks += [operation.calls for rank in ranks for operation in rank.operations]
    calls = [call for stack in stacks for call in stack]
    return any("checkpoint" in call.file and _SAVE.fullmatch(call.function) for call in calls)


def _observed(evidence: Evidence) -> Iterator[Observation]:
    """Yield all timeouts, endings and remarks of the evidence, whether or not a rule uses them."""
    for rank, one in evidence.timeouts():
        group = f" of {one.group}" if one.group else ""
        yield Observation(f"rank {rank} timed out in {one.label}{group}", one.source)
    for one in evidence.loose:
        yield Observation(f"{one.label} timed out on rank {one.group_rank} of its group", one.source)
    for rank, ending in evidence.endings():
        yield Observation(f"rank {rank}: {ending.what}", ending.source)
    for ending in evidence.raised:
        yield Observation(f"raised: {ending.what}", ending.source)
    for remark in evidence.remarks:
        if remark.kind not in ("looks like", "backend", "ended"):
            yield Observation(remark.text, remark.source)
    if short := waited_for_memory(evidence):
        yield Observation(short)


def waited_for_memory(evidence: Evidence) -> str:
    """Format which ranks spent most of the time between the two samples waiting for memory, if any: they are
    slow, whatever their stacks show."""
    short = {rank.rank: rank.starved for rank in evidence.ranks.values() if rank.starved >= STARVED}
    most = f"up to {max(short.values(), default=0):.0%} of the time between the two looks"
    return f"{listed(short)}: waited for memory {most} (`free`, `memory.max` and swap tell)" if short else ""


def _to_collect(evidence: Evidence, who: Who | None, why: Why | None) -> Iterator[str]:
    """Yield the missing evidence, with the command that collects it."""
    if evidence.hidden:
        yield (
            f"{evidence.hidden} lines that Ray has left out: run with RAY_DEDUP_LOGS=0, or give the files in "
            "/tmp/ray/session_latest/logs."
        )
    if evidence.own is not None and evidence.own.folder and evidence.has_only_logs():
        yield f"What all ranks have answered to that roll call: holdfast diagnose {evidence.own.folder}"
    if why is not None or (who is not None and who.absent):
        return
    if evidence.backends != {"gloo"} and (not any(evidence.operations()) or not evidence.members):
        yield (
            "Flight records of all ranks: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
            "TORCH_FR_DUMP_TEMP_FILE=/shared/trace_ and give /shared/trace_*."
        )
    if evidence.of("no rank"):
        yield "The ranks of these stacks: name the files rank-0.txt, rank-1.txt and so on."
    shown = evidence.shown()
    if _is_over(evidence):
        yield (
            "Stacks, while it hangs the next time: HOLDFAST_ROLL_CALLS=folder with holdfast.install(), or "
            "py-spy dump --pid PID > rank-N.txt on each host."
        )
        return
    missing = set(range(min(evidence.world_size or 0, 4096))) - shown.keys()
    if missing or not shown:
        whose = listed(missing) if missing else "all ranks"
        yield f"Stacks of {whose}, on its host: py-spy dump --pid PID > rank-N.txt"
    if shown and not any(rank.later for rank in evidence.ranks.values()):
        yield "The same 10 s later, to see who moves: py-spy dump --pid PID > rank-N-again.txt"


def _is_over(evidence: Evidence) -> bool:
    """Return whether the job is known to have ended, so that its processes can't be inspected."""
    timed_out = bool(evidence.loose) or any(evidence.timeouts())
    fatal = any(ending.is_fatal for _, ending in evidence.endings())
    return not evidence.shown() and (timed_out or fatal or bool(evidence.of("ended")))
