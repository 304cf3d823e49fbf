"""`open_groups`: all process groups of a layout, made in one order on all ranks, checked before any is made.

A group is made by `torch.distributed.new_group` on all ranks, also those that are not in it, so torch's names
of groups are counts that stay equal over ranks. With `use_local_synchronization` a name is made of how many
groups *this rank* has, and ranks with other histories wait for each other under different names until the
timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TypeVar, overload

import torch.distributed as dist

from holdfast.deadline import check_seconds
from holdfast.errors import BadInput, GroupsFailed, HoldfastError, first_line
from holdfast.groups.audit.doctor import serve, stop
from holdfast.groups.lifecycle.close import Closing
from holdfast.groups.lifecycle.device import Device
from holdfast.groups.lifecycle.plan import WORLD, Planned, members, plan_groups, shown
from holdfast.groups.lifecycle.state import facts, opened
from holdfast.layout.grid import Grid
from holdfast.protocol.call import Call, begin_call
from holdfast.protocol.task import CollectiveTask
from holdfast.roster.base import Roster
from holdfast.torch_private import abort, groups_made
from holdfast.values import Message

D = TypeVar("D")


class Groups(Mapping[str, dist.ProcessGroup]):
    """The process groups that this rank belongs to, by Megatron's names: `groups["tp"]`, `groups["edp"]`,
    `groups["world"]`.

    A name of which this rank is the only member has no group: there is nothing to communicate, and a
    communicator of one takes as much memory as any other. Such names, and those of groups that this rank is
    not in, are not in the mapping; `size` tells them.
    """

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        members: dict[str, tuple[int, ...]],
        known: dict[str, dist.ProcessGroup],
    ) -> None:
        self.grid, self.rank, self._roster = grid, roster.rank, roster
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
        """The group, or `default` where this rank has none of that name."""
        return self._known.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def ranks(self, name: str) -> tuple[int, ...]:
        """The ranks of this rank's group of a name, this one included; (rank,) where it is alone, () where it
        is not in one."""
        return self._members.get(name, ())

    def size(self, name: str) -> int:
        """How many ranks this rank's group of a name has."""
        return len(self.ranks(name))

    def close(self, timeout: float = 60.0, stall_timeout: float = 60.0) -> None:
        """Destroy the groups, the last made first, once all ranks are here; the default group stays.

        Raises the same error on all ranks if one does not come by `timeout`; then each has aborted its
        groups.
        """
        # The default group belongs to the program, or to the session that has started it.
        made = [group for group in self.distinct() if group is not dist.group.WORLD]
        try:
            Closing(made, begin_call(self._roster, timeout=timeout, stall_timeout=stall_timeout)).run()
        except HoldfastError:
            for group in reversed(made):
                abort(group)
            raise
        finally:
            for group in self.distinct():
                opened.pop(group, None)
            if not opened:  # others may still be asked about
                stop()
            self._known = {name: group for name, group in self._known.items() if group is dist.group.WORLD}

    def distinct(self) -> list[dist.ProcessGroup]:
        """The groups themselves, in the order of their making; names whose ranks are the same share one."""
        return list(dict.fromkeys(self._known.values()))


class _Opening(CollectiveTask):
    """All groups of a layout, made on all ranks."""

    def __init__(
        self,
        grid: Grid,
        plan: list[Planned],
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
        # Raised inside of the protocol, so that all ranks raise it and none waits for this one.
        if self._trouble is not None:
            raise self._trouble
        return {
            "layout": self._grid.describe(),
            "kinds": [list(planned.names) for planned in self._plan],
            "backend": self._backend or dist.get_backend(),
            "groups made before": groups_made(),
        }

    def decide(self, said: dict[int, Message]) -> dict[int, Message]:
        first = self.operation.context.rank
        # Compared before any group is made: each new_group counts up torch's names, even one that fails.
        for rank, message in sorted(said.items()):
            for what, value in message.items():
                other = said[first][what]
                if value != other:
                    raise BadInput(
                        _differs(what, first, other, rank, value), rank=rank, hint=_REMEDY.get(what, "")
                    )
        return {rank: {} for rank in said}

    def execute(self, answer: Message) -> Message:
        self._device.use()
        total = sum(len(planned.table) for planned in self._plan)
        number = 0
        for planned in self._plan:
            label = "+".join(planned.names)
            for ranks in planned.table.tolist():
                number += 1
                # The default group exists already. A layout of a part of the world has a "world" of its own.
                if WORLD in planned.names and len(ranks) == dist.get_world_size():
                    assert dist.group.WORLD is not None
                    self.made[planned.names] = dist.group.WORLD
                    continue
                mine = self.roster.rank in ranks
                # `doing` counts as progress: a rank must not look stalled while it makes groups of other
                # ranks.
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
    if isinstance(value, dict) and isinstance(other, dict):
        keys = [key for key in sorted({*value, *other}) if value.get(key) != other.get(key)]
        other, value = ({key: found.get(key) for key in keys} for found in (other, value))
    return f"Ranks differ in {what}: {other} on rank {first}, {value} on rank {rank}; no group was made."


def open_groups(
    grid: Grid,
    *,
    names: Iterable[str] | None = None,
    backend: str | None = None,
    timeout: float = 600.0,
    stall_timeout: float = 60.0,
    roster: Roster | None = None,
) -> Groups:
    """Open the process groups of a layout on all ranks, in one order, under a deadline.

    names: which groups (Megatron's names, `holdfast.groups.lifecycle.plan.KINDS`); default all. Names whose
        ranks are the same share a group.
    backend: that of the groups; default the default group's.
    timeout: seconds for this call, and the timeout of collectives of these groups.
    stall_timeout: seconds that a rank may be silent before it is given up.

    No group of one rank is made. Raises the same `HoldfastError` on all ranks: `BadInput` if ranks have
    different layouts or made different groups before, `RankFailed` naming who is missing.
    """
    check_seconds("timeout", timeout)
    if not dist.is_initialized():
        raise BadInput(
            "open_groups needs torch.distributed: call init_process_group first, or use holdfast.session."
        )
    serve(facts)
    plan: list[Planned] = []
    trouble: BadInput | None = None
    try:
        plan = plan_groups(grid, names)
        if grid.first_rank + grid.world > dist.get_world_size():
            raise BadInput(
                f"The grid has ranks to {grid.first_rank + grid.world - 1}; the world has "
                f"{dist.get_world_size()}."
            )
    except BadInput as error:  # the others are to hear of it
        trouble = error
    call = begin_call(roster, timeout=timeout, stall_timeout=stall_timeout)
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
        opened[group] = (*opened.get(group, ()), *names)  # of two layouts that both have the default group
    known = {name: group for names, group in opening.made.items() for name in names}
    return Groups(grid, opening.roster, members(grid, dist.get_rank()), known)
