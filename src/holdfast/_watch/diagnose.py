"""Makes a diagnosis of evidence: who waits for whom, and why, as far as that is proven."""

from __future__ import annotations

import msgspec

from holdfast._watch.advice import advice
from holdfast._watch.evidence import Evidence
from holdfast._watch.looks_like import looks_like
from holdfast._watch.places import known_of, places
from holdfast._watch.verdict import IN_A_SAVE, Diagnosis, Observation, Who, Why, listed
from holdfast._watch.waits import Waits
from holdfast._watch.who import who_waits
from holdfast._watch.why import causes

_SAVES = (
    "save",
    "load",
    "save_checkpoint",
    "load_checkpoint",
    "sync_all_async_calls",
    "validate_uneven_dtensor",
)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Say who waits for whom, and why, as far as the evidence tells."""
    waits = Waits(evidence)
    who = who_waits(evidence, waits)
    why = next(iter(causes(evidence, waits, frozenset(who.absent if who is not None else ()))), None)
    return Diagnosis(
        _with_cause(evidence, who, why),
        why,
        places(evidence),
        looks_like(evidence),
        advice(evidence),
        tuple(_observed(evidence)),
        tuple(_to_collect(evidence, who, why)),
        tuple(evidence.ranks),
        evidence.world_size,
        evidence.is_complete,
        IN_A_SAVE if _waits_in_a_save(evidence, who.waiting if who is not None else ()) else "",
    )


def _with_cause(evidence: Evidence, who: Who | None, why: Why | None) -> Who | None:
    """Name the ranks of a proven cause, of which counts and stacks may not tell which ones they are."""
    if why is None:
        return who
    if who is None or why.kind == "mismatch":  # after it, numbers stand for different calls
        waiting = who.waiting if who is not None else ()
        waiting = waiting or tuple(rank.rank for rank in evidence.ranks.values() if rank.timeouts)
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
    return any("checkpoint" in call.file and call.function in _SAVES for call in calls)


def _observed(evidence: Evidence) -> list[Observation]:
    """List what the evidence shows of timeouts, ends and remarks, whatever follows from it."""
    found = [
        Observation(
            f"rank {rank} timed out in {one.label}" + (f" of {one.group}" if one.group else ""),
            one.source,
        )
        for rank, one in evidence.operations()
        if one.state == "timed out"
    ]
    found += [
        Observation(f"{one.label} timed out on rank {one.group_rank} of its group", one.source)
        for one in evidence.loose
    ]
    found += [
        Observation(f"rank {rank.rank}: {ending.what}", ending.source)
        for rank in evidence.ranks.values()
        for ending in rank.endings
    ]
    found += [Observation(f"raised: {ending.what}", ending.source) for ending in evidence.raised]
    quiet = ("looks like", "backend", "ended")
    found += [Observation(one.text, one.source) for one in evidence.remarks if one.kind not in quiet]
    if short := evidence.short_of_memory():
        found.append(Observation(waited_for_memory(short)))
    return found[:200]


def waited_for_memory(short: dict[int, float]) -> str:
    """Say which ranks' machines have waited for memory; what they do is slow, wherever they are found."""
    return (
        f"{listed(set(short))}: waited for memory up to {max(short.values()):.0%} of the time between the "
        "two looks (`free`, `memory.max` and swap tell)"
    )


def _to_collect(evidence: Evidence, who: Who | None, why: Why | None) -> list[str]:
    """Say what is missing, with the command that collects it."""
    wanted = []
    if evidence.hidden:
        wanted.append(
            f"{evidence.hidden} lines that Ray has left out: run with RAY_DEDUP_LOGS=0, or give the files in "
            "/tmp/ray/session_latest/logs."
        )
    if why is not None or (who is not None and who.absent):
        return wanted
    if evidence.backends != {"gloo"} and (not any(evidence.operations()) or not evidence.members):
        wanted.append(
            "Flight records of all ranks: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
            "TORCH_FR_DUMP_TEMP_FILE=/shared/trace_ and give /shared/trace_*."
        )
    if evidence.of("no rank"):
        wanted.append("The ranks of these stacks: name the files rank-0.txt, rank-1.txt and so on.")
    if is_over(evidence):
        wanted.append(
            "Stacks, while it hangs the next time: HOLDFAST_ROLL_CALLS=folder with holdfast.install(), or "
            "py-spy dump --pid PID > rank-N.txt on each host."
        )
        return wanted
    missing = [rank for rank in range(min(evidence.world_size or 0, 4096)) if rank not in evidence.shown()]
    if missing or not evidence.shown():
        whose = listed(missing) if missing else "all ranks"
        wanted.append(f"Stacks of {whose}, on its host: py-spy dump --pid PID > rank-N.txt")
    if evidence.shown() and not any(rank.later for rank in evidence.ranks.values()):
        wanted.append("The same 10 s later, to see who moves: py-spy dump --pid PID > rank-N-again.txt")
    return wanted


def is_over(evidence: Evidence) -> bool:
    """Return whether the job is known to have ended: nobody can look at its processes."""
    timed_out = bool(evidence.loose) or any(rank.timeouts for rank in evidence.ranks.values())
    fatal = any(ending.is_fatal for rank in evidence.ranks.values() for ending in rank.endings)
    return not evidence.shown() and (timed_out or fatal or bool(evidence.of("ended")))
