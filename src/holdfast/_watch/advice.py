"""First observations about a log, such as an experienced engineer makes: facts and hints, not a verdict."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice

from holdfast._watch.evidence import Evidence, GroupOperation, GroupProgress, is_of_a_library
from holdfast._watch.verdict import Observation, listed

MOST = 6
"""Maximum number of sentences of one kind."""
_OF_ONE_SIZE = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
_PEER = re.compile(r"(?:Connection closed by peer|Read error|Write error) \[([^\]]*)\]")
_OF_ALL = "default_pg"
_Waits = dict[int, GroupOperation]


def advice(evidence: Evidence) -> tuple[Observation, ...]:
    """Return the first observations; empty for a job without a sign of a fault."""
    findings = (_errors, _timeouts, _behind, _threads, _heartbeats)
    return tuple(one for finding in findings for one in islice(finding(evidence), MOST))


def _timeouts(evidence: Evidence) -> Iterator[Observation]:
    """Yield the ranks with and without a timeout, by operation."""
    groups: dict[str, dict[int, _Waits]] = defaultdict(lambda: defaultdict(dict))
    for rank, one in evidence.timeouts():
        # If the rank in the group equals the global rank, assume the group of all ranks.
        group = one.group or (_OF_ALL if one.group_rank == rank else "")
        groups[_named(group)][one.number].setdefault(rank, one)
    first = {group: numbers[min(numbers)] for group, numbers in groups.items()}
    for group in sorted(first, key=lambda group: min(one.source for one in first[group].values())):
        yield from _of_group(evidence, group, first[group])
    for one in evidence.loose:
        what = f"rank {one.group_rank} of a group timed out in {one.label}; its rank in the job is not told"
        yield Observation(what, one.source)


def _named(group: str) -> str:
    """Normalize the name of the group of all ranks, which torch numbers in several ways."""
    return _OF_ALL if group.endswith(_OF_ALL) else group


def _of_group(evidence: Evidence, group: str, waits: _Waits) -> Iterator[Observation]:
    one = min(waits.values(), key=lambda one: one.source)
    where = (f", number {one.number}" if one.number >= 0 else "") + (f" of group {group}" if group else "")
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, other in waits.items():
        is_sized = other.sizes and other.kind in _OF_ONE_SIZE
        alike[other.name + (f" of {other.sizes[0]} elements" if is_sized else "")].append(rank)
    if len(alike) > 1:
        parts = "; ".join(f"{listed(ranks)} in {name}" for name, ranks in alike.items())
        end = ": they differ before it, or in its size" if group else "; whether in one group is not told"
        yield Observation(f"ranks timed out in different operations{where}: {parts}{end}", one.source)
        return
    at = next((call for call in one.calls if not is_of_a_library(call)), None)
    called = f", called at {at}" if at is not None else ""
    whom = _missing(evidence, group, waits)
    yield Observation(f"{listed(waits)} timed out in {one.name}{where}{called}{whom}", one.source)
    done = {
        rank: progress.completed
        for rank, progress in evidence.progress()
        if group and _named(progress.group) == group
    }
    if ahead := {rank for rank, number in done.items() if number >= one.number >= 0}:
        yield Observation(f"{listed(ahead)} completed number {one.number}, in which others wait", one.source)
    if one.number in (0, 1) or (done and max(done.values()) <= 0):
        yield Observation(
            "that is the first collective of the group: its communicator did not open on all ranks, or the "
            "hardware or the network between them does not work",
            one.source,
        )


def _missing(evidence: Evidence, group: str, waits: _Waits) -> str:
    """Format which ranks of the group have no timeout, as far as its members are known."""
    known = next((ranks for name, ranks in evidence.members.items() if _named(name) == group), None)
    is_of_all = group == _OF_ALL
    if known is None and is_of_all:
        known = tuple(range(evidence.world_size or max(evidence.ranks) + 1))
    if known is None:
        one = next(iter(waits.values()))
        given, taken = one.sizes if len(one.sizes) == 2 and one.kind == "all_gather" else (1, 0)
        size = taken // given if given and not taken % given else 0
        return f"; the group has {size} ranks, {size - len(waits)} without a timeout" if size else ""
    missing = set(known) - waits.keys()
    if not missing:
        sure = len(waits) > 1 and (evidence.world_size or not is_of_all) and not evidence.hidden
        return "; these are all of its ranks, and none is missing" if sure else ""
    rest = [evidence.ranks[rank] for rank in sorted(missing & evidence.ranks.keys())]
    if elsewhere := [f"rank {one.rank} in {one.timeouts[0].label}" for one in rest if one.timeouts]:
        return f"; other ranks in another one: {', '.join(elsewhere[:MOST])}"
    if len(missing) >= len(waits) or evidence.hidden:
        left_out = f", and Ray has left out {evidence.hidden} lines" if evidence.hidden else ""
        return f"; the log has no timeout of {listed(missing)}{left_out}"
    never = missing - evidence.ranks.keys()
    parts = [f"no line of {listed(never)} that tells anything"] if never else []
    parts += [f"lines of {listed(missing - never)}, but no timeout"] if rest else []
    return f"; the log has {', and '.join(parts)}: look at {listed(missing)}"


def _behind(evidence: Evidence) -> Iterator[Observation]:
    """Yield ranks that have issued fewer collectives of a group than others."""
    issued: dict[str, dict[int, GroupProgress]] = defaultdict(dict)
    for rank, one in evidence.progress():
        # Before torch 2.5, the numbers of other groups are local to each rank.
        if not one.group.startswith("PG ") or _named(one.group) == _OF_ALL:
            issued[_named(one.group)][rank] = one
    for group, ranks in issued.items():
        numbers = {one.enqueued for one in ranks.values()}
        behind = {rank for rank, one in ranks.items() if one.enqueued == min(numbers)}
        if len(numbers) > 1:
            what = f"{listed(behind)} issued {min(numbers)} collectives of group {group}"
            yield Observation(f"{what}, others up to {max(numbers)}", ranks[min(behind)].source)


def _threads(evidence: Evidence) -> Iterator[Observation]:
    """Yield ranks with collectives on two threads, or in two groups: their order may differ by rank."""
    for rank in evidence.ranks.values():
        inside = [(stack.thread, call) for stack in rank.stacks for call in reversed(stack.calls)]
        inner = {thread: call for thread, call in inside if call.file.endswith("distributed_c10d.py")}
        waits = [f"{thread} in {call.function}" for thread, call in inner.items()]
        if len(waits) > 1:
            what = f"rank {rank.rank} is in collectives on {len(waits)} threads: {', '.join(waits)}"
            yield Observation(what, rank.stacks[0].source)
        groups = sorted({one.group for one in rank.timeouts if one.group})
        if len(groups) > 1:
            what = f"rank {rank.rank} waits in {len(groups)} groups: {', '.join(groups[:MOST])}"
            yield Observation(what, rank.timeouts[0].source)


def _heartbeats(evidence: Evidence) -> Iterator[Observation]:
    ranks = {int(one.values[0]) for one in evidence.of("heartbeat") if one.values[0].isdigit()}
    for one in evidence.of("heartbeat")[:1]:
        what = (
            f"the watchdog of {listed(ranks) if ranks else 'a rank'} stood still, which is no timeout of a "
            "collective: a call of CUDA or NCCL blocks it, or a thread that holds the GIL in one"
        )
        yield Observation(what, one.source)


def _errors(evidence: Evidence) -> Iterator[Observation]:
    """Yield errors raised before the first timeout in the same file, out-of-memory errors, and lost peers."""
    first = evidence.first_timeouts()
    ends = [(f"rank {rank}", one) for rank, one in evidence.endings()]
    for whose, end in (*ends, *(("a rank", end) for end in evidence.raised)):
        is_first = end.source.line < first.get(end.source.file, 0)
        before = ", before the first timeout" if is_first else ""
        if (peer := _PEER.search(end.what)) is not None:
            # Not always its end: `destroy_process_group` closes connections of a process that goes on.
            how = "a process there has closed it, at its end, or with its process group"
            yield Observation(f"{whose} lost the connection to {peer[1]}: {how}", end.source)
        elif end.is_cause and "out of memory" in end.what and (is_first or end.is_fatal):
            yield Observation(f"{whose} ran out of memory{before}", end.source)
        elif end.is_cause and end.is_fatal and is_first:
            yield Observation(f"{whose} raised {end.what[:200]}{before}", end.source)
    for exited in evidence.of("exited") if not any("ended by" in end.what for _, end in ends) else ():
        code, local, pid = exited.values
        what = f"on its host, the process of local rank {local} (pid {pid}) failed first, exit code {code}"
        yield Observation(what, exited.source)
    for killed in evidence.of("oom")[:1]:
        yield Observation("the kernel has killed a process for memory", killed.source)
