"""`warm_up`: the first collective of every process group, at a time of the user's choosing, under a deadline.

NCCL makes a communicator at a group's first collective. That takes memory, half a GB or more, and it waits
for every rank of the group; nothing bounds this wait, and the watchdog does not see it. In Megatron some
groups are first used in the first optimizer step, when memory is full and ranks are apart. So: ask over the
roster who is here and what it has, then the smallest collective of each kind that a group is used for, in
rounds of groups that have no rank in common, and watch from outside of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast import events
from holdfast.deadline import check_seconds
from holdfast.errors import BadInput, DeadlineExceeded, GroupsFailed, HoldfastError, RankFailed, first_line
from holdfast.groups.audit.doctor import serve
from holdfast.groups.lifecycle.claims import agreed, claim, label, listed
from holdfast.groups.lifecycle.collectives import NotSupported, issue, usable_devices
from holdfast.groups.lifecycle.device import Device, MiB
from holdfast.groups.lifecycle.open import Groups
from holdfast.groups.lifecycle.plan import rounds
from holdfast.groups.lifecycle.report import IssuedOperation, WarmedGroup, WarmUpReport
from holdfast.groups.lifecycle.state import facts, opened, warm
from holdfast.groups.lifecycle.uses import OPERATIONS, uses
from holdfast.protocol.call import Call, begin_call
from holdfast.protocol.task import CollectiveTask
from holdfast.roster.base import Roster
from holdfast.roster.presence import describe
from holdfast.torch_private import Known, is_open, known_groups
from holdfast.values import Message

DYING = 1.0
"""Seconds that a process takes to end, at most, after its connections have broken."""


class _WarmUp(CollectiveTask):
    def __init__(
        self,
        groups: list[Known],
        operations: tuple[str, ...] | None,
        budget: int | None,
        call: Call,
    ) -> None:
        super().__init__("warm-up of process groups", "groups://warm-up", call)
        self._groups = {known.name: known for known in groups}
        self._operations, self._budget = operations, budget
        self._device = Device()
        self._position = 0
        self._everyone: dict[str, tuple[str, list[int]]] = {}
        """Committer: description and ranks of every group."""
        self._order: dict[int, list[str]] = {}
        self._round: dict[str, int] = {}
        self.warmed: list[WarmedGroup] = []
        self.rounds = self.groups_in_world = 0

    def contribute(self) -> Message:
        rank, there = self.roster.rank, known_groups()
        uses_here = uses(
            {
                known.name: (known.description, *opened.get(known.group, ()))
                for known in there
                if len(known.ranks) > 1
            }
        )
        return {
            "operations": self._operations and list(self._operations),
            "uses": {  # as the lowest rank of a group sees it, lest its ranks do different things
                name: uses_here[name] for name, known in self._groups.items() if rank == min(known.ranks)
            },
            "budget": self._budget,
            "free": self._device.free(),
            # Of all groups: an error can then tell a group that was not given here from one that was not
            # made.
            "has": [known.name for known in there],
            "groups": [
                claim(known.name, known.ranks, known.description, rank) for known in self._groups.values()
            ],
        }

    def decide(self, said: dict[int, Message]) -> dict[int, Message]:
        self._everyone = agreed(said)
        used: dict[str, Sequence[str]] = {}
        asked = said[self.roster.rank]["operations"]
        for rank, message in sorted(said.items()):
            used.update(message["uses"])
            # Ranks with different operations would wait for each other in them until the deadline.
            if message["operations"] != asked:
                raise BadInput(
                    f"Rank {rank} warms up with {message['operations'] or 'the default operations'}, rank "
                    f"{self.roster.rank} with {asked or 'the default operations'}.",
                    rank=rank,
                )
            budget, free = message["budget"], message["free"]
            if budget is not None and free is not None and free < budget:
                raise GroupsFailed(
                    f"Rank {rank} has {free / MiB:,.0f} MiB of GPU memory free, and {len(message['groups'])} "
                    f"groups may take "
                    f"{budget / MiB:,.0f} MiB (memory_budget); nothing was warmed up.",
                    rank=rank,
                    hint="Warm up before the model is built, or lower the budget.",
                )
        names = list(self._everyone)
        numbers = rounds([np.array(self._everyone[name][1], np.int64) for name in names])
        of = self._round = dict(zip(names, numbers, strict=True))
        total = {"rounds": max(numbers, default=-1) + 1, "groups": len(names)}
        for rank, message in said.items():
            # By ascending round, so that ranks never wait for each other in a circle (`plan.rounds`).
            self._order[rank] = sorted((name for name, *_ in message["groups"]), key=of.__getitem__)
        return {
            rank: {
                "order": order,
                "at": [of[name] for name in order],
                "operations": [asked or used[name] for name in order],
                **total,
            }
            for rank, order in self._order.items()
        }

    def execute(self, answer: Message) -> Message:
        self._device.use()
        self.rounds, self.groups_in_world = answer["rounds"], answer["groups"]
        order = list(zip(answer["order"], answer["at"], answer["operations"], strict=True))
        for position, (name, number, operations) in enumerate(order):
            # The beat carries it (`now`), so the committer can say who has not come to which group.
            self._position = position
            where = f"{position + 1} of {len(order)}"
            self.warmed.append(self._warm_one(self._groups[name], number, operations, where))
        self._position = len(order)
        self.doing("warmed up all its groups")
        return {}

    def _warm_one(self, known: Known, number: int, operations: Sequence[str], where: str) -> WarmedGroup:
        begun = time.perf_counter()
        # gloo's groups do not tell whether they are open, so Holdfast remembers what it has warmed up.
        was_warm = bool(is_open(known.group)) or known.group in warm
        places = usable_devices(known.group)
        if not places:
            raise GroupsFailed(
                f"{label(known.name, known.description, known.ranks)} has the backend "
                f"{dist.get_backend_config(known.group)}, "
                "for which no tensor can be made here; it was not warmed up.",
                hint="Give groups= without it.",
            )
        issued: list[IssuedOperation] = []
        left_out: list[str] = []
        for operation in operations:
            self.doing(f"in {label(known.name, known.description, known.ranks)}, {where}, with {operation}")
            found = self._issue(operation, known, places)
            if found is None:
                left_out.append(operation)
                continue
            issued.append(found)
            # After each operation, so that the error names the group that went beyond the budget.
            self._check_budget(known, sum(one.bytes_taken for one in issued))
        if issued:
            warm.add(known.group)
        warmed = WarmedGroup(
            known.name,
            known.description,
            known.ranks,
            number,
            time.perf_counter() - begun,
            sum(one.bytes_taken for one in issued),
            was_warm,
            tuple(issued),
            tuple(left_out),
        )
        fields = msgspec.structs.asdict(warmed)
        fields["operations"] = {one.operation: one.seconds for one in issued}
        events.emit("groups.warmed", rank=self.roster.rank, group=fields.pop("name"), **fields)
        return warmed

    def _issue(self, operation: str, known: Known, places: Sequence[torch.device]) -> IssuedOperation | None:
        """Issue one operation; None if the backend does not have it, and nobody asked for it."""
        before, begun = self._device.free(), time.perf_counter()
        try:
            for device in places:
                issue(operation, known, device)
            self._device.settle()
        except NotSupported as error:
            # All ranks of a group have the same backend, so all of them leave the operation out.
            if self._operations is None:
                return None
            raise GroupsFailed(
                f"{label(known.name, known.description, known.ranks)} has the backend "
                f"{dist.get_backend_config(known.group)}, which has no {operation}.",
                hint="Leave operations= out: then each group is warmed up as far as its backend can.",
            ) from error
        except Exception as error:
            free = self._device.free()
            left = "" if free is None else f"; {free / MiB:,.0f} MiB of GPU memory are free"
            raise GroupsFailed(
                f"The first {operation} of {label(known.name, known.description, known.ranks)} met "
                f"{type(error).__name__}: "
                f"{first_line(error)}{left}",
                details={"group": known.name},
            ) from error
        after = self._device.free()
        taken = 0 if before is None or after is None else max(before - after, 0)
        return IssuedOperation(operation, time.perf_counter() - begun, taken)

    def _check_budget(self, known: Known, taken: int) -> None:
        """Raise if the groups that are warm, and what one more has taken so far, are more than was
        allowed."""
        total = taken + sum(group.bytes_taken for group in self.warmed)
        if self._budget is not None and total > self._budget:
            raise GroupsFailed(
                f"{len(self.warmed) + 1} groups took {total / MiB:,.0f} MiB of GPU memory, more than "
                f"memory_budget "
                f"({self._budget / MiB:,.0f} MiB); the last was "
                f"{label(known.name, known.description, known.ranks)} with "
                f"{taken / MiB:,.0f} MiB.",
                hint="Open fewer groups, or set NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS lower.",
            )

    def now(self) -> Message:
        return {"position": self._position, "free": self._device.free()}

    def better(self, error: HoldfastError) -> HoldfastError | None:
        if isinstance(error, GroupsFailed) and "group" in error.details:
            return self._somebody_gone(error)
        # Only the committer knows the order of all ranks. The others raise the error that it makes.
        if isinstance(error, DeadlineExceeded) and self._order:
            return self._who_did_not_come(error)
        return None

    def _somebody_gone(self, error: GroupsFailed) -> HoldfastError | None:
        """A collective that breaks because another rank has died is not this rank's failure."""
        known = self._groups[error.details["group"]]
        # A bounded question, however large the group.
        said = self.presences(rank for rank in known.ranks[:1024] if rank != self.roster.rank)
        # A process that dies closes its connections first, and is seen to be gone a moment later.
        # Out of memory is this rank's own failure, so there is nobody to wait for.
        patience = 0.0 if isinstance(error.__cause__, torch.OutOfMemoryError) else DYING
        ends = time.monotonic() + patience
        while True:
            gone = [
                describe(rank, message, time.time(), "its process has ended")
                for rank, message in said.items()
                if self.is_gone(message)
            ]
            if gone:
                break
            if time.monotonic() >= ends:
                return None
            time.sleep(0.02)
        return RankFailed(
            f"The warm-up of process groups failed in {label(known.name, known.description, known.ranks)}: "
            f"{gone[0]}.",
            rank=gone[0].rank,
            missing=tuple(gone),
        )

    def _who_did_not_come(self, error: DeadlineExceeded) -> HoldfastError | None:
        """Of the group in the earliest round that is not through: who arrived, and who did not."""
        said = self.presences(self.operation.context.participants)
        at = {rank: int(message.get("position", 0)) for rank, message in said.items()}
        at[self.roster.rank] = self._position
        stuck = []
        for name, (description, ranks) in self._everyone.items():
            # Below 0 the rank has not come to the group, at 0 it is in it, above 0 it is through.
            place = {rank: at.get(rank, -1) - self._order[rank].index(name) for rank in ranks}
            absent = [rank for rank in ranks if place[rank] < 0]
            if len(absent) < len(ranks) and any(here <= 0 for here in place.values()):
                stuck.append((self._round[name], not absent, name, description, ranks, absent))
        # The earliest round, and in it first a group that a rank has not come to: later rounds wait for it.
        for _, _, name, description, ranks, absent in sorted(stuck)[:1]:
            arrived = [rank for rank in ranks if rank not in absent]
            culprits = absent or arrived
            infos = tuple(
                describe(rank, said.get(rank), time.time(), "", self.operation.context.key)
                for rank in culprits[:8]
            )
            free = said.get(culprits[0], {}).get("free") if culprits else None
            memory = "" if free is None else f", with {free / MiB:,.0f} MiB of GPU memory free"
            where = (
                f"{listed(arrived)} arrived, {listed(absent)} did not: {'; '.join(map(str, infos))}{memory}"
                if absent
                else f"all its ranks arrived, and its collective did not end{memory}: "
                f"{'; '.join(map(str, infos))}"
            )
            return DeadlineExceeded(
                f"The warm-up of process groups failed after {self.operation.seconds():.1f} s in "
                f"{label(name, description, ranks)}: {where}.",
                rank=culprits[0] if len(culprits) == 1 else None,
                missing=infos or error.missing,
                hint="A stack of that rank (py-spy dump --pid) shows more.",
            )
        return None


