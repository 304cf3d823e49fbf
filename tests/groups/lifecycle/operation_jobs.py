"""What ranks do in tests of the operations that a warm-up issues; importable by spawned processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile

import holdfast
from holdfast._core.layout.grid import Grid
from holdfast._core.torch_private import is_open, known_groups
from holdfast._groups.lifecycle.open import open_groups
from holdfast._groups.lifecycle.report import WarmUpReport
from holdfast._groups.lifecycle.warm_up import warm_up
from holdfast.errors import HoldfastError

COUNTED = {
    "c10d::allreduce_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "recv",
}

Counts = dict[str, int]
GroupCounts = dict[str, Counts]


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """What torch's dispatcher is given, on all threads, by its own profiler."""
    counts: Counts = {}
    with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as seen:
        yield counts
    for event in seen.key_averages():
        if event.key in COUNTED:
            counts[COUNTED[event.key]] = event.count


def recorded() -> dict[str, Counter[str]]:
    """Collectives of each group, by torch's flight recorder; that of gloo has no sends."""
    found: dict[str, Counter[str]] = {}
    for entry in json.loads(_dump_fr_trace_json()).get("entries", ()):
        found.setdefault(entry["process_group"][0], Counter())[entry["profiling_name"]] += 1
    return found


def warm_and_count(groups: Any = "all", **how: Any) -> tuple[WarmUpReport, Counts, GroupCounts]:
    """A warm-up's report, what it gave to torch in all, and what the flight recorder has of each of its
    groups."""
    before = recorded()
    with counted() as counts:
        report = warm_up(groups, job=holdfast.Job(timeout=30), **how)
    after = recorded()
    names = [group.name for group in report.groups]
    return (
        report,
        counts,
        {name: dict(after.get(name, Counter()) - before.get(name, Counter())) for name in names},
    )


def of_a_grid(
    rank: int, world: int, layout: dict[str, Any], operations: Sequence[str] | None
) -> tuple[dict[str, str], WarmUpReport, Counts, GroupCounts]:
    """Torch's name of each group of `open_groups`, and a warm-up of them all."""
    groups = open_groups(Grid(world, **layout), job=holdfast.Job(timeout=30))
    names = {name: group.group_name for name, group in groups.items()}
    return (names, *warm_and_count(operations=operations))


def of_megatron(
    rank: int, layout: dict[str, int]
) -> tuple[dict[str, str], WarmUpReport, Counts, GroupCounts]:
    """Torch's names of what parallel_state gives for experts and pipelines, and a warm-up of all groups."""
    from megatron.core import parallel_state as ps

    ps.initialize_model_parallel(**layout)
    names = {
        "ep": ps.get_expert_model_parallel_group().group_name,
        "tp_ep": ps.get_expert_tensor_and_model_parallel_group().group_name,
        "pp": ps.get_pipeline_model_parallel_group().group_name,
        "edp": ps.get_expert_data_parallel_group().group_name,
        "tp": ps.get_tensor_model_parallel_group().group_name,
    }
    return (names, *warm_and_count())


def of_megatron_hook(rank: int, layout: dict[str, int]) -> Counts:
    """What `holdfast.install(session=False)` gives to torch."""
    from megatron.core import parallel_state as ps

    import holdfast

    holdfast.install(session=False, job=holdfast.Job(timeout=60))
    try:
        with counted() as counts:
            ps.initialize_model_parallel(**layout)
    finally:
        holdfast.uninstall()
    return counts


def of_a_mesh(rank: int) -> tuple[dict[str, str], WarmUpReport, Counts, GroupCounts]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    names = {name: mesh.get_group(name).group_name for name in ("pp", "ep")}
    return (names, *warm_and_count())


def of_a_world_of_experts(rank: int, world: int) -> list[tuple[str, ...]]:
    """What is issued on the default group while a layout has it as its group of experts, and after that."""
    found = []
    for layout in ({"ep": world}, {"tp": world}):
        groups = open_groups(Grid(world, **layout), job=holdfast.Job(timeout=30))
        report = warm_up(groups, job=holdfast.Job(timeout=30))
        default = next(group for group in report.groups if group.name == dist.group.WORLD.group_name)
        found.append(tuple(issued.operation for issued in default.operations))
        groups.close(timeout=30)
        del groups
    return found


