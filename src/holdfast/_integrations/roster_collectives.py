"""Replacements for collectives of `torch.distributed` that wait over the roster: with a deadline, and errors
that name the missing rank.

Barriers, and the object collectives that saves and loads of frameworks issue, go over the roster entirely.
Their values are encoded like a checkpoint's objects, so receiving them executes nothing. All others stay as
they are, but their ranks meet on the roster first, so that no rank enters a collective that another rank
never reaches.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast._format import objects
from holdfast._protocol.call import begin_call, own_timeout
from holdfast._protocol.job import Job
from holdfast._protocol.operation import agree
from holdfast._values import Message
from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGED = ("barrier", "all_gather_object", "broadcast_object_list")
"""Names in `torch.distributed` that this module replaces by methods of `RosterCollectives`."""
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
    "gather_object",
    "scatter_object_list",
)
"""Collectives whose ranks meet before the collective itself is issued. Those of objects are torch DCP's: of
its own classes, which the roster does not carry."""
MEET_ALWAYS, MEET_EVERY = 16, 128
"""Ranks meet before the first MEET_ALWAYS of these on a group, then before every MEET_EVERY-th: an export of
weights issues tens of thousands. All ranks of a group count alike, because they issue the same."""
SMALL = 1 << 20
"""The largest tensor in bytes that goes over the roster, where only some ranks of the world take part."""


class NotCarried(HoldfastError):
    """A rank has a value that the roster does not carry, because receiving it would execute code. All ranks
    raise it, so they can issue the collective itself."""


class Finished:
    """The work object of an asynchronous barrier, which has ended already."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class RosterCollectives:
    """The collectives of one guarded call.

    title: the name of this place in errors; the same on all ranks.
    participants: the ranks that "all ranks" means; None: the world. Other groups keep their own ranks.
    call: a text that differs between calls with the same title; the same on all ranks.
    like_stock: whether no wait fails before the collective itself would, whatever the job's timeout is.
    """

    title: str
    job: Job
    participants: tuple[int, ...] | None = None
    call: str = ""
    like_stock: bool = False
    _issued: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The number of collectives issued on each group."""

    # -- barriers and objects ------------------------------------------------------------------------

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: object = None,
        **_: object,
    ) -> Finished | None:
        self._exchange("barrier", group, [])
        return Finished() if async_op else None

    def all_gather_object(
        self, object_list: list[object], obj: object, group: ProcessGroup | None = None
    ) -> None:
        values = self._exchange("all_gather_object", group, [obj])
        if values is not None:  # None for ranks that do not take part
            there = {rank: _decode(encoded[0]) for rank, encoded in values.items()}
            object_list[:] = [there.get(rank) for rank in _members(group)]

    def broadcast_object_list(
        self,
        object_list: list[object],
        src: int | None = None,
        group: ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        source = (src or 0) if group_src is None else _members(group)[group_src]
        if source not in self._ranks(group):
            raise BadInput(
                f"broadcast_object_list in {self.title} is to send what rank {source} has, which does not "
                f"take part.",
                hint="Make that rank one of the participants of the job, or have another one send.",
            )
        mine = list(object_list) if dist.get_rank() == source else []
        values = self._exchange("broadcast_object_list", group, mine)
        if values is not None:
            object_list[:] = map(_decode, values[source])

    # -- all others ----------------------------------------------------------------------------------

    def meet_first(
        self, name: str, original: Callable[..., object], args: Sequence[object], named: dict[str, object]
    ) -> object:
        """Issue the collective `name` once its ranks have come."""
        # The position of the group differs between signatures, so it is found by its type.
        group = named.get("group") or next((arg for arg in args if isinstance(arg, dist.ProcessGroup)), None)
        ranks = self._ranks(group)
        # On a rank outside of the group torch does nothing or raises: left to torch.
        if dist.get_rank() not in ranks:
            return original(*args, **named)
        if len(ranks) < len(_members(group)):
            if name != "all_reduce":
                raise self._refused(name)
            return self._largest(*args, **named)  # type: ignore[arg-type]
        number = self._issued[ranks] = self._issued.get(ranks, 0) + 1
        # A meeting costs messages of all ranks. A missing rank is found at the next meeting.
        if number <= MEET_ALWAYS or number % MEET_EVERY == 0:
            self._exchange(name, group, [])
        return original(*args, **named)

    def _largest(
        self,
        tensor: torch.Tensor,
        op: object = dist.ReduceOp.SUM,
        group: object = None,
        async_op: bool = False,
    ) -> Finished | None:
        """Do an all_reduce by MAX over the roster, among the participants: so frameworks find the iteration
        that they load."""
        if op != dist.ReduceOp.MAX or tensor.numel() * tensor.element_size() > SMALL:
            raise self._refused("all_reduce, but of a small tensor by MAX,")
        values = self._exchange("all_reduce", group, [tensor.detach().cpu()]) or {}
        with torch.no_grad():
            tensor.copy_(torch.stack([_decode(encoded[0]) for encoded in values.values()]).amax(0))  # type: ignore[misc]
        return Finished() if async_op else None

    def _refused(self, what: str) -> BadInput:
        return BadInput(
            f"{what} on all ranks in {self.title}: only {len(self.participants or ())} of them take part, "
            f"and Holdfast can't do this among some.",
            hint="Leave participants out of the job, or let the framework use a group of these ranks.",
        )

    # -- the roster ----------------------------------------------------------------------------------

    def _ranks(self, group: object) -> tuple[int, ...]:
        if self.participants is not None and (group is None or group is dist.group.WORLD):
            return self.participants
        return tuple(sorted(_members(group)))

    def _exchange(self, kind: str, group: object, values: Sequence[object]) -> dict[int, list[str]] | None:
        """Exchange encoded values; return those of each rank, or None outside of the group.

        Raises NotCarried on all ranks if one of them has a value that is not carried, and BadInput if the
        collective itself would wait for ranks that do not take part.
        """
        ranks = self._ranks(group)
        # As in the collective itself, a rank outside of the group does nothing.
        if dist.get_rank() not in ranks and ranks is not self.participants:
            return None
        mine: Message = {}
        try:
            # All ranks get all values, even if only one needs them: they are small, and it takes one round.
            mine["values"] = [_encode(value) for value in values]
        except HoldfastError as error:  # all ranks must raise it
            mine["refused"] = error.message

        def choose(messages: dict[int, Message]) -> Message:
            for message in messages.values():
                if "refused" in message:
                    return message
            return {"values": {str(rank): message["values"] for rank, message in messages.items()}}

        like_stock = self.like_stock or self.job.timeout is None
        call = begin_call(
            replace(self.job, participants=ranks), at_least=own_timeout(group) if like_stock else 0.0
        )
        place = f"guard://{self.title}|{self.call}|{kind}"
        answer = agree(f"{kind} in {self.title}", place, choose, call, mine)
        if "refused" in answer:
            whole = len(ranks) == len(_members(group))
            raise (NotCarried if whole else BadInput)(
                f"{kind} in {self.title}: {answer['refused']}", hint="Have it send plain values only."
            )
        return {int(rank): encoded for rank, encoded in answer["values"].items()}


def _members(group: object) -> list[int]:
    """Return the ranks of a group, in its order; none if this rank is not in it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]


def _encode(value: object) -> str:
    """Encode a value; raise BadInput also for one that a receiver would refuse, to execute no code."""
    # The sender decodes, too: all ranks learn of its refusal in the same round. If a receiver refused, the
    # others would go on with a value.
    data = objects.encode(value, "what a collective carries")
    try:
        objects.decode(data, "what a collective carries")
    except CorruptCheckpoint as error:
        raise BadInput(error.message) from error
    # Messages of the roster are JSON.
    return base64.b64encode(data).decode()


def _decode(text: str) -> object:
    return objects.decode(base64.b64decode(text), "what a collective carried")
