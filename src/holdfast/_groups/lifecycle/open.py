"""`open_groups`: makes all process groups of a layout, in one order on all ranks, after a consistency check.

`torch.distributed.new_group` is called on all ranks, including non-members. So torch's names of groups, which
are counters, stay equal on all ranks. With `use_local_synchronization` a name depends on the number of groups
that *this rank* has: ranks with different histories wait for each other under different names until the
timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar, overload

import torch.distributed as dist

from holdfast._core.base.values import Message
from holdfast._core.layout.grid import Grid
from holdfast._core.protocol.call import Call, begin_call
from holdfast._core.protocol.job import Job, job_of
from holdfast._core.protocol.task import CollectiveTask
from holdfast._core.roster.base import Roster
from holdfast._core.torch_private import abort, groups_made
from holdfast._groups.audit.doctor import serve, stop
from holdfast._groups.lifecycle.close import Closing
from holdfast._groups.lifecycle.device import Device
from holdfast._groups.lifecycle.plan import WORLD, PlannedGroups, members, plan_groups, shown
from holdfast._groups.lifecycle.state import facts, opened
from holdfast.errors import BadInput, GroupsFailed, HoldfastError, first_line

D = TypeVar("D")


class Groups(Mapping[str, dist.ProcessGroup]):
    """The process groups that this rank belongs to, by Megatron's names: `groups["tp"]`, `groups["edp"]`,
    `groups["world"]`.

    No group is made if this rank is its only member: there is nothing to communicate, and a communicator of
    one rank takes as much memory as any other. The mapping lacks the names of such groups (`size` is 1) and
    of groups that this rank is not in (`size` is 0).
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        members: dict[str, tuple[int, ...]],
        known: dict[str, dist.ProcessGroup],
    ) -> None:
        self.grid: Grid = grid
        self.rank: int = roster.rank
        self._roster = roster
        self._members, self._known = members, known

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        if name in self._known:
            return self._known[name]
        if name not in self._members:
            raise BadInput(f"Rank {self.rank} has no group {name!r}; it is in {', '.join(self._known)}.")
        raise BadInput(
            f"Rank {self.rank} is alone in its group {name!r}, so no communicator was made.",
            hint=f"Leave the collective out where groups.size({name!r}) is 1.",
        )

    def __contains__(self, name: object) -> bool:
        return name in self._known

    @overload
    def get(self, name: str) -> dist.ProcessGroup | None: ...

    @overload
    def get(self, name: str, default: D) -> dist.ProcessGroup | D: ...

    def get(self, name: str, default: object = None) -> object:
        """Return the group, or `default` if this rank has none of that name."""
        return self._known.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the ranks of this rank's group with a name, itself included.

        (rank,) if it is the only member, () if it is in no such group.
        """
        return self._members.get(name, ())

    def size(self, name: str) -> int:
        """Return the number of ranks in this rank's group with a name."""
        return len(self.ranks(name))

    def close(self, timeout: float = 60.0) -> None:
        """Destroy the groups, the last made first, once all ranks have called; the default group stays.

        If a rank does not call within `timeout`, every rank aborts its groups and raises the same error.
        """
        # The default group belongs to the program, or to the session that has initialised it.
        made = [group for group in self.distinct() if group is not dist.group.WORLD]
        try:
            Closing(made, begin_call(Job(roster=self._roster, timeout=timeout))).run()
        except HoldfastError:
            for group in reversed(made):
                abort(group)
            raise
        finally:
            for group in self.distinct():
                opened.pop(group, None)
            if not opened:  # `holdfast doctor` may still ask about groups that others have opened
                stop()
            self._known = {name: group for name, group in self._known.items() if group is dist.group.WORLD}

    def distinct(self) -> list[dist.ProcessGroup]:
        """Return the groups, in the order in which they were made; names with the same ranks share one."""
        return list(dict.fromkeys(self._known.values()))


