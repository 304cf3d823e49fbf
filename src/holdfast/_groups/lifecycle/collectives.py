"""Issue the smallest collective of each kind, which makes a group open its communicators."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist

from holdfast._core.torch_private import KnownGroup


class NotSupported(Exception):
    """The backend of a group lacks an operation; nothing was issued on any rank of the group."""


_LACKS = re.compile(r"Backend \S+ does not support|No backend type associated with device type")
"""Errors of torch for an operation that a backend lacks: from C++, and from a process group in Python."""


def issue(operation: str, known: KnownGroup, device: torch.device) -> None:
    """Issue the smallest collective of a kind: "all_reduce", "all_to_all", or "pairs", see `_pairs`.

    Raises `NotSupported` if the group's backend lacks it.
    """
    try:
        if operation == "all_reduce":
            dist.all_reduce(torch.zeros(1, device=device), group=known.group)
        elif operation == "all_to_all":
            given = torch.zeros(len(known.ranks), device=device)
            dist.all_to_all_single(torch.empty_like(given), given, group=known.group)
        else:
            _pairs(known, device)
    except RuntimeError as error:
        # NotImplementedError is a RuntimeError. Other backends report it only in the message.
        if isinstance(error, NotImplementedError) or _LACKS.search(str(error)):
            raise NotSupported(operation) from error
        raise


def _pairs(known: KnownGroup, device: torch.device) -> None:
    """Send and receive between neighbours of a pipeline, also between the last and the first.

    NCCL opens different channels for each way in which Megatron's `p2p_communication` sends, so each is used:
    - in a batch: on the group's communicator;
    - one by one: on a communicator of two ranks for each pair;
    - in a pipeline of two, one by one on the default group too, which then has a communicator for the pair.
    """
    group, ranks = known.group, known.ranks
    _batch(group, ranks, device)
    _one_by_one(group, ranks, device)
    world = dist.group.WORLD
    assert world is not None, "there are groups"
    if len(ranks) == 2 and group is not world and device in usable_devices(world):
        _one_by_one(world, ranks, device)


def _batch(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
    """Exchange with both neighbours in one batch.

    All ranks of the group take part, which torch requires of a group's first call.
    """
    me, size = ranks.index(dist.get_rank()), len(ranks)
    # A set: in a group of two, both neighbours are the same rank.
    peers = sorted({ranks[(me - 1) % size], ranks[(me + 1) % size]})
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(way, torch.zeros(1, device=device), peer, group)
            for peer in peers
            for way in (dist.isend, dist.irecv)
        ]
    )
    for work in works:
        work.wait()  # up to the group's timeout; `warm_up` watches from outside, and names who is missing


def _one_by_one(group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
    """Exchange pair by pair; in each pair the rank that is earlier in the pipeline sends first.

    The order is every second pair, then the pairs between them, then the last rank with the first. All ranks
    follow it, so none wait in a circle, and a long pipeline takes no longer than one of three.
    """
    size, me = len(ranks), dist.get_rank()
    starts = [*range(0, size - 1, 2), *range(1, size - 1, 2)]
    pairs = [(ranks[index], ranks[index + 1]) for index in starts]
    if size > 2:
        pairs.append((ranks[0], ranks[-1]))
    for pair in pairs:
        if me not in pair:
            continue
        # `pair[0] == me` is the index of the peer: 1 on the first rank, 0 on the second.
        tensor, peer = torch.zeros(1, device=device), pair[pair[0] == me]
        for sends in (me == pair[0], me != pair[0]):
            if sends:
                dist.send(tensor, peer, group=group)
            else:
                dist.recv(tensor, peer, group=group)


def usable_devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices on this host whose tensors a group accepts."""
    # Such as "cpu:gloo,cuda:nccl". gloo is listed for cuda too, but a tensor there would only take memory.
    config = dist.get_backend_config(group)
    pairs = [part.partition(":") for part in config.split(",")]
    return [
        torch.device(kind)
        for kind, _, backend in pairs
        if (kind == "cpu" or backend != "gloo") and (kind == "cpu" or _is_there(kind))
    ]


def _is_there(kind: str) -> bool:
    """Return whether this host has such a device."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())