def chosen_operations(operations: Sequence[str] | None) -> tuple[str, ...] | None:
    """The operations that `warm_up` is asked for, None for the default. Raises `BadInput` for others."""
    if operations is None:
        return None
    is_list = isinstance(operations, Iterable) and not isinstance(operations, str)
    given = tuple(operations) if is_list else ()
    if not given or any(name not in OPERATIONS for name in given):
        raise BadInput(f"operations={given or operations!r} must be some of {OPERATIONS}, or None.")
    return given


def warm_up(
    groups: Groups | Iterable[dist.ProcessGroup] | str = "all",
    *,
    operations: Sequence[str] | None = None,
    timeout: float = 300.0,
    stall_timeout: float = 60.0,
    memory_budget: int | None = None,
    roster: Roster | None = None,
) -> WarmUpReport:
    """Issue the first collective of process groups, on all ranks of the world, so that each has its
    communicator.

    groups: "all" of more than one rank that torch knows, whoever made them (Megatron's `parallel_state`, a
        DeviceMesh), those of `open_groups`, or a list of groups, the same groups on all ranks that are in
        them.
    operations: what is issued on every group: some of "all_reduce"; "all_to_all"; and "pairs", send and
        receive between neighbours of the group, the last and the first included, in a batch and one by one,
        for which NCCL makes a communicator of two ranks each. Default: what each group is used for in
        Megatron. All have all_reduce; the groups of experts (EP, and expert TP with EP) also all_to_all;
        those of pipelines also pairs. These are known by their names in `open_groups`, by the descriptions of
        `parallel_state`, and by the dimensions "ep" and "pp" of a DeviceMesh. What a backend does not have is
        then left out, and the report says so.
    timeout: seconds for the call. When they are over, all ranks raise an error that names the group, who
        arrived in it, who did not, and where that rank is. stall_timeout: seconds that a rank may be silent.
    memory_budget: bytes of GPU memory that all groups together may take on this rank. A rank that has less
        free is named before anything is done.

    Returns what was issued on this rank, with the seconds and bytes of each operation. Raises `BadInput`,
    `GroupsFailed`, `RankFailed` or `DeadlineExceeded`, the same on all ranks.

    Collectives run on a thread; if one never returns, the call does, and the process should end: see
    `holdfast.session`.
    """
    check_seconds("timeout", timeout)
    chosen = chosen_operations(operations)
    if not isinstance(groups, str | Groups) and not isinstance(groups, Iterable):
        raise BadInput(f"groups={groups!r}: give 'all', what open_groups returned, or a list of groups.")
    if memory_budget is not None and memory_budget < 1:
        raise BadInput(f"memory_budget must be bytes from 1 on, or None, not {memory_budget!r}.")
    if not dist.is_initialized():
        raise BadInput(
            "warm_up needs torch.distributed: call init_process_group first, or use holdfast.session."
        )
    serve(facts)
    there = known_groups()
    known = [group for group in there if len(group.ranks) > 1]
    if isinstance(groups, str):
        if groups != "all":
            raise BadInput(f"groups={groups!r}: give 'all', what open_groups returned, or a list of groups.")
    else:
        asked = groups.distinct() if isinstance(groups, Groups) else list(groups)
        strange = [value for value in asked if not any(value is group.group for group in there)]
        if strange:
            raise BadInput(
                f"groups= has {strange[0]!r}, which is no process group of this rank.",
                hint="Give 'all', what open_groups returned, or a list of process groups.",
            )
        known = [group for group in known if any(value is group.group for value in asked)]
    call = begin_call(roster, timeout=timeout, stall_timeout=stall_timeout)
    turn = _WarmUp(known, chosen, memory_budget, call)
    begun = time.perf_counter()
    turn.run()
    return WarmUpReport(tuple(turn.warmed), turn.rounds, turn.groups_in_world, time.perf_counter() - begun)
