"""Derives which ranks wait for which from the sequence numbers of collectives in each group.

Operations are joined by group and sequence number. A thread waits in an operation if that is pending and a
member of its group has not reached it. If stacks are known, the thread that issued the operation must also be
blocked: an asynchronous operation may be pending while its rank is elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from holdfast._watch.evidence import ROLL_CALL, UNKNOWN, Evidence, GroupOperation, Rank, Stack
from holdfast._watch.names import OF_SOME, WAITS_FOR_ALL
from holdfast._watch.positions import (
    is_held,
    joined,
    may_be_at_its_gpu,
    may_wait_for_a_handle,
    may_wait_in,
    position_among,
    position_of,
    rests_in_c,
    waits_for_its_handle,
)

Table = dict[str, dict[int, dict[int, GroupOperation]]]
"""The operations by group, sequence number and rank."""
Thread = tuple[int, str]
"""A rank, and the ID of one of its threads; "" is the main thread."""


def table_of(evidence: Evidence) -> Table:
    """Join the operations of all ranks by group and number."""
    table: Table = defaultdict(lambda: defaultdict(dict))
    groups = {one.group for _, one in evidence.operations() if one.group}
    alone = next(iter(groups)) if len(groups) == 1 else ""
    # If a rank differs from its rank in the group, there are subgroups, and a group rank 1 is ambiguous.
    in_parts = any(one.group_rank not in (None, rank) for rank, one in evidence.operations() if not one.group)
    of_all = (alone or "default_pg") if not groups or alone.endswith(":default_pg") else ""
    for rank, one in evidence.operations():
        # `PG <n>` is a local number: different groups have it on different ranks.
        is_local = one.group.startswith("PG ") and one.group_rank != rank
        if one.kind in OF_SOME or one.group.endswith("/p2p") or one.number == UNKNOWN or is_local:
            continue
        # A line without a group, whose rank in the group equals the global rank: the default group.
        group = one.group or (of_all if one.group_rank == rank and not in_parts else "")
        if group:
            # Of several, a pending one takes precedence.
            known = table[group][one.number].get(rank)
            if known is None or not known.is_pending:
                table[group][one.number][rank] = one
    return table


class Wait(NamedTuple):
    """A thread that waits in an operation for ranks that have not reached it."""

    thread: Thread
    group: str
    operation: GroupOperation
    absent: frozenset[int]
    is_sure: bool = True
    """False: the thread is idle at a line of the program, which may be `work.wait()` or another call."""
    is_likely: bool = True
    """False: it is known to be another call, such as of a lock. In one of `time.sleep` it may still ask for
    the end of the operation now and then."""

    @property
    def rank(self) -> int:
        return self.thread[0]

    @property
    def place(self) -> str:
        """The operation, and the group in which it is."""
        group = f" of group {self.group}" if self.group and not self.operation.is_ours else ""
        return f"{self.operation.label}{group}"

    @property
    def key(self) -> tuple[str, int]:
        """The operation's group and number: equal for all threads that wait in it."""
        own = -2 - self.rank  # a message has no sequence number common to its two ranks
        return self.group, own if self.operation.number == UNKNOWN else self.operation.number