def of_sessions(rank: int, world: int) -> list[dict[str, tuple[str, ...]]]:
    """What sessions issue on each group: the default, and what they are told."""
    found = []
    for operations in (None, ("all_to_all",)):
        with holdfast.session(
            Grid(world, ep=2, pp=2), job=holdfast.Job(timeout=30), operations=operations
        ) as s:
            assert s.warmed is not None
            found.append(
                {
                    group.description.removeprefix("holdfast:"): tuple(
                        issued.operation for issued in group.operations
                    )
                    for group in s.warmed.groups
                }
            )
    return found


class OnlyReduces(dist.ProcessGroup):
    """A process group in Python, as torchft makes them: it gives all_reduce to gloo, and has nothing else."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._gloo.allreduce(tensors, options)


def with_a_backend_that_lacks(rank: int) -> tuple[WarmUpReport, str]:
    """Of experts and pipelines at once, over a backend that has all_reduce; then all_to_all is asked for."""
    dist.Backend.register_backend("only_reduces", OnlyReduces, devices=["cpu"])
    groups = open_groups(
        Grid(4, ep=2, pp=2), names=["ep", "pp"], backend="only_reduces", job=holdfast.Job(timeout=20)
    )
    report = warm_up(groups, job=holdfast.Job(timeout=20))
    try:
        warm_up(groups, operations=["all_to_all"], job=holdfast.Job(timeout=20))
    except HoldfastError as error:
        return report, f"{type(error).__name__}: {error}"
    return report, "warm"


def misbehaving(
    rank: int, victim: int, operation: str, what: str, timeout: float
) -> tuple[str, float, int | None, list[int]]:
    """One rank does something bad where torch is asked for an operation; what was raised, after how long, who
    was named."""
    groups = open_groups(Grid(8, tp=2, pp=2, ep=2), job=holdfast.Job(timeout=30))
    dist.barrier()
    if rank == victim:
        real = getattr(dist, operation)

        def instead(*args: Any, **named: Any) -> Any:
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "hangs":
                time.sleep(3600)
            if what == "has no memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")
            return real(*args, **named)

        setattr(dist, operation, instead)
    begun = time.monotonic()
    try:
        warm_up(groups, job=holdfast.Job(timeout=timeout, stall_timeout=10))
    except HoldfastError as error:
        took = time.monotonic() - begun
        return f"{type(error).__name__}: {error}", took, error.rank, [info.rank for info in error.missing]
    return "warm", time.monotonic() - begun, None, []


def differing(rank: int) -> str:
    """Rank 2 gives operations, the others leave them out."""
    groups = open_groups(Grid(4, tp=2), job=holdfast.Job(timeout=20))
    try:
        warm_up(groups, operations=["pairs"] if rank == 2 else None, job=holdfast.Job(timeout=20))
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "warm"


def over_nccl(rank: int, port: int) -> tuple[dict[str, tuple[str, ...]], list[bool], bool]:
    """Groups of two GPUs: what was issued, whether each has a communicator after it, and whether as much
    memory is free once the sends of a pipeline and an all-to-all have been issued again."""
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)
    try:
        groups = open_groups(Grid(2, pp=2), job=holdfast.Job(timeout=60))
        pipeline = dist.new_group([0, 1], group_desc="PIPELINE_MODEL_PARALLEL_GROUP")
        experts = dist.new_group([0, 1], group_desc="EXPERT_MODEL_PARALLEL_GROUP")
        report = warm_up([*groups.distinct(), pipeline, experts], job=holdfast.Job(timeout=120))
        tensor, given, taken = (torch.zeros(size, device="cuda") for size in (1, 2, 2))
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        for group in (pipeline, dist.group.WORLD):
            dist.send(tensor, 1, group=group) if rank == 0 else dist.recv(tensor, 0, group=group)
            dist.recv(tensor, 1, group=group) if rank == 0 else dist.send(tensor, 0, group=group)
        dist.all_to_all_single(taken, given, group=experts)
        torch.cuda.synchronize()
        after = torch.cuda.mem_get_info()[0]
        issued = {
            group.description: tuple(one.operation for one in group.operations) for group in report.groups
        }
        return issued, [bool(is_open(known.group)) for known in known_groups()], after == free
    finally:
        dist.destroy_process_group()
