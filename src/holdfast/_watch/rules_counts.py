"""Rules whose evidence is the number of collectives that each rank has issued in each group.

Operations are joined by group and number. In a group, the smallest number that does not fit is the cause; all
later ones follow from it. A wait goes from a rank to the members of its group that have not come to the same
number; a cycle of such waits over several groups is found as one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holdfast._watch.evidence import UNKNOWN, Evidence, Operation, Progress
from holdfast._watch.verdict import Observation, Verdict, listed

_SAME_SIZE = {"ALLREDUCE", "BROADCAST", "ALLGATHERBASE", "REDUCESCATTERBASE"}
"""Operations whose sizes are the same on all ranks. Those of others may differ."""
_ALL_WAIT = {"ALLREDUCE", "ALLGATHER", "ALLGATHERBASE", "REDUCESCATTER", "REDUCESCATTERBASE", "ALLTOALL",
             "ALLTOALLBASE", "BARRIER"}  # fmt: skip
"""Operations that end nowhere before every rank has come."""
_PAIRED = ("SEND", "RECV", "COALESCED")
"""Operations of some of a group's ranks: others have other numbers."""
Kind = tuple[str, tuple[int, ...], str]
"""What must be the same on all ranks: the operation, its sizes and its types."""
Table = dict[str, dict[int, dict[int, Operation]]]
"""By group and number, the operation of each rank."""


def table_of(evidence: Evidence) -> Table:
    """Join the operations of all ranks by group and number."""
    table: Table = defaultdict(lambda: defaultdict(dict))
    groups = {one.group for _, one in evidence.operations() if one.group}
    alone = next(iter(groups)) if len(groups) == 1 else ""
    # Where a rank counts otherwise in its group, groups of some ranks are in use, and a rank 1 may be of any.
    in_parts = any(one.group_rank not in (None, rank) for rank, one in evidence.operations() if not one.group)
    for rank, one in evidence.operations():
        group = one.group
        if one.kind in _PAIRED or group.endswith("/p2p") or one.number == UNKNOWN:
            continue
        if group.startswith("PG ") and one.group_rank != rank:
            continue  # other groups of other ranks have the same local number
        if (
            not group
            and one.group_rank == rank
            and not in_parts
            and (not groups or alone.endswith(":default_pg"))
        ):
            # A line without a group, of a rank that counts in it as in the world.
            group = alone or "default_pg"
        if group:
            # The pending one counts, if there was another before.
            known = table[group][one.number].get(rank)
            if known is None or not known.is_pending:
                table[group][one.number][rank] = one
    return table


def mismatch(evidence: Evidence) -> Iterator[Verdict]:
    """Ranks have other operations, or other sizes, under one number."""
    for group, numbers in table_of(evidence).items():
        for number in sorted(numbers):
            ranks = numbers[number]
            # A log does not tell the types.
            typed = all(one.types for one in ranks.values())
            kinds = {rank: _kind(one, typed) for rank, one in ranks.items()}
            if len(set(kinds.values())) < 2:
                continue
            counted = Counter(kinds.values()).most_common()
            # Most of them, and all others alike: then these are the odd ones.
            clear = len(counted) == 2 and counted[0][1] > max(1, counted[1][1]) and len(ranks) > 2
            odd = tuple(sorted(rank for rank, kind in kinds.items() if kind != counted[0][0]))
            where = {ranks[rank].calls[:1] for rank in ranks}
            threads = _on_two_threads(evidence, group)
            yield Verdict(
                "cycle" if threads else "mismatch",
                "mismatch",
                f"under number {number} of group {group}, "
                + ", and ".join(_said(kinds, kind) for kind, _ in counted[:3]),
                odd if clear and not threads else None,
                waiting=tuple(sorted(ranks)),
                group=group,
                operation=ranks[min(ranks)].name,
                number=number,
                call=next(
                    (one.calls[0] for rank, one in sorted(ranks.items()) if one.calls and rank in odd), None
                ),
                seen=(*threads, *(observed(rank, ranks[rank]) for rank in sorted(ranks)[:16])),
                others=(
                    "These ranks are at different lines: perhaps a condition that they decide differently.",
                )
                if len(where) > 1
                else (),
            )
            break