class Waits:
    """All waits, derived from sequence numbers, and for unrecorded operations from stacks."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.of: dict[Thread, Wait] = {}
        """The first wait of each thread."""
        self.whole: list[tuple[str, int, dict[int, GroupOperation]]] = []
        """Pending operations that every member has reached: group, number, and each rank's operation."""
        self._next: dict[tuple[str, int], list[Thread]] = {}
        self._entered = {(one.group, rank): one.enqueued for rank, one in evidence.progress()}
        # A rank counts as absent only if its progress is known: it has operations or an end, or has answered
        # a roll call by itself, so that its flight record was read and may be empty.
        answered = {rank for rank, stack in evidence.shown().items() if stack.ident}
        told = (*evidence.operations(), *evidence.progress(), *evidence.endings())
        self.counted = answered | {rank for rank, _ in told}
        self._held = {rank.rank for rank in evidence.ranks.values() if rank.state}
        self.table = table_of(evidence)
        for group, numbers in self.table.items():
            for number, ranks in numbers.items():
                for rank in ranks:
                    self._entered[group, rank] = max(number, self._entered.get((group, rank), 0))
        self._outdated = dict(self._find_outdated())
        for group, numbers in self.table.items():
            # If the members are unknown, use the ranks with operations in the group.
            seen_in_it = {rank for ranks in numbers.values() for rank in ranks}
            members = set(evidence.members.get(group, seen_in_it)) & self.counted
            for number, ranks in sorted(numbers.items()):
                self._note(group, number, ranks, members)
        self._opens = {
            rank: (stack.names["group_name"], stack.names.get("members", ""))
            for rank, stack in evidence.shown().items()
            if "group_name" in stack.names
        }
        for rank in evidence.shown():
            self._note_unrecorded(evidence.ranks[rank])
            self._note_joined(evidence.ranks[rank])

    def _find_outdated(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Yield (group, rank), and a number: the rank answered a roll call from an operation of this number,
        and another one, which answered later, from one after it. Then the first has completed since on every
        rank, and the answer says nothing of later operations.

        Flight records are not written at one moment either. But a rank may hang in an operation that others
        have completed, and a record has it for longer than ranks differ in writing it.
        """
        for group, numbers in self.table.items():
            first: dict[int, int] = {}
            """The first operation that is pending, by rank."""
            for number, ranks in sorted(numbers.items()):
                for rank, one in ranks.items():
                    if one.is_pending and one.source == ROLL_CALL:
                        first.setdefault(rank, number)
            newest = max(first.values(), default=0)
            for rank, number in first.items():
                if number < newest and numbers[number][rank].kind in WAITS_FOR_ALL:
                    yield (group, rank), number

    def _note(self, group: str, number: int, ranks: dict[int, GroupOperation], members: set[int]) -> None:
        pending = {rank: one for rank, one in ranks.items() if one.is_pending}
        absent = frozenset(
            rank
            for rank in members
            if self._entered.get((group, rank), 0) < number and (group, rank) not in self._outdated
        )
        everyone = set(self._evidence.members.get(group, ())) or set(range(self._evidence.world_size or 0))
        unheard = set(self._evidence.members.get(group, ())) - self.counted
        called = any(one.source == ROLL_CALL for one in pending.values())
        # Of a rank that is known to be stopped, it makes no difference how many are.
        few = 0 < 2 * len(unheard) < len(everyone) or unheard <= self._held
        if called and unheard and pending.keys() == everyone - unheard and few:
            # All others are in it, and these have not answered: had they come, it would have completed.
            absent = frozenset(unheard)
        if pending and not absent and set(pending) == everyone and len(everyone) > 1:
            self.whole.append((group, number, pending))
        for rank, one in pending.items() if absent else ():
            if self._outdated.get((group, rank)) == number:
                continue
            found = self._blocked_thread(self._evidence.ranks[rank], one)
            if found is not None:
                thread = rank, found[0]
                self.of.setdefault(thread, Wait(thread, group, one, absent, *found[1:]))

    def _note_unrecorded(self, seen: Rank) -> None:
        """Add waits that no flight record has: messages over gloo, and groups being created."""
        position = position_among(seen.stacks)
        thread, names = (seen.rank, _name(seen, position.stack)), position.stack.names
        if thread in self.of or not is_held(seen, position):
            return
        group, name, absent = "", "", set[int]()
        way = _way(position.stack)
        if way and names.get("peer", "").isdecimal():
            if self._is_met(seen.rank, way, names):
                return  # it is on its way, which may take long
            tag = f" under tag {names['tag']}" if names.get("tag", "0") != "0" else ""
            name, absent = f"{way} with rank {names['peer']}{tag}", {int(names["peer"])}
        elif seen.rank in self._opens and names.get("members"):
            # Absent: members that are creating another group. Other members may have created this one.
            name, group = "opening", names["group_name"]
            members = set(map(int, names["members"].split(",")))
            own = self._opens[seen.rank]
            absent = {rank for rank in members & self._opens.keys() if self._opens[rank] != own}
        if absent:
            operation = GroupOperation(group, UNKNOWN, name, "started", position.stack.source)
            self.of[thread] = Wait(thread, group, operation, frozenset(absent))

    def _note_joined(self, seen: Rank) -> None:
        """Add the waits of threads that wait for a thread that waits."""
        for stack in seen.stacks:
            thread, end = (seen.rank, _name(seen, stack)), joined(seen.stacks, stack)
            wait = self.of.get((seen.rank, _name(seen, end)))
            if end is not stack and wait is not None and thread not in self.of:
                self.of[thread] = wait._replace(thread=thread)

    def _is_met(self, rank: int, way: str, names: dict[str, str]) -> bool:
        """Return whether a thread of the peer is in the other end of a message."""
        peer = self._evidence.ranks.get(int(names["peer"]))
        for stack in peer.stacks if peer is not None else ():
            same = all(names.get(what) == stack.names.get(what) for what in ("tag", "of"))
            if same and stack.names.get("peer") == str(rank) and {way, _way(stack)} == {"send", "recv"}:
                return True
        return False

    def _blocked_thread(self, rank: Rank, one: GroupOperation) -> tuple[str, bool, bool] | None:
        """Return the thread that is blocked in an operation, and whether that is certain, and likely; None if
        no thread waits for the operation."""
        if not rank.stacks:
            return "", True, True
        issued = next((stack for stack in rank.stacks if one.thread and stack.ident == one.thread), None)
        if issued is not None and may_wait_for_a_handle(other := joined(rank.stacks, issued)):
            issued = other  # which has been given the handle
        position = position_of(issued) if issued is not None else position_among(rank.stacks)
        name = _name(rank, position.stack)
        if is_held(rank, position):
            if not may_wait_in(rank, position, one):
                return None
            is_sure = not waits_for_its_handle(position.stack) or _is_only(rank, one, position.stack)
            return name, is_sure, True
        if issued is not None:
            is_likely = may_wait_for_a_handle(position.stack)
            return (name, False, is_likely) if rests_in_c(rank, position) else None
        # A wait for a GPU, as in `.item()`, shows as a line of the program.
        at_its_gpu = one.backend != "gloo" and not one.thread and may_be_at_its_gpu(rank, position)
        return ("", True, True) if at_its_gpu else None

    def next(self, wait: Wait) -> list[Thread]:
        """Return the threads that an operation waits for: on each absent rank, the thread that has issued
        operations of this group before, or the main thread."""
        if wait.key not in self._next:
            self._next[wait.key] = [
                (rank, self._thread_for(rank, wait.group)) for rank in sorted(wait.absent)
            ]
        return self._next[wait.key]

    def _thread_for(self, rank: int, group: str) -> str:
        seen = self._evidence.ranks.get(rank)
        if seen is None:
            return ""
        issued = {one.thread for one in seen.operations if one.group == group}
        return next((_name(seen, stack) for stack in seen.stacks if stack.ident in issued - {""}), "")

    def roots(self) -> set[Thread]:
        """Return the threads that others wait for and that don't wait in an operation themselves; if there
        are none, those whose own wait is uncertain."""
        for waits in (
            self.likely(),
            self.of,
            {thread: one for thread, one in self.of.items() if one.is_sure},
        ):
            if roots := {thread for wait in waits.values() for thread in self.next(wait)} - waits.keys():
                return roots
        return set()

    def likely(self) -> dict[Thread, Wait]:
        """Return the waits that are at least likely."""
        return {thread: wait for thread, wait in self.of.items() if wait.is_likely}

    def cycle(self) -> list[Wait]:
        """Return a cycle of waits: each waits for the next, and the last for the first; empty if none."""
        over = {thread for thread, wait in self.of.items() if not wait.is_sure}
        for start in sorted(self.of):
            way: list[Thread] = []
            thread: Thread | None = start
            while thread is not None and thread not in over and thread not in way:
                way.append(thread)
                # Following one waiting thread is enough: every thread on the way waits.
                thread = next((one for one in self.next(self.of[thread]) if one in self.of), None)
            if thread in way:
                return [self.of[one] for one in way[way.index(thread) :]]
            over.update(way)
        return []


def _is_only(rank: Rank, one: GroupOperation, stack: Stack) -> bool:
    """Return whether the handle for which a thread waits can only be that of this operation."""
    kind = stack.names.get("handle")
    return [other for other in rank.operations if other.is_pending and other.kind == kind] == [one]


def _way(stack: Stack) -> str:
    """Return `send` or `recv` of a thread that is in torch's, or "". A program has its own functions of these
    names, such as around a broadcast."""
    torchs = (call.function for call in stack.calls if call.file.endswith("distributed_c10d.py"))
    return next((function for function in torchs if function in ("send", "recv")), "")


def _name(rank: Rank, stack: Stack) -> str:
    """Return the ID of a thread for `Thread`."""
    return "" if stack is rank.stacks[0] else stack.ident or stack.thread
