"""Normalizes names of operations, which differ between logs, flight records and roll calls."""

from __future__ import annotations

import re

_FAMILIES = {
    # NCCL's barrier is an all_reduce of one element, and is logged as such.
    "all_reduce": "allreduce allreducebarrier allreducesparse sparseallreduce allreducecoalesced",
    # A list of tensors or one tensor: the backend's call is the same.
    "all_gather": "allgather allgatherbase allgathercoalesced allgatherintotensor "
    "allgatherintotensorcoalesced",
    "reduce_scatter": "reducescatter reducescatterbase reducescattertensor reducescattertensorcoalesced",
    "all_to_all": "alltoall alltoallbase alltoallsingle",
    "broadcast": "broadcastoop",
    "reduce": "reduceoop",
    "recv": "recvanysource",
}
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names.split()}
SAME_SIZES = frozenset({"allreduce", "broadcast", "allgatherbase", "reducescatterbase"})
"""Names of operations with the same sizes on all ranks; those of others, as of lists, may differ."""
WAITS_FOR_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations that complete on no rank before every rank has entered them."""
OF_SOME = frozenset({"send", "recv", "coalesced"})
"""Operations between some ranks of a group: sequence numbers differ between ranks."""


def group_name(name: str, description: str | None) -> str:
    """Return Holdfast's name for a group."""
    return f"{name}:{description}" if description not in (None, "", "undefined") else name


def plain(name: str) -> str:
    """Return a name without its backend, underscores and peers, such as `allgatherbase`."""
    return re.sub(r"[_\s]|\d+(?:->|<-)\d+", "", name.rpartition(":")[2]).lower()


def family(name: str) -> str:
    """Return the common name of an operation; a name that the table lacks is its own."""
    return _FAMILY.get(plain(name), plain(name))
