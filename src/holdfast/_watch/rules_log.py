"""Rules whose evidence is the order of lines in a log, or a line that is known by itself."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast._watch.evidence import Ending, Evidence, Remark
from holdfast._watch.verdict import Observation, Verdict, listed


def died(evidence: Evidence) -> Iterator[Verdict]:
    """A rank raised an error of its own, or was ended, before anybody's timeout, and had none itself."""
    first_timeout = _first_timeouts(evidence)
    found: list[tuple[int, Ending]] = []
    for rank in evidence.ranks.values():
        for ending in rank.endings:
            last = (
                rank.last is None
                or rank.last.line <= ending.source.line
                or ending.source.file != rank.last.file
            )
            known = ending.is_cause and (ending.is_fatal or last) and not ending.is_clean
            before = ending.source.line <= first_timeout.get(ending.source.file, ending.source.line)
            if known and before and not rank.timeouts:
                found.append((rank.rank, ending))
    if found:
        # What the first one raised counts; other errors of other ranks mostly follow from it.
        found.sort(key=lambda one: one[1].source.line)
        kind = found[0][1].what.partition(":")[0]
        same = {rank: ending for rank, ending in reversed(found) if ending.what.partition(":")[0] == kind}
        yield Verdict(
            "died",
            "order",
            f"{listed(set(same))} ended: {found[0][1].what}",
            tuple(sorted(same)),
            waiting=tuple(rank.rank for rank in evidence.ranks.values() if rank.timeouts),
            call=found[0][1].call,
            seen=tuple(
                Observation(f"rank {rank}: {one.what}", one.source) for rank, one in sorted(same.items())
            ),
        )
    else:
        for one in evidence.raised:
            if one.is_cause and one.source.line <= first_timeout.get(one.source.file, one.source.line):
                yield Verdict(
                    "died",
                    "absence",
                    f"a rank that isn't known raised {one.what}",
                    call=one.call,
                    seen=(Observation(one.what, one.source),),
                    others=("The error may have been caught. Logs of single ranks tell whose it is.",),
                )
                return


def _first_timeouts(evidence: Evidence) -> dict[str, int]:
    """Return the line of each file's first timeout."""
    found: dict[str, int] = {}
    timeouts = [operation for rank in evidence.ranks.values() for operation in rank.timeouts]
    for operation in (*timeouts, *evidence.loose):
        file, line = operation.source
        found[file] = min(line, found.get(file, line))
    return found


def fingerprints(evidence: Evidence) -> Iterator[Verdict]:
    """torch itself (TORCH_DISTRIBUTED_DEBUG=DETAIL) has compared the calls of two ranks."""
    for remark in evidence.of("fingerprint")[:1]:
        rank, number, name, shape, other, other_number, other_name, other_shape = remark.values
        yield Verdict(
            "mismatch",
            "mismatch",
            f"rank {rank} calls {name} of [{shape}] as number {number or '?'}, and rank {other} {other_name} "
            f"of [{other_shape}] as number {other_number or '?'}",
            operation=name,
            number=int(number) if number else None,
            seen=(_seen(remark),),
            others=("Of two ranks that differ, neither is known to be the wrong one.",),
        )


def nccl_mismatch(evidence: Evidence) -> Iterator[Verdict]:
    """NCCL has received another size than it expects. One line, several causes."""
    for remark in evidence.of("nccl mismatch")[:1]:
        host, peer, local, remote = remark.values
        yield Verdict(
            "mismatch",
            "mismatch",
            f"{host} expects {local} bytes, and {peer} sends {remote}",
            seen=(_seen(remark),),
            others=(
                "Other NCCL_* variables on the two hosts: compare `holdfast doctor --pid` of both.",
                "Other versions of NCCL on the two hosts: compare the lines `NCCL version`.",
                "Ranks that issue other collectives: compare flight records.",
            ),
        )


