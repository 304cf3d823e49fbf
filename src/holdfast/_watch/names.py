"""One table of the names of operations: what a log, a flight record and a roll call call the same one."""

from __future__ import annotations

import re

_FAMILIES = {
    # NCCL's barrier is an all_reduce of one element, and a log calls it so.
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
"""Names of operations whose sizes are the same on all ranks; of others, as of lists, they may differ."""
WAITS_FOR_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Operations that end nowhere before every rank has come."""
OF_SOME = frozenset({"send", "recv", "coalesced"})
"""Operations of some of a group's ranks: others have other numbers."""


def group_name(name: str, description: str | None) -> str:
    """Return what a group is called here."""
    return f"{name}:{description}" if description not in (None, "", "undefined") else name


def plain(name: str) -> str:
    """Return a name without its backend, underscores and peers, such as `allgatherbase`."""
    return re.sub(r"[_\s]|\d+(?:->|<-)\d+", "", name.rpartition(":")[2]).lower()


def family(name: str) -> str:
    """Return what an operation is, in torch's words. A name that the table lacks stands for itself."""
    return _FAMILY.get(plain(name), plain(name))
