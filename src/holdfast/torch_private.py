"""What Holdfast needs of torch.distributed that torch keeps to itself. These names stand in this file only,
each with what is done where a version of torch has it no more: the library works without, and says less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist

from holdfast.errors import BadInput

if TYPE_CHECKING:
    from torch._C import _distributed_c10d

Store: TypeAlias = "_distributed_c10d.Store"
"""What `torch.distributed.Store` is; the stubs of torch do not show that name."""


def default_store() -> Store:
    """The default process group's store."""
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    if getter is None:
        raise BadInput(
            "This torch has no accessible default store.",
            hint="Pass roster=TorchRoster(store, rank, world_size) with a store of your own.",
        )
    store: Store = getter()
    return store


def clone_store(store: Store) -> Store:
    """Another client of a store, with a connection of its own; a store inside this process is its own
    clone."""
    if hasattr(store, "clone"):  # since torch 2.8
        clone: Store = store.clone()
        return clone
    # PrefixStores stand around the one that has the connection.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    tcp_store = dist.TCPStore  # type: ignore[attr-defined]
    if not isinstance(store, tcp_store):
        return store
    return tcp_store(store.host, store.port, is_master=False, wait_for_workers=False)


def waits_by_itself(store: Store) -> bool:
    """Does a client of this store wait for a key in its own code, and ask nobody meanwhile? TCPStore's
    does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]


class Known(NamedTuple):
    """A process group that this rank belongs to."""

    group: dist.ProcessGroup
    name: str
    """torch's own: a count of groups, or a digest of their ranks (`use_local_synchronization`)."""
    ranks: tuple[int, ...]
    description: str


_aborted: WeakSet[dist.ProcessGroup] = WeakSet()
"""Torch still lists them; nobody can use them."""


class _World(Protocol):
    """What torch knows of this process's groups."""

    pg_names: Mapping[dist.ProcessGroup, str]
    pg_group_ranks: Mapping[dist.ProcessGroup, Mapping[int, int]]
    """For each group, the rank in it of each global rank."""


def _world() -> _World | None:
    from torch.distributed import distributed_c10d

    world: _World | None = getattr(distributed_c10d, "_world", None)
    return world


def known_groups() -> list[Known]:
    """All process groups of this process, in the order of their making, the default group first."""
    world = _world()
    if world is None or not dist.is_initialized():
        return []
    groups = []
    # A copy, as another thread may make a group meanwhile.
    for group, name in dict(world.pg_names).items():
        ranks = world.pg_group_ranks.get(group)
        if ranks is not None and group not in _aborted:
            described = str(getattr(group, "group_desc", "") or "")
            # torch keeps the number in the group by global rank; listed is in the group's order.
            in_order = tuple(sorted(ranks, key=ranks.__getitem__))
            groups.append(Known(group, str(name), in_order, described if described != "undefined" else ""))
    return groups


def groups_made() -> int | None:
    """How many groups this process has named by counting: equal on all ranks, or the names of new groups
    differ."""
    count = getattr(_world(), "group_count", None)
    return None if count is None else int(count)


def devices(group: dist.ProcessGroup | None) -> list[torch.device]:
    """Of which devices a group takes tensors."""
    kinds = getattr(group, "_device_types", None)
    return [torch.device("cpu")] if kinds is None else [torch.device(kind) for kind in kinds]


def _backends(group: dist.ProcessGroup) -> Iterator[object]:
    get = getattr(group, "_get_backend", None)
    for device in devices(group):
        with suppress(RuntimeError):  # a device that this build of torch does not have
            if get is not None:
                yield get(device)


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Seconds after which its collectives fail; None where that can't be known."""
    for backend in _backends(group):
        given = getattr(getattr(backend, "options", None), "_timeout", None)
        if given is not None:
            return float(given.total_seconds())
    return None


def is_open(group: dist.ProcessGroup) -> bool | None:
    """Has it a communicator already? None where that can't be known."""
    for backend in _backends(group):
        # By its name, as builds of torch without NCCL have no such class. Of other backends it is not known.
        if type(backend).__name__ == "ProcessGroupNCCL":
            ask = getattr(backend, "_is_initialized", None)
            return None if ask is None else bool(ask())
    return None


def is_eager() -> bool:
    """Is the default group bound to a device, so that every new group splits its communicator?"""
    return dist.is_initialized() and getattr(dist.group.WORLD, "bound_device_id", None) is not None


def abort(group: dist.ProcessGroup) -> None:
    """End what a group is doing, here and now, without asking the others."""
    # First, so that it is not listed any more even where the backend raises.
    _aborted.add(group)
    with suppress(Exception):  # not every backend can
        group.abort()
