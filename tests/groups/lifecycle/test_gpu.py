"""NCCL, on one GPU: a world of one. What takes two ranks can't be shown so: a communicator that waits, an
abort that frees."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast._core.torch_private import is_open, known_groups


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_a_world_of_one_over_nccl(eager: bool) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=device if eager else None,
    )
    try:
        world = known_groups()[0].group
        assert is_open(world) is eager
        before = torch.cuda.mem_get_info()[0]
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize()
        assert is_open(world) is True
        print(f"a communicator of one took {(before - torch.cuda.mem_get_info()[0]) >> 20} MiB")
        groups = holdfast.open_groups(holdfast.Grid(1), job=holdfast.Job(timeout=30))
        assert groups.distinct() == [world]
        report = holdfast.warm_up(job=holdfast.Job(timeout=30))
        assert report.groups == ()  # groups of one rank are left alone
        assert [hazard.kind for hazard in holdfast.audit()] == []
        groups.close(timeout=30)
    finally:
        dist.destroy_process_group()
    assert known_groups() == []