def _on_two_threads(evidence: Evidence, group: str) -> tuple[Observation, ...]:
    """Return what shows that a rank has begun collectives of one group on two threads: nothing puts them in
    one order on all ranks."""
    for rank in evidence.ranks.values():
        pending = [one for one in rank.operations if one.group == group and one.is_pending and one.thread]
        if len({one.thread for one in pending}) > 1:
            return tuple(
                Observation(f"rank {rank.rank}, thread {one.thread}: {one.name} #{one.number}", one.source)
                for one in pending[:2]
            )
    return ()


def _kind(one: Operation, typed: bool = False) -> Kind:
    sizes = one.sizes if one.kind in _SAME_SIZE else ()
    return one.kind, sizes, one.types if typed else ""


def _said(kinds: dict[int, Kind], kind: Kind) -> str:
    ranks = {rank for rank, other in kinds.items() if other == kind}
    name, sizes, types = kind
    return " ".join(
        filter(
            None,
            (
                f"{listed(ranks)} issued {name}",
                f"of {' to '.join(map(str, sizes))} elements" if sizes else "",
                f"of {types}" if types else "",
            ),
        )
    )


def observed(rank: int, one: Operation) -> Observation:
    sizes = f" ({' to '.join(map(str, one.sizes))} elements)" if one.sizes else ""
    return Observation(f"rank {rank}: {one.name} #{one.number}{sizes} {one.state}", one.source)


def desynchronized(evidence: Evidence) -> Iterator[Verdict]:
    """A rank has timed out in an operation that another rank, of the same group, has left long ago."""
    farthest: dict[str, tuple[int, Progress]] = {}
    for rank in evidence.ranks.values():
        for progress in rank.progress:
            known = farthest.get(progress.group)
            if known is None or progress.completed > known[1].completed:
                farthest[progress.group] = rank.rank, progress
    for group, numbers in table_of(evidence).items():
        if group not in farthest:
            continue
        other, progress = farthest[group]
        for number in sorted(numbers):
            late = [rank for rank, one in numbers[number].items() if one.state == "timed out"]
            stuck = [rank for rank in late if rank != other]
            # Not the next number: a broken connection may let some ranks complete an operation.
            if stuck and progress.completed > number and numbers[number][stuck[0]].kind in _ALL_WAIT:
                one = numbers[number][stuck[0]]
                yield Verdict(
                    "mismatch",
                    "mismatch",
                    f"in group {group}, rank {stuck[0]} waits in number {number}, which rank {other} has "
                    "completed: their numbers stand for different calls, since before that number",
                    group=group,
                    operation=one.name,
                    number=number,
                    waiting=tuple(stuck),
                    seen=(
                        observed(stuck[0], one),
                        Observation(f"rank {other} has completed {progress.completed}", progress.source),
                    ),
                )
                return


# -- who waits for whom -------------------------------------------------------------------------------------


class Waits:
    """In which operation each rank waits, and for which ranks."""

    def __init__(self, evidence: Evidence) -> None:
        self.absent: dict[tuple[str, int], set[int]] = {}
        """Of each operation that ranks wait in, the members of its group that have not come to it."""
        self.operations: dict[int, Operation] = {}
        """The operation in which each rank waits for others: of several, the first."""
        self.at: dict[int, tuple[str, int]] = {}
        """Its group and number."""
        entered: dict[tuple[str, int], int] = {}
        counted = {rank for rank, _ in evidence.operations()}
        for seen in evidence.ranks.values():
            for progress in seen.progress:
                entered[progress.group, seen.rank] = progress.enqueued
            for one in seen.operations:
                key = one.group, seen.rank
                entered[key] = max(one.number, entered.get(key, 0))
        # Who has ended comes no more. Of others without any count, nothing is known.
        counted |= {rank.rank for rank in evidence.ranks.values() if rank.is_away}
        for group, numbers in table_of(evidence).items():
            # Without the list of members, the ranks that were seen in the group.
            known = {rank for ranks in numbers.values() for rank in ranks}
            members = set(evidence.members.get(group, known)) & counted
            for number, ranks in sorted(numbers.items()):
                absent = {rank for rank in members if entered.get((group, rank), 0) < number}
                for rank, one in ranks.items():
                    if one.is_pending and absent and rank not in self.at:
                        self.absent[group, number] = absent
                        self.at[rank], self.operations[rank] = (group, number), one

    def cycle(self) -> list[tuple[int, str, int]]:
        """Return a cycle of waits, as (rank, group, number), or nothing."""
        # Of the ranks that one waits for, one that waits itself is enough: all on the way do.
        onward = {key: min(absent & self.at.keys(), default=None) for key, absent in self.absent.items()}
        over: set[int] = set()
        for start in sorted(self.operations):
            way: list[int] = []
            rank: int | None = start
            while rank is not None and rank not in over and rank not in way:
                way.append(rank)
                rank = onward[self.at[rank]]
            if rank in way:
                return [(one, *self.at[one]) for one in way[way.index(rank) :]]
            over.update(way)
        return []

    def roots(self) -> set[int]:
        """Return the ranks that others wait for and that wait in no operation themselves."""
        return {rank for absent in self.absent.values() for rank in absent} - self.operations.keys()


