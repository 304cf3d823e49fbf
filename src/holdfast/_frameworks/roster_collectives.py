"""Replacements for collectives of `torch.distributed` that wait on the roster: with a deadline, and errors
that name the missing rank.

A barrier runs entirely on the roster. Other collectives are unchanged, but their ranks first synchronize on
the roster, so that no rank enters a collective that another rank never reaches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast._core.base.values import Json
from holdfast._core.protocol.call import begin_call, own_timeout
from holdfast._core.protocol.job import Job
from holdfast._core.protocol.operation import agree
from holdfast._core.torch_private import is_foreign
from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MEET_FIRST = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
)
"""Names in `torch.distributed` of collectives whose ranks synchronize before the collective is issued."""
MEET_ALWAYS, MEET_EVERY = 16, 128
"""Ranks synchronize before the first MEET_ALWAYS collectives on a group, then before every MEET_EVERY-th: an
export of weights issues tens of thousands. All ranks of a group have the same count of issued collectives."""
SMALL = 1024
"""Maximum number of elements of a tensor that is reduced on the roster, when some ranks don't take part."""


@dataclass
class RosterCollectives:
    """The collectives of one guarded call.

    title: the name of this place in errors; the same on all ranks.
    participants: the ranks that stand for the world group; None: all. Other groups keep their own ranks.
    call: a text that identifies a call among those with the same title; the same on all ranks.
    like_stock: whether waits last at least as long as the collective's own timeout, even if the job's is
        shorter.
    """

    title: str
    job: Job
    participants: tuple[int, ...] | None = None
    call: str = ""
    like_stock: bool = False
    absent: frozenset[int] = frozenset()
    """Ranks that the others don't wait for; if one arrives late, it does not wait for others either."""
    _issued: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The number of collectives issued on each group."""

    def barrier(self, group: ProcessGroup | None = None, *_: object, **__: object) -> None:
        if is_foreign(group):
            dist.barrier(group)
        # As in the collective itself, a rank outside of the group does nothing.
        elif not self._is_outside(self._ranks(group)):
            self._meet("barrier", group)

    def meet_first(
        self, name: str, original: Callable[..., object], args: Sequence[object], named: dict[str, object]
    ) -> object:
        """Issue the collective `name` once all of its ranks have arrived."""
        try:
            given = inspect.signature(original).bind(*args, **named).arguments
        except TypeError:  # torch raises the error for its arguments
            return original(*args, **named)
        group = given.get("group")
        ranks = self._ranks(group)
        # On a rank outside of the group torch does nothing or raises: left to torch.
        if self._is_outside(ranks) or is_foreign(group):
            return original(*args, **named)
        if len(ranks) < len(_members(group)):
            if name != "all_reduce":
                raise self._refused(name)
            self._largest(*args, **named)  # type: ignore[arg-type]
            return None
        number = self._issued[ranks] = self._issued.get(ranks, 0) + 1
        # Not always: synchronizing costs a message of each rank, and the next one detects a missing rank.
        # Never for an asynchronous call, which must not block: other ranks may depend on what this rank does
        # before they come.
        if (number <= MEET_ALWAYS or number % MEET_EVERY == 0) and not given.get("async_op"):
            self._meet(name, group)
        return original(*args, **named)

    def _largest(
        self,
        tensor: torch.Tensor,
        op: object = dist.ReduceOp.SUM,
        group: object = None,
        async_op: bool = False,
    ) -> None:
        """Do an all_reduce with MAX on the roster, among the participants: frameworks use it to find the
        iteration to load."""
        if op != dist.ReduceOp.MAX or tensor.numel() > SMALL or tensor.is_floating_point() or async_op:
            raise self._refused("all_reduce, but of some whole numbers by MAX,")
        numbers = self._meet("all_reduce", group, tensor.flatten().tolist())
        with torch.no_grad():
            tensor.copy_(torch.tensor(numbers, dtype=tensor.dtype).view(tensor.shape))

    def _refused(self, what: str) -> BadInput:
        return BadInput(
            f"{what} on all ranks in {self.title}: only {len(self.participants or ())} of them take part, "
            f"and Holdfast can't do this among some.",
            hint="Leave participants out of the job, or let the framework use a group of these ranks.",
        )

    def _ranks(self, group: object) -> tuple[int, ...]:
        if self.participants is not None and (group is None or group is dist.group.WORLD):
            ranks = self.participants
        else:
            ranks = tuple(sorted(_members(group)))
        if (me := dist.get_rank()) in self.absent and me in ranks:
            return (me,)
        return tuple(rank for rank in ranks if rank not in self.absent) if self.absent else ranks

    def _is_outside(self, ranks: tuple[int, ...]) -> bool:
        """Return whether this rank is outside of a group. A rank that is no participant gets an error
        later."""
        return dist.get_rank() not in ranks and ranks is not self.participants

    def _meet(self, kind: str, group: object, numbers: Sequence[int] = ()) -> Json:
        """Wait until all ranks of a group have arrived; return the elementwise maximum of their numbers."""

        def choose(given: dict[int, Json]) -> Json:
            return [max(some) for some in zip(*given.values(), strict=True)]

        like_stock = self.like_stock or self.job.timeout is None
        call = begin_call(
            replace(self.job, participants=self._ranks(group)),
            at_least=own_timeout(group) if like_stock else 0.0,
        )
        place = f"guard://{self.title}|{self.call}|{kind}"
        return agree(f"{kind} in {self.title}", place, choose, call, list(numbers))


def _members(group: object) -> list[int]:
    """Return the ranks of a group, in its order; none if this rank is not in it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]
