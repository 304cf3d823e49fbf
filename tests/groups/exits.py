"""A rank of a job whose session ends in one way or another: python -m tests.groups.exits MODE FOLDER HOW."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import holdfast
from holdfast.groups.session import Session
from tests.groups.jobs import end_with

LIMITS = {"timeout": 40.0, "stall_timeout": 5.0, "grace": 5.0}


def in_a_block(mode: str, rank: int, folder: str) -> None:
    grid = holdfast.Grid(int(os.environ["WORLD_SIZE"]), tp=2)
    with holdfast.session(grid, backend="gloo", **LIMITS) as s:
        checkpoints = s.checkpoints(folder, timeout=20, stall_timeout=5)
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=s.groups["tp"])
            dist.all_reduce(torch.ones(1), group=s.groups["dp"])
        end_with(mode, rank, checkpoints)


def to_the_end(mode: str, rank: int, folder: str, destroys: bool) -> None:
    """As a framework does it: groups are its own, and it may destroy them itself."""
    dist.init_process_group("gloo")
    dist.new_group([0, 1])
    Session(**LIMITS, owns_world=True).until_exit()
    dist.all_reduce(torch.ones(1))
    end_with(mode, rank, holdfast.Checkpoints(folder, timeout=20, stall_timeout=5))
    if destroys:
        dist.destroy_process_group()


if __name__ == "__main__":
    mode, folder, how = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if how == "block":
        in_a_block(mode, rank, folder)
    else:
        to_the_end(mode, rank, folder, how == "destroys")
    print(f"rank {rank} is through", flush=True)
