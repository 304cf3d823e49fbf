"""Replacements for collectives of `torch.distributed` that wait over the roster: with a deadline, and errors
that name the missing rank.

Barriers and object collectives go over the roster entirely. Their values are encoded like a checkpoint's
objects, so receiving them executes nothing. Tensor collectives stay as they are, but their ranks meet on the
roster first, so that no rank enters a collective that another rank never reaches.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from holdfast.errors import BadInput, CorruptCheckpoint, HoldfastError
from holdfast.format import objects
from holdfast.protocol.call import begin_call
from holdfast.protocol.operation import agree
from holdfast.values import Message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OBJECTS = ("barrier", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Names in `torch.distributed` that this module replaces by methods of `RosterCollectives`."""
TENSORS = (
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
)
"""Collectives whose ranks meet before the collective itself is issued."""
MEET_FIRST, MEET_EVERY = 16, 128
"""Ranks meet before the first MEET_FIRST tensor collectives of a group, then before every MEET_EVERY-th: an
export of weights issues tens of thousands. All ranks of a group count alike, because they issue the same."""
SMALL = 1 << 20
"""The largest tensor in bytes that goes over the roster, where only some ranks of the world take part."""
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda values: values.sum(0),
    "MAX": lambda values: values.max(0).values,
    "MIN": lambda values: values.min(0).values,
    "AVG": lambda values: values.mean(0),
    "PRODUCT": lambda values: values.prod(0),
}