def behind_a_stream(evidence: Evidence) -> Iterator[Verdict]:
    """A rank has issued a collective that all others have started, and has not started it: something is ahead
    of it on its GPU."""
    for group, numbers in table_of(evidence).items():
        for number, ranks in sorted(numbers.items()):
            # The log and the flight record may both tell of it, and only the record says whether it started.
            held = {
                rank
                for rank in ranks
                for one in evidence.ranks[rank].operations
                if (one.group, one.number, one.state) == (group, number, "scheduled")
            }
            started = {rank for rank, one in ranks.items() if one.state in ("started", "timed out")} - held
            for rank in held if started and len(held) < len(started) else ():
                ahead = [
                    one
                    for one in evidence.ranks[rank].operations
                    if one.group != group and one.state == "started"
                ]
                if ahead:
                    yield Verdict(
                        "cycle",
                        "counts",
                        f"rank {rank} has issued number {number} of group {group} and not started it: number "
                        f"{ahead[0].number} of group {ahead[0].group} is ahead of it",
                        (rank,),
                        waiting=tuple(sorted(started)),
                        group=group,
                        operation=ranks[rank].name,
                        number=number,
                        call=next(iter(ranks[rank].calls), None),
                        seen=(observed(rank, ranks[rank]), observed(rank, ahead[0])),
                    )
                    return


def alike(evidence: Evidence) -> Iterator[Verdict]:
    """Every rank of the group waits in the same operation."""
    table = table_of(evidence)
    pending = [
        (group, number, ranks)
        for group, numbers in table.items()
        for number, ranks in sorted(numbers.items())[:64]
        if all(one.is_pending for one in ranks.values())
    ]
    if not pending:
        return
    group, number, ranks = pending[0]
    everyone = set(evidence.members.get(group, ())) or set(range(evidence.world_size or 0))
    if set(ranks) != everyone or len(everyone) < 2 or any(other != group for other, _, _ in pending):
        return
    if len({_kind(one) for one in ranks.values()}) > 1 or len({one.state for one in ranks.values()}) > 1:
        return
    first = ranks[min(ranks)]
    yield Verdict(
        "alike",
        "counts",
        f"all {len(ranks)} ranks of group {group} wait in {first.name} number {number}",
        (),
        waiting=tuple(sorted(ranks)),
        group=group,
        operation=first.name,
        number=number,
        call=next(iter(first.calls), None),
        seen=tuple(observed(rank, ranks[rank]) for rank in sorted(ranks)[:8]),
    )


def absent(evidence: Evidence) -> Iterator[Verdict]:
    """Ranks are not in the operation that the others wait in. Only their stacks tell why."""
    waits = Waits(evidence)
    roots = waits.roots()
    if roots and not waits.cycle():
        rank = min(rank for rank, key in waits.at.items() if roots & waits.absent[key])
        one = waits.operations[rank]
        yield Verdict(
            "late",
            "absence",
            f"{listed(roots)} did not come to number {one.number} of group {one.group}",
            tuple(sorted(roots)),
            waiting=tuple(sorted(waits.operations)),
            group=one.group,
            operation=one.name,
            number=one.number,
            call=next(iter(one.calls), None),
            seen=(observed(rank, one),),
            others=("Late, stuck or on another path: the stacks of these ranks tell, taken twice.",),
        )


RULES = (mismatch, desynchronized, behind_a_stream, alike, absent)
