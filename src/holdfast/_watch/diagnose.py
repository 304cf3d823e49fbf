"""Makes a diagnosis of evidence: all rules are asked, and the fixed table says which verdict stands."""

from __future__ import annotations

import msgspec

from holdfast._watch import known, rules_counts, rules_cycle, rules_log, rules_stacks
from holdfast._watch.evidence import Evidence
from holdfast._watch.verdict import (
    BAR,
    CLASSES,
    IN_A_SAVE,
    Diagnosis,
    HangClass,
    Observation,
    Verdict,
    listed,
)

_RULES = (*rules_log.RULES, *rules_counts.RULES, *rules_cycle.RULES, *rules_stacks.RULES, *known.RULES)
"""Of verdicts of one confidence, the rule that stands first wins."""


_SAVES = (
    "save",
    "load",
    "save_checkpoint",
    "load_checkpoint",
    "sync_all_async_calls",
    "validate_uneven_dtensor",
)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Say what hangs, as far as the evidence tells."""
    verdicts = [verdict for rule in _RULES for verdict in rule(evidence)]
    verdicts.sort(key=lambda verdict: -verdict.confidence)
    first = verdicts[0] if verdicts and verdicts[0].confidence >= BAR else None
    if first is not None and not first.operation:
        first = _with_operation(first, evidence)
    about = CLASSES[first.kind] if first is not None else HangClass("", "", "", "")
    return Diagnosis(
        first,
        tuple(verdicts[first is not None :]),
        about.means,
        about.todo,
        IN_A_SAVE if first is not None and _waits_in_a_save(evidence, first) else about.holdfast,
        about.thread,
        tuple(_observed(evidence)),
        tuple(_to_collect(evidence, first)),
        tuple(evidence.ranks),
        evidence.world_size,
        evidence.is_complete,
    )


def _with_operation(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Add the operation in which the ranks wait, which only counts tell, to a verdict by other evidence."""
    waits = rules_counts.Waits(evidence).operations
    one = next((waits[rank] for rank in verdict.waiting if rank in waits), None)
    if one is None:
        return verdict
    return msgspec.structs.replace(verdict, group=one.group, operation=one.name, number=one.number)


def _waits_in_a_save(evidence: Evidence, verdict: Verdict) -> bool:
    """Return whether the ranks wait in a collective of a save or load of a checkpoint."""
    ranks = [evidence.ranks[rank] for rank in verdict.waiting if rank in evidence.ranks]
    stacks = [stack.calls for rank in ranks for stack in rank.stacks[:1]]
    stacks += [operation.calls for rank in ranks for operation in rank.operations]
    calls = [call for stack in stacks for call in stack]
    return any("checkpoint" in call.file and call.function in _SAVES for call in calls)


def _observed(evidence: Evidence) -> list[Observation]:
    """List what the evidence shows of timeouts, ends and remarks, however the verdict is."""
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
    found += [Observation(remark.text, remark.source) for remark in evidence.remarks]
    return found[:200]


def _to_collect(evidence: Evidence, verdict: Verdict | None) -> list[str]:
    """Say what is missing, with the command that collects it."""
    wanted = []
    if evidence.hidden:
        wanted.append(
            f"{evidence.hidden} lines that Ray has left out: run with RAY_DEDUP_LOGS=0, or give the files in "
            "/tmp/ray/session_latest/logs."
        )
    if verdict is not None:
        return wanted
    if not any(True for _ in evidence.operations()) or not evidence.members:
        wanted.append(
            "Flight records of all ranks: set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and "
            "TORCH_FR_DUMP_TEMP_FILE=/shared/trace_ and give /shared/trace_*."
        )
    if evidence.of("no rank"):
        wanted.append("The ranks of these stacks: name the files rank-0.txt, rank-1.txt and so on.")
    missing = [rank for rank in range(min(evidence.world_size or 0, 4096)) if rank not in evidence.shown()]
    if missing or not evidence.shown():
        whose = listed(missing) if missing else "all ranks"
        wanted.append(f"Stacks of {whose}, on its host: py-spy dump --pid PID > rank-N.txt")
    if evidence.shown() and not any(rank.later for rank in evidence.ranks.values()):
        wanted.append(
            "The same 10 s later, to tell late from stuck: py-spy dump --pid PID > rank-N-again.txt"
        )
    if evidence.of("heartbeat") or evidence.shown():
        wanted.append(
            "Native frames, and the version of NCCL: py-spy dump --native --pid PID > rank-N.txt, and a log "
            "with NCCL_DEBUG=INFO."
        )
    return wanted
