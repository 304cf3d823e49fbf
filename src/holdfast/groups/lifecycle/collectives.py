"""The smallest collective of each kind, which makes a group open its communicators."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from holdfast.torch_private import Known

OPERATIONS = ("all_reduce", "all_to_all", "pairs")


def issue(operation: str, known: Known, device: torch.device) -> None:
    """The smallest collective of a kind."""
    group, size = known.group, len(known.ranks)
    if operation == "all_reduce":
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    elif operation == "all_to_all":
        given = torch.zeros(size, device=device)
        dist.all_to_all_single(torch.empty_like(given), given, group=group)
    else:
        _pairs(known, device)


def _pairs(known: Known, device: torch.device) -> None:
    """Send and receive between neighbours, also from the last to the first: pipelines do, on communicators of
    two ranks.

    Pairs in a fixed order; in each the lower rank sends first. Every rank meets its pairs in that order, so
    none waits in a circle.
    """
    group, ranks, me = known.group, known.ranks, dist.get_rank()
    pairs = list(pairwise(ranks)) + ([(ranks[0], ranks[-1])] if len(ranks) > 2 else [])
    for one, other in pairs:
        if me not in (one, other):
            continue
        tensor, peer = torch.zeros(1, device=device), other if me == one else one
        for sends in ((me == one), (me != one)):
            if sends:
                dist.send(tensor, peer, group=group)
            else:
                dist.recv(tensor, peer, group=group)


def usable_devices(group: Any) -> list[torch.device]:
    """Of which devices tensors can be given to a group, here and now."""
    config = dist.get_backend_config(group)
    pairs = [part.partition(":") for part in config.split(",")]
    return [
        torch.device(kind)
        for kind, _, backend in pairs
        if (kind == "cpu" or backend != "gloo") and (kind == "cpu" or _is_there(kind))
    ]


def _is_there(kind: str) -> bool:
    """Has this machine such a device?"""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())
