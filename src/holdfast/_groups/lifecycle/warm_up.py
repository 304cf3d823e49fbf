"""`warm_up`: issue the first collective of every process group, when the user asks for it, under a deadline.

NCCL makes a communicator at a group's first collective. That takes half a GB of memory or more, and waits for
every rank of the group; nothing bounds this wait, and the watchdog does not see it. In Megatron some groups
are first used in the first optimizer step, when memory is full and ranks are not in step.

So `warm_up` first collects the groups of all ranks through the roster. Then it issues the smallest collective
of each kind that a group is used for, in rounds of disjoint groups, and monitors them from outside of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from holdfast import events
from holdfast._core.base.values import Message, size_text
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.lost import DYING, Seen, describe, see
from holdfast._core.torch_private import KnownGroup, collectives_issued, is_open, known_groups
from holdfast._groups.audit.doctor import serve
from holdfast._groups.lifecycle.absent import Plan, WarmUpPlace, may_be_explained, places_of, who_did_not_come
from holdfast._groups.lifecycle.claims import agreed, claim, label
from holdfast._groups.lifecycle.collectives import NotSupported, issue, usable_devices
from holdfast._groups.lifecycle.device import Device
from holdfast._groups.lifecycle.open import Groups
from holdfast._groups.lifecycle.plan import rounds
from holdfast._groups.lifecycle.report import IssuedOperation, WarmedGroup, WarmUpReport
from holdfast._groups.lifecycle.state import facts, opened, warm
from holdfast._groups.lifecycle.uses import OPERATIONS, uses
from holdfast.errors import BadInput, GroupsFailed, HoldfastError, RankFailed, first_line


class _WarmUp(CollectiveTask):
    def __init__(
        self,
        groups: list[KnownGroup],
        operations: tuple[str, ...] | None,
        budget: int | None,
        call: Call,
    ) -> None:
        super().__init__("warm-up of process groups", "groups://warm-up", call)
        self._groups = {known.name: known for known in groups}
        self._operations, self._budget = operations, budget
        self._device = Device()
        self._position = self._round_now = self._number = 0
        """Index of this rank's current group in its own order, the group's round, the operation's index."""
        self._collective: tuple[dist.ProcessGroup, int | None] | None = None
        """The group of the next or current collective, and the number of collectives issued before it."""
        self._everyone: dict[str, tuple[str, list[int]]] = {}
        """Committer: description and ranks of every group, by name."""
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
            "uses": {  # from the lowest rank of each group only, so that all its ranks do the same
                name: uses_here[name] for name, known in self._groups.items() if rank == min(known.ranks)
            },
            "budget": self._budget,
            "free": self._device.free(),
            # All groups: an error can then tell groups that were not given from groups that were not made.
            "has": [known.name for known in there],
            "groups": [
                claim(known.name, known.ranks, known.description, rank) for known in self._groups.values()
            ],
        }

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        self._everyone = agreed(contributions)
        used: dict[str, Sequence[str]] = {}
        asked = contributions[self.roster.rank]["operations"]
        for rank, message in sorted(contributions.items()):
            used.update(message["uses"])
            # Ranks with different operations would wait for each other until the deadline.
            if message["operations"] != asked:
                raise BadInput(
                    f"Rank {rank} warms up with {message['operations'] or 'the default operations'}, rank "
                    f"{self.roster.rank} with {asked or 'the default operations'}.",
                    rank=rank,
                )
            budget, free = message["budget"], message["free"]
            if budget is not None and free is not None and free < budget:
                raise GroupsFailed(
                    f"Rank {rank} has {size_text(free)} of GPU memory free, and {len(message['groups'])} "
                    f"groups may take {size_text(budget)} (memory_budget); nothing was warmed up.",
                    rank=rank,
                    hint="Warm up before the model is built, or lower the budget.",
                )
        names = list(self._everyone)
        numbers = rounds([np.array(self._everyone[name][1], np.int64) for name in names])
        of = self._round = dict(zip(names, numbers, strict=True))
        total = {"rounds": max(numbers, default=-1) + 1, "groups": len(names)}
        for rank, message in contributions.items():
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
            # Published in the presence message (`now`), so that the committer knows the group that each rank
            # has reached.
            self._position, self._round_now, self._collective = position, number, None
            where = f"{position + 1} of {len(order)}"
            self.warmed.append(self._warm_one(self._groups[name], number, operations, where))
        self._position, self._collective = len(order), None
        self.doing("warmed up all its groups")
        return {}

    def _warm_one(self, known: KnownGroup, number: int, operations: Sequence[str], where: str) -> WarmedGroup:
        begun = time.perf_counter()
        # gloo groups do not report whether they are open, so Holdfast remembers what it has warmed up.
        was_warm = bool(is_open(known.group)) or known.group in warm
        places = usable_devices(known.group)
        if not places:
            raise GroupsFailed(
                f"{label(known.name, known.description, known.ranks)} has the backend "
                f"{dist.get_backend_config(known.group)}, for which no tensor can be made here; it was not "
                "warmed up.",
                hint="Give groups= without it.",
            )
        issued: list[IssuedOperation] = []
        left_out: list[str] = []
        for number_here, operation in enumerate(operations):
            self._number = number_here
            # Neighbours that exchange pair by pair are not counted by the group.
            before = collectives_issued(known.group) if operation != "pairs" else None
            self._collective = (known.group, before)
            self.doing(f"{operation} of {label(known.name, known.description, known.ranks)}, {where}")
            entry = self._issue(operation, known, places)
            if entry is None:
                left_out.append(operation)
                continue
            issued.append(entry)
            # After each operation, so that the error names the group that exceeded the budget.
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

    def _issue(
        self, operation: str, known: KnownGroup, places: Sequence[torch.device]
    ) -> IssuedOperation | None:
        """Issue one operation. Return None if the backend lacks it and the caller did not ask for it."""
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
            left = "" if free is None else f"; {size_text(free)} of GPU memory are free"
            raise GroupsFailed(
                f"The first {operation} of {label(known.name, known.description, known.ranks)} met "
                f"{type(error).__name__}: {first_line(error)}{left}",
                details={"group": known.name},
            ) from error
        after = self._device.free()
        taken = 0 if before is None or after is None else max(before - after, 0)
        return IssuedOperation(operation, time.perf_counter() - begun, taken)

    def _check_budget(self, known: KnownGroup, taken: int) -> None:
        """Raise GroupsFailed if the warm groups and `taken` bytes of one more exceed the memory budget."""
        total = taken + sum(group.bytes_taken for group in self.warmed)
        if self._budget is not None and total > self._budget:
            raise GroupsFailed(
                f"{len(self.warmed) + 1} groups took {size_text(total)} of GPU memory, more than "
                f"memory_budget ({size_text(self._budget)}); the last was "
                f"{label(known.name, known.description, known.ranks)} with {size_text(taken)}.",
                hint="Open fewer groups, or set NCCL_BUFFSIZE or NCCL_MAX_NCHANNELS lower.",
            )

    def now(self) -> Message:
        return {
            "position": self._position,
            "round": self._round_now,
            "operation": self._number,
            "issued": self._has_issued(),
            "free": self._device.free(),
        }

    def phrase(self) -> str:
        if self._collective is None:
            return super().phrase()
        how = {True: "inside", False: "before", None: "in"}[self._has_issued()]
        return f"{how} {super().phrase()}"

    def _has_issued(self) -> bool | None:
        """Return whether this rank has issued its current collective; None if that is not known."""
        if self._collective is None:
            return None
        group, before = self._collective
        after = collectives_issued(group)
        return None if before is None or after is None else after > before

    def suspicion(self, seen: Seen) -> int:
        """First ranks that are behind, then those that have not issued their collective."""
        place = places_of({0: seen}, self.operation.context.key).get(0, WarmUpPlace())
        return 2 * place.round + (place.issued is not False)

    def better(self, error: HoldfastError) -> HoldfastError | None:
        if isinstance(error, GroupsFailed) and "group" in error.details:
            return self._somebody_gone(error)
        # Only the committer knows the order of all ranks; the others raise its error.
        if self._order and isinstance(error, RankFailed) and may_be_explained(error):
            context = self.operation.context
            seen = see(self.roster, context.participants)
            places = places_of(seen, context.key) | {self.roster.rank: WarmUpPlace.of(self.now())}
            plan = Plan(self._everyone, self._order, self._round)
            return who_did_not_come(error, seen, context.key, places, plan, self.operation.seconds())
        return None

    def _somebody_gone(self, error: GroupsFailed) -> HoldfastError | None:
        """Return RankFailed if a rank of the group has died, and so broken this rank's collective."""
        known = self._groups[error.details["group"]]
        others = [rank for rank in known.ranks[:1024] if rank != self.roster.rank]  # a group may be large
        # A dying process closes its connections a moment before its end can be seen, so wait for that. An
        # out-of-memory error is this rank's own failure, so don't wait.
        patience = 0.0 if isinstance(error.__cause__, torch.OutOfMemoryError) else DYING
        ends = time.monotonic() + patience
        while True:
            gone = [
                describe(rank, one, time.time(), one.ended)
                for rank, one in see(self.roster, others).items()
                if one.ended
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


def chosen_operations(operations: Sequence[str] | None) -> tuple[str, ...] | None:
    """Check `operations` of `warm_up`. Return them as a tuple, or None for the default; or raise BadInput."""
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
    memory_budget: int | None = None,
    job: Job | None = None,
) -> WarmUpReport:
    """Issue the first collective of process groups, on all ranks of the world, so that each group has its
    communicator.

    groups: "all" (every group of more than one rank that torch knows, such as those of Megatron's
        `parallel_state` or a DeviceMesh), the result of `open_groups`, or a list of groups, with the same
        groups on all ranks that are in them.
    operations: what to issue on every group, some of:
        "all_reduce"; "all_to_all";
        "pairs": send and receive between neighbours of the group, the last and the first included, in a batch
        and one by one; for the latter NCCL makes a communicator of two ranks for each pair.
        Default: what each group is used for in Megatron. That is all_reduce for all groups, also all_to_all
        for the groups of experts (EP, and expert TP with EP), and also pairs for the groups of pipelines.
        They are recognised by their names in `open_groups`, by the descriptions of `parallel_state`, and by
        the dimensions "ep" and "pp" of a DeviceMesh. By default operations that a backend lacks are left out,
        and the report lists them.
    job: its `timeout` (300 s by default) is that of the call. After that all ranks raise an error that names
        the group, the ranks that arrived in it and those that did not, and where the latter are.
    memory_budget: bytes of GPU memory that all groups together may take on this rank. If a rank has less
        free, the call fails with its number before anything is issued.

    Returns what was issued on this rank, with the seconds and bytes of each operation. Raises `BadInput`,
    `GroupsFailed`, `RankFailed` or `DeadlineExceeded`, the same on all ranks.

    Collectives run on a thread. If one never returns, this call still does; then the process should end (see
    `holdfast.session`).
    """
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
    call = begin_call(job_of(job).within(300.0))
    task = _WarmUp(known, chosen, memory_budget, call)
    begun = time.perf_counter()
    task.run()
    return WarmUpReport(tuple(task.warmed), task.rounds, task.groups_in_world, time.perf_counter() - begun)
