"""Private names of torch that Holdfast uses. They stand in this file only, each with what is done where a
version of torch does not have it: the library still works, and says less, or one sentence says which feature
does not.

Each is read where it is used, by `getattr` with a default: `tests/test_torch_private.py` takes them away.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist

from holdfast.errors import BadInput, LoadFailed

if TYPE_CHECKING:
    from torch._C import _distributed_c10d
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.tensor import DTensor

TorchStore: TypeAlias = "_distributed_c10d.Store"
"""`torch.distributed.Store`; the stubs of torch do not show that name."""


TcpStore: TypeAlias = "_distributed_c10d.TCPStore"
StorageInfo: TypeAlias = "_StorageInfo"
"""Torch DCP's file and byte range of a part."""
FlightRecord: TypeAlias = dict[str, Any]
"""Torch's JSON about the collectives of this process."""
Callee = Callable[..., object]
_TESTED = "Install a release of torch that Holdfast is tested with (docs/tested.md)."


# -- pickles of torch.save ----------------------------------------------------------------------------------


def rebuilders() -> dict[str, Callee]:
    """Return torch's functions that pickles of torch.save call, by their names in pickles. For one that torch
    does not have: the same by public names, or, where there are none, what says so when a pickle calls it."""
    utils, of_tensors = getattr(torch, "_utils", None), getattr(torch, "_tensor", None)
    found = {
        "torch.serialization._get_layout": getattr(torch.serialization, "_get_layout", _layout),
        "torch._tensor._rebuild_from_type_v2": getattr(of_tensors, "_rebuild_from_type_v2", None),
        "torch._utils._rebuild_tensor_v2": getattr(utils, "_rebuild_tensor_v2", _tensor_v2),
        "torch._utils._rebuild_tensor_v3": getattr(utils, "_rebuild_tensor_v3", _tensor_v3),
        "torch._utils._rebuild_parameter": getattr(utils, "_rebuild_parameter", _parameter),
        "torch._utils._rebuild_parameter_with_state": getattr(utils, "_rebuild_parameter_with_state", None),
        "torch._utils._rebuild_qtensor": getattr(utils, "_rebuild_qtensor", None),
        "torch._utils._rebuild_nested_tensor": getattr(utils, "_rebuild_nested_tensor", None),
        "torch._utils._rebuild_meta_tensor_no_storage": getattr(
            utils, "_rebuild_meta_tensor_no_storage", None
        ),
        "torch._utils._rebuild_sparse_tensor": getattr(utils, "_rebuild_sparse_tensor", None),
        "torch._utils._rebuild_wrapper_subclass": getattr(utils, "_rebuild_wrapper_subclass", None),
        "torch._utils._rebuild_device_tensor_from_numpy": getattr(
            utils, "_rebuild_device_tensor_from_numpy", None
        ),
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": getattr(
            utils, "_rebuild_device_tensor_from_cpu_tensor", None
        ),
    }
    return {path: partial(_absent, path) if make is None else make for path, make in found.items()}


def _absent(path: str, *args: object) -> object:
    raise LoadFailed(
        f"An object needs {path}, which torch {torch.__version__} does not have.",
        hint="Load it with the release of torch that saved it, and save what it holds as plain tensors.",
    )


def _layout(name: str) -> object:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name} is no layout")
    return found


class _Typed(Protocol):
    """A torch.TypedStorage, which has no annotations."""

    dtype: torch.dtype

    def untyped(self) -> torch.UntypedStorage: ...


def _tensor_v2(
    storage: _Typed,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    grad: bool,
    hooks: object,
    bits: object = None,
) -> torch.Tensor:
    return _tensor_v3(storage, offset, size, stride, grad, hooks, storage.dtype, bits)


def _tensor_v3(
    storage: _Typed,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    grad: bool,
    hooks: object,
    dtype: torch.dtype,
    bits: object = None,
) -> torch.Tensor:
    if bits:
        raise ValueError("its numbers are conjugated or negated when they are read")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that typed storages will go
        memory = storage.untyped()
    return torch.empty(0, dtype=dtype).set_(memory, offset, torch.Size(size), stride).requires_grad_(grad)