class _Opening(CollectiveTask):
    """Make all groups of a layout, on all ranks."""

    def __init__(
        self,
        grid: Grid,
        plan: list[PlannedGroups],
        backend: str | None,
        call: Call,
        trouble: BadInput | None,
    ) -> None:
        super().__init__(f"opening of the groups of {grid.world} ranks", "groups://open", call)
        self._grid, self._plan, self._backend = grid, plan, backend
        self._timeout, self._trouble = call.deadline.seconds, trouble
        self._device = Device()
        self.made: dict[tuple[str, ...], dist.ProcessGroup] = {}

    def contribute(self) -> Message:
        # Raised inside the protocol, so that all ranks raise it and none waits for this one.
        if self._trouble is not None:
            raise self._trouble
        return {
            "layout": self._grid.describe(),
            "kinds": [list(planned.names) for planned in self._plan],
            "backend": self._backend or dist.get_backend(),
            "groups made before": groups_made(),
        }

    def decide(self, contributions: dict[int, Message]) -> dict[int, Message]:
        first = self.operation.context.rank
        # Compared before any group is made, because every new_group, even one that fails, advances torch's
        # count of names.
        for rank, message in sorted(contributions.items()):
            for what, value in message.items():
                other = contributions[first][what]
                if value != other:
                    raise BadInput(
                        _differs(what, first, other, rank, value), rank=rank, hint=_REMEDY.get(what, "")
                    )
        return {rank: {} for rank in contributions}

    def execute(self, answer: Message) -> Message:
        self._device.use()
        total = sum(len(planned.table) for planned in self._plan)
        number = 0
        for planned in self._plan:
            label = "+".join(planned.names)
            for ranks in planned.table.tolist():
                number += 1
                # The default group exists already; a layout over a part of the world has its own "world".
                if WORLD in planned.names and len(ranks) == dist.get_world_size():
                    assert dist.group.WORLD is not None
                    self.made[planned.names] = dist.group.WORLD
                    continue
                mine = self.roster.rank in ranks
                # `doing` counts as progress: a rank must not look stalled while it makes groups that it is
                # not in.
                if mine or not number % 64:
                    self.doing(f"opening group {label} ({shown(ranks)}), {number} of {total}")
                try:
                    group = dist.new_group(
                        ranks, timedelta(seconds=self._timeout), self._backend, group_desc=f"holdfast:{label}"
                    )
                except Exception as error:
                    raise GroupsFailed(
                        f"The group {label} ({shown(ranks)}) could not be opened: {first_line(error)}",
                        rank=self.roster.rank,
                    ) from error
                if mine:
                    self.made[planned.names] = group
        return {}


_REMEDY = {
    "groups made before": "Ranks must make the same groups in the same order, also those that they are not "
    "in; `holdfast.audit()` lists them.",
    "layout": "Give all ranks the same Grid.",
}


def _differs(what: str, first: int, other: object, rank: int, value: object) -> str:
    """Return the message for an unequal value; for two dicts, with only the keys that differ."""
    if isinstance(value, dict) and isinstance(other, dict):
        keys = [key for key in sorted({*value, *other}) if value.get(key) != other.get(key)]
        other, value = ({key: side.get(key) for key in keys} for side in (other, value))
    return f"Ranks differ in {what}: {other} on rank {first}, {value} on rank {rank}; no group was made."


def open_groups(
    grid: Grid,
    *,
    names: Iterable[str] | None = None,
    backend: str | None = None,
    job: Job | None = None,
) -> Groups:
    """Open the process groups of a layout on all ranks, in one order, under a deadline.

    names: which groups (Megatron's names, `holdfast._groups.lifecycle.plan.KINDS`); default all. Names whose
        ranks are the same share a group.
    backend: the backend of the groups; default that of the default group.
    job: its `timeout` (600 s by default) applies to this call and to the collectives of these groups.

    Groups of one rank are not made. Raises the same `HoldfastError` on all ranks: `BadInput` if ranks have
    different layouts or made different groups before, `RankFailed` that names the missing ranks.
    """
    if not dist.is_initialized():
        raise BadInput(
            "open_groups needs torch.distributed: call init_process_group first, or use holdfast.session."
        )
    serve(facts)
    plan: list[PlannedGroups] = []
    trouble: BadInput | None = None
    try:
        plan = plan_groups(grid, names)
        if grid.first_rank + grid.world > dist.get_world_size():
            raise BadInput(
                f"The grid has ranks to {grid.first_rank + grid.world - 1}; the world has "
                f"{dist.get_world_size()}."
            )
    except BadInput as error:  # raised by the task, so that all ranks raise it
        trouble = error
    call = begin_call(job_of(job).within(600.0))
    opening = _Opening(grid, plan, backend, call, trouble)
    try:
        opening.run()
    except HoldfastError:
        # Aborted, not destroyed: destroying would wait for ranks that are missing or elsewhere.
        for group in opening.made.values():
            if group is not dist.group.WORLD:
                abort(group)
        raise
    for names, group in opening.made.items():
        opened[group] = (*opened.get(group, ()), *names)  # two layouts may share the default group
    known = {name: group for names, group in opening.made.items() for name in names}
    return Groups(grid, opening.roster, members(grid, dist.get_rank()), known)