class NotCarried(HoldfastError):
    """A rank has a value that the roster does not carry, because receiving it would execute code. All ranks
    raise it."""

    by_collective = False
    """May the collective itself be issued? True if all ranks have met, and each can pickle its value."""


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
    """

    title: str
    timeout: float
    stall_timeout: float
    participants: tuple[int, ...] | None = None
    call: str = ""
    _issued: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The number of tensor collectives issued on each group."""

    # -- barriers and objects ------------------------------------------------------------------------

    def barrier(
        self,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        device_ids: object = None,
        **_: object,
    ) -> Finished | None:
        self._meet("barrier", group)
        return Finished() if async_op else None

    def all_gather_object(
        self, object_list: list[object], obj: object, group: ProcessGroup | None = None
    ) -> None:
        object_list[:] = self._gathered("all_gather_object", group, obj) or object_list

    def gather_object(
        self,
        obj: object,
        object_gather_list: list[object] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        group_dst: int | None = None,
    ) -> None:
        values = self._gathered("gather_object", group, obj)
        if values is not None and object_gather_list is not None:
            object_gather_list[:] = values

    def broadcast_object_list(
        self,
        object_list: list[object],
        src: int | None = None,
        group: ProcessGroup | None = None,
        device: object = None,
        group_src: int | None = None,
    ) -> None:
        source = self._source("broadcast_object_list", group, src, group_src)
        mine = list(object_list) if dist.get_rank() == source else []
        values = self._exchange("broadcast_object_list", group, mine)
        if values is not None:
            object_list[:] = map(_decode, values[source])

    def scatter_object_list(
        self,
        scatter_object_output_list: list[object],
        scatter_object_input_list: list[object] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        group_src: int | None = None,
    ) -> None:
        source = self._source("scatter_object_list", group, src, group_src)
        mine = list(scatter_object_input_list or []) if dist.get_rank() == source else []
        values = self._exchange("scatter_object_list", group, mine)
        if values is not None:
            number = _members(group).index(dist.get_rank())
            scatter_object_output_list[0] = _decode(values[source][number])

    # -- tensors -------------------------------------------------------------------------------------

    def tensors(
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
            return self._of_participants(name, args, named)
        number = self._issued[ranks] = self._issued.get(ranks, 0) + 1
        # A meeting costs messages of all ranks. A missing rank is found at the next meeting.
        if number <= MEET_FIRST or number % MEET_EVERY == 0:
            self._meet(name, group)
        return original(*args, **named)

    def _of_participants(
        self, name: str, args: Sequence[object], named: dict[str, object]
    ) -> Finished | None:
        """Do a collective on the world over the roster, because only the participants take part."""
        tensors = [value for value in (*args, *named.values()) if isinstance(value, torch.Tensor)]
        lists = [value for value in (*args, *named.values()) if isinstance(value, list)]
        if name not in ("all_reduce", "broadcast", "all_gather") or not tensors:
            raise BadInput(
                f"{name} on all ranks in {self.title}: only {len(self.participants or ())} of them take "
                f"part, and Holdfast can't do this among some.",
                hint="Leave participants= out, or have the framework use a process group of these ranks.",
            )
        tensor = tensors[0]
        if tensor.numel() * tensor.element_size() > SMALL:
            raise BadInput(
                f"{name} of {tensor.numel() * tensor.element_size():,} bytes on all ranks in {self.title}: "
                f"only the participants take part, and at most {SMALL:,} bytes go over the roster."
            )
        source = self._source(name, None, *_sources(args, named)) if name == "broadcast" else None
        values = self._gathered(name, None, tensor.detach().cpu())
        assert values is not None
        # All ranks sum in the order of ranks, so their results are the same, bit for bit.
        there = {rank: value for rank, value in enumerate(values) if isinstance(value, torch.Tensor)}
        with torch.no_grad():
            if name == "broadcast":
                assert source is not None
                tensor.copy_(there[source])
            elif name == "all_gather":
                for rank, value in there.items():
                    lists[0][rank].copy_(value)
            else:
                given = named.get("op", next((a for a in args[1:] if isinstance(a, dist.ReduceOp)), None))
                reduce = self._reduction(dist.ReduceOp.SUM if given is None else given)
                tensor.copy_(reduce(torch.stack(list(there.values()))))
        return Finished() if named.get("async_op") else None

    def _reduction(self, operation: object) -> Callable[[torch.Tensor], torch.Tensor]:
        for name, reduce in _REDUCTIONS.items():
            if operation == getattr(dist.ReduceOp, name):
                return reduce
        raise BadInput(
            f"all_reduce in {self.title}: only {len(self.participants or ())} ranks take part, and Holdfast "
            f"reduces among some by {', '.join(_REDUCTIONS)}, not by {operation}."
        )

    # -- the roster ----------------------------------------------------------------------------------

    def _meet(self, kind: str, group: object) -> None:
        self._exchange(kind, group, [])

    def _gathered(self, kind: str, group: object, value: object) -> list[object] | None:
        """Gather one value of each rank of the group, None for ranks that do not take part.

        Returns None outside of the group.
        """
        values = self._exchange(kind, group, [value])
        if values is None:
            return None
        there = {rank: _decode(encoded[0]) for rank, encoded in values.items()}
        return [there.get(rank) for rank in _members(group)]

    def _source(self, kind: str, group: ProcessGroup | None, src: int | None, group_src: int | None) -> int:
        """Return the rank that sends; raise BadInput on all ranks if it does not take part."""
        source = _source(group, src, group_src)
        if source not in self._ranks(group):
            raise BadInput(
                f"{kind} in {self.title} is to send what rank {source} has, which does not take part.",
                hint="Make that rank one of participants=, or have another one send.",
            )
        return source

    def _ranks(self, group: object) -> tuple[int, ...]:
        if self.participants is not None and (group is None or group is dist.group.WORLD):
            return self.participants
        return tuple(sorted(_members(group)))

    def _exchange(self, kind: str, group: object, values: Sequence[object]) -> dict[int, list[str]] | None:
        """Exchange encoded values; return those of each rank, or None outside of the group.

        Raises NotCarried on all ranks if one of them has a value that is not carried.
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
            mine |= {"refused": error.message, "pickled": _can_be_pickled(values)}

        def choose(messages: dict[int, Message]) -> Message:
            refused = [message for message in messages.values() if "refused" in message]
            if refused:
                # If one rank can't pickle its value, no rank may issue the collective itself.
                worst = min(refused, key=lambda message: message["pickled"])
                return {"refused": worst["refused"], "pickled": worst["pickled"]}
            return {"values": {str(rank): message["values"] for rank, message in messages.items()}}

        call = begin_call(participants=ranks, timeout=self.timeout, stall_timeout=self.stall_timeout)
        place = f"guard://{self.title}|{self.call}|{kind}"
        answer = agree(f"{kind} in {self.title}", place, choose, call, mine)
        if "refused" in answer:
            refused = NotCarried(
                f"{kind} in {self.title}: {answer['refused']}", hint="Have it send plain values only."
            )
            refused.by_collective = answer["pickled"] and len(ranks) == len(_members(group))
            raise refused
        return {int(rank): encoded for rank, encoded in answer["values"].items()}


def _can_be_pickled(values: Sequence[object]) -> bool:
    """Return whether the collective itself could send these values."""
    try:
        pickle.dumps(values)
    except Exception:  # whatever a class of the framework raises
        return False
    return True


def _members(group: object) -> list[int]:
    """Return the ranks of a group, in its order; none if this rank is not in it."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return []
    return dist.get_process_group_ranks(group or dist.group.WORLD)  # type: ignore[arg-type]


def _source(group: ProcessGroup | None, src: int | None, group_src: int | None) -> int:
    if group_src is not None:
        return _members(group)[group_src]
    return 0 if src is None else src


def _sources(args: Sequence[object], named: dict[str, object]) -> tuple[int | None, int | None]:
    """Return `src` and `group_src` of a broadcast."""
    positional = next((arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)), None)
    src, group_src = named.get("src", positional), named.get("group_src")
    return (src if isinstance(src, int) else None), (group_src if isinstance(group_src, int) else None)


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