def _parameter(data: torch.Tensor, grad: bool, hooks: object) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, grad)


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage with a dtype, as `rebuilders` take it. Without torch's argument that keeps it from
    warning of its own removal, the warning is left out."""
    typed: Callable[..., torch.TypedStorage] = torch.TypedStorage
    try:
        made = typed(wrap_storage=storage, dtype=dtype, _internal=True)
    except TypeError:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            made = typed(wrap_storage=storage, dtype=dtype)
    return made


# -- tensors ------------------------------------------------------------------------------------------------


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, any other tensor itself. Without the name: what `to_local` gives
    outside autograd, which loses chunk metadata of a parameter."""
    # Not `to_local` in any case: with autograd it records, and may communicate.
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is None and hasattr(tensor, "to_local"):
        with torch.no_grad():
            local = tensor.to_local()
    return tensor if local is None else local


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Put another local tensor into a DTensor. Raises BadInput without the name."""
    if getattr(tensor, "_local_tensor", None) is None:
        raise BadInput(
            f"The parts of DTensors can't be put in place with torch {torch.__version__}.", hint=_TESTED
        )
    tensor._local_tensor = local


def group_of(tensor: ShardedTensor) -> dist.ProcessGroup | None:
    """Return a ShardedTensor's group; None where it can't be known: its shards may then have copies."""
    group: dist.ProcessGroup | None = getattr(tensor, "_process_group", None)
    return group


def base_of(tensor: object) -> object:
    """Return the tensor that a tensor is a view of; None where there is none, or none can be known."""
    return getattr(tensor, "_base", None)


# -- torch DCP ----------------------------------------------------------------------------------------------


def storage_info(path: str, offset: int, length: int) -> StorageInfo:
    """Make what a `.metadata` says of a part. Raises BadInput without the name, which is in the file."""
    from torch.distributed.checkpoint import filesystem

    make = getattr(filesystem, "_StorageInfo", None)
    if make is None:
        raise BadInput(f"torch {torch.__version__} does not let Holdfast write a .metadata.", hint=_TESTED)
    made: StorageInfo = make(path, offset, length)
    return made


def stages_in_background(stager: object) -> bool:
    """Return whether a stager of torch DCP returns a Future, from which `async_save` makes an
    AsyncSaveResponse. False for one of a torch that does not say it here."""
    return bool(getattr(getattr(stager, "_config", None), "use_async_staging", False))


# -- process groups -----------------------------------------------------------------------------------------


def default_store() -> TorchStore:
    """Return the default process group's store. Without the name it is looked up in `_world`; without both,
    ranks can't find each other: BadInput."""
    from torch.distributed import distributed_c10d

    getter = getattr(distributed_c10d, "_get_default_store", None)
    group = dist.group.WORLD
    if getter is None and group is not None:
        known = getattr(_world(), "pg_map", {}).get(group)
        getter = None if known is None else lambda: known[1]
    if getter is None:
        raise BadInput(
            f"The store of the default process group can't be found in torch {torch.__version__}.",
            hint=f"{_TESTED} A process that is alone can save with holdfast.Job(no_dist=True).",
        )
    store: TorchStore = getter()
    return store


def clone_store(store: TorchStore) -> TorchStore:
    """Make another client of a store, with a connection of its own; a store inside this process is returned
    itself."""
    if hasattr(store, "clone"):  # since torch 2.8
        clone: TorchStore = store.clone()
        return clone
    tcp = tcp_store(store)
    if tcp is None:
        return store
    made: TorchStore = type(tcp)(tcp.host, tcp.port, is_master=False, wait_for_workers=False)
    return made


def tcp_store(store: TorchStore) -> TcpStore | None:
    """Return the TCPStore that PrefixStores wrap; None if it is another store."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return inner if isinstance(inner, dist.TCPStore) else None  # type: ignore[attr-defined]


def is_foreign(group: object) -> bool:
    """Return whether a group is over another message store than the default group, as one that a program has
    made with processes of another world: its ranks are no ranks of this one. False where that can't be
    known."""
    made_by = getattr(_world(), "pg_map", {}).get(group) if group is not None else None
    theirs = tcp_store(made_by[1]) if made_by is not None else None
    ours = tcp_store(default_store())
    if theirs is None or ours is None:
        return False
    return (theirs.host, theirs.port) != (ours.host, ours.port)


class KnownGroup(NamedTuple):
    """A process group that this rank belongs to."""

    group: dist.ProcessGroup
    name: str
    """torch's own: a count of groups, or a digest of their ranks (`use_local_synchronization`)."""
    ranks: tuple[int, ...]
    description: str


_aborted: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups that torch still lists, and nobody can use."""


class _World(Protocol):
    """What torch knows of this process's groups."""

    pg_names: Mapping[dist.ProcessGroup, str]
    pg_group_ranks: Mapping[dist.ProcessGroup, Mapping[int, int]]
    """For each group, the rank in it of each global rank."""


def _world() -> _World | None:
    from torch.distributed import distributed_c10d

    world: _World | None = getattr(distributed_c10d, "_world", None)
    return world


def known_groups() -> list[KnownGroup]:
    """Return all process groups of this process, in the order of their creation, the default group first."""
    world = _world()
    if world is None or not dist.is_initialized():
        return []
    groups = []
    # A copy, as another thread may make a group meanwhile.
    for group, name in dict(world.pg_names).items():
        ranks = world.pg_group_ranks.get(group)
        if ranks is not None and group not in _aborted:
            described = str(getattr(group, "group_desc", "") or "")
            # torch maps global ranks to ranks in the group; `KnownGroup.ranks` is in the group's order.
            in_order = tuple(sorted(ranks, key=ranks.__getitem__))
            groups.append(
                KnownGroup(group, str(name), in_order, described if described != "undefined" else "")
            )
    return groups