def uneven_data(evidence: Evidence) -> Iterator[Verdict]:
    """Ranks with more batches have no timeout, and those that wait have fewer."""
    steps = {rank.rank: rank.steps for rank in evidence.ranks.values() if rank.steps is not None}
    waiting = {rank.rank for rank in evidence.ranks.values() if rank.timeouts}
    waiting |= {one.group_rank for one in evidence.loose if one.group_rank is not None}
    if len(steps) < 3 or not waiting:
        return
    most, least = max(steps.values()), min(steps.values())
    done = {rank for rank, count in steps.items() if count == most}
    # Bars are not drawn at every step: small differences mean nothing.
    if most - least > max(2, most // 10) and not done & waiting:
        yield Verdict(
            "data",
            "counts",
            f"{listed(done)} came to {most} batches and wait for nobody; others came to {least}",
            waiting=tuple(sorted(waiting)),
            seen=tuple(
                Observation(f"rank {rank}: {count} batches", evidence.ranks[rank].last)
                for rank, count in sorted(steps.items())
            ),
        )


def zero3_order(evidence: Evidence) -> Iterator[Verdict]:
    """ZeRO-3 gathers parameters in the order of modules, which has changed just before the timeout."""
    remarks = evidence.of("trace cache")
    gathers = [
        one
        for one in (*evidence.loose, *(one for rank in evidence.ranks.values() for one in rank.timeouts))
        if one.kind in ("ALLGATHERBASE", "ALLGATHER", "REDUCESCATTERBASE")
    ]
    if remarks and gathers:
        yield Verdict(
            "branch",
            # Healthy jobs write it at every step, if their modules change all the time.
            "signature" if len(remarks) == 1 else "absence",
            "DeepSpeed ZeRO-3 met other modules than in the step before; a rank that skips a module gathers "
            "none of its parameters",
            operation=gathers[0].name,
            number=gathers[0].number,
            seen=(_seen(remarks[-1]), Observation(f"timeout of {gathers[0].name}", gathers[0].source)),
            others=(
                "Make modules that not every rank enters leaf modules (deepspeed.utils.set_z3_leaf_modules).",
            ),
        )


def monitored(evidence: Evidence) -> Iterator[Verdict]:
    """A monitoredBarrier of torch has told who did not come: all of them, or the first one."""
    told = max(evidence.of("barrier"), key=lambda one: len(one.values[0]), default=None)
    if told is not None:
        ranks = tuple(map(int, told.values[0].split(",")))
        yield Verdict(
            "late",
            "absence",
            f"{listed(ranks)} did not come to a monitoredBarrier",
            ranks,
            seen=(_seen(told),),
            others=("Late, stuck or on another path: the stacks of these ranks tell, taken twice.",),
        )


def closing(evidence: Evidence) -> Iterator[Verdict]:
    """A watchdog is stuck after the end of the program, and no collective has timed out."""
    stuck = evidence.of("heartbeat")
    if not stuck or _first_timeouts(evidence):
        return
    ends = [*evidence.of("end of program"), *evidence.of("not destroyed")]
    before = [
        end
        for end in ends
        if end.source.file == stuck[0].source.file and end.source.line < stuck[0].source.line
    ]
    groups = sorted({remark.values[0] for remark in stuck})
    yield Verdict(
        "lifecycle",
        "order" if before else "absence",
        "the program has ended, and groups are torn down in no order" if before else "a watchdog is stuck",
        () if before else None,
        group=", ".join(groups[:3]),
        seen=tuple(map(_seen, [*before[:1], *stuck[:2]])),
        others=()
        if before
        else (
            "The end of the program: does a line of it stand before? After the training it may still save.",
            "A thread that holds the GIL in a call of CUDA: py-spy dump --native shows it.",
        ),
    )


def opening(evidence: Evidence) -> Iterator[Verdict]:
    """A communicator began to open, and not all of its ranks have come through."""
    for one in evidence.opening:
        missing = one.begun.keys() - set(one.ready)
        source = next(iter(one.begun.values()))
        failed = [remark for remark in evidence.of("nccl memory") if remark.source.line >= source.line]
        known = {int(remark.values[0]) for remark in failed if remark.values[0]}
        # Who waits in a collective later has come through: that line of NCCL is lost, or was left out.
        some_ready = len(missing) < len(one.begun) and not evidence.hidden and not _first_timeouts(evidence)
        guilty = known or (missing if some_ready else None)
        yield Verdict(
            "lifecycle",
            "order" if failed else "counts" if some_ready else "absence",
            f"communicator {one.name} of {one.size} ranks does not open on {listed(missing)}"
            + (f": {listed(known)} could not allocate memory" if known else ""),
            None if guilty is None else tuple(sorted(guilty)),
            seen=(Observation(f"Init START on {listed(set(one.begun))}", source), *map(_seen, failed[:1])),
        )
        return


def ras(evidence: Evidence) -> Iterator[Verdict]:
    """NCCL's own view of the job: ranks that lag, or do not answer. It counts ranks in the communicator."""
    kinds = {"MISMATCH": "late", "INCOMPLETE": "unreachable", "DEAD": "unreachable"}
    for remark in evidence.of("ras"):
        if remark.values[0] in kinds:
            yield Verdict(
                kinds[remark.values[0]],
                "absence",
                remark.text[:200],
                seen=(_seen(remark),),
                others=("A job that is at work shows the same for a moment: ask ncclras again.",),
            )


def _seen(remark: Remark) -> Observation:
    return Observation(remark.text[:200], remark.source)


RULES = (died, fingerprints, nccl_mismatch, uneven_data, monitored, closing, opening, zero3_order, ras)