def groups_made() -> int | None:
    """Return how many groups this process has named by counting. If it differs between ranks, the names of
    new groups differ, too."""
    count = getattr(_world(), "group_count", None)
    return None if count is None else int(count)


def devices(group: dist.ProcessGroup | None) -> list[torch.device]:
    """Return the devices whose tensors a group takes."""
    kinds = getattr(group, "_device_types", None)
    return [torch.device("cpu")] if kinds is None else [torch.device(kind) for kind in kinds]


def _backends(group: dist.ProcessGroup) -> Iterator[object]:
    get = getattr(group, "_get_backend", None)
    for device in devices(group):
        with suppress(RuntimeError):  # a device that this build of torch does not have
            if get is not None:
                yield get(device)


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Return the seconds after which a group's collectives fail; None where that can't be known."""
    for backend in _backends(group):
        given = getattr(getattr(backend, "options", None), "_timeout", None)
        if given is not None:
            return float(given.total_seconds())
    return None


def shortest_timeout() -> float | None:
    """Return the least timeout of the groups of this process; None where none can be known."""
    return min(filter(None, (timeout_of(one.group) for one in known_groups())), default=None)


def is_open(group: dist.ProcessGroup) -> bool | None:
    """Return whether a group has a communicator already; None where that can't be known."""
    for backend in _backends(group):
        # By name, as builds of torch without NCCL have no such class. Other backends do not tell.
        if type(backend).__name__ == "ProcessGroupNCCL":
            ask = getattr(backend, "_is_initialized", None)
            return None if ask is None else bool(ask())
    return None


_past: dict[str, int] = {}
"""The last group of each flight record that went with an earlier default group. The record keeps what those
groups did, and later groups have their names."""


def collectives_issued(group: dist.ProcessGroup) -> int | None:
    """Return how many collectives this rank has issued on a group; None where its backend does not tell."""
    ask = getattr(group, "_get_sequence_number_for_group", None)
    with suppress(RuntimeError):
        return None if ask is None else int(ask())
    return None


def forget_groups() -> None:
    """Leave all groups that there were until now out of flight records; before a default group is made."""
    with suppress(Exception):  # a program's `init_process_group` must not fail by it
        for name, record in _dumps(entries=False):
            _past[name] = max(map(int, record.get("pg_status", ())), default=-1)


def flight_records(entries: bool = False) -> list[FlightRecord]:
    """Return torch's flight records of this process: the last numbers of each group, and with `entries` each
    collective that is still known, except of a process that uses CUDA. Empty where torch has no recorder, or
    none for the backend."""
    records = []
    for name, record in _dumps(entries):
        last = _past.get(name, -1)
        status = record.get("pg_status", {}).items()
        record["pg_status"] = {key: value for key, value in status if int(key) > last}
        record["entries"] = [one for one in record.get("entries", ()) if int(one["pg_id"]) > last]
        records.append(record)
    return records


def _c10d() -> object:
    return getattr(getattr(torch, "_C", None), "_distributed_c10d", None)


def _dumps(entries: bool) -> Iterator[tuple[str, FlightRecord]]:
    c10d = _c10d()
    # For its entries the recorder asks CUDA about events, and a graph that another thread captures meanwhile
    # fails by that (pytorch 104487); the events may also be freed meanwhile.
    entries = entries and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    for name, dump in (
        ("_dump_fr_trace_json", getattr(c10d, "_dump_fr_trace_json", None)),
        ("_dump_nccl_trace_json", getattr(c10d, "_dump_nccl_trace_json", None)),
    ):
        if dump is not None:
            try:
                record = json.loads(dump(includeCollectives=entries))
            except (ValueError, RuntimeError):
                continue
            yield name, record


def operation_of(work: object) -> str:
    """Return torch's name of the operation that a handle is of, such as `ALLREDUCE`; "" if unknown."""
    ask, known = getattr(work, "_get_op_type", None), getattr(_c10d(), "OpType", None)
    if ask is None or known is None:
        return ""
    with suppress(RuntimeError, ValueError):
        name = str(known(ask()).name)
        return "" if name == "UNKNOWN" else name
    return ""


def is_eager() -> bool:
    """Return whether the default group is bound to a device, so that every new group splits its
    communicator."""
    return dist.is_initialized() and getattr(dist.group.WORLD, "bound_device_id", None) is not None


def abort(group: dist.ProcessGroup) -> None:
    """Abort what a group is doing on this rank, at once, without asking the other ranks."""
    # First, so that `known_groups` leaves it out even where the backend raises.
    _aborted.add(group)
    with suppress(Exception):  # not every backend can
        group.abort()
