"""A rank of a job whose session ends in one way or another: python -m tests.groups.exits MODE FOLDER."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import holdfast
from tests.groups.jobs import end_with

if __name__ == "__main__":
    mode, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    grid = holdfast.Grid(int(os.environ["WORLD_SIZE"]), tp=2)
    with holdfast.session(grid, backend="gloo", timeout=40, stall_timeout=5, grace=5) as s:
        checkpoints = s.checkpoints(folder, timeout=20, stall_timeout=5)
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=s.groups["tp"])
            dist.all_reduce(torch.ones(1), group=s.groups["dp"])
        end_with(mode, rank, checkpoints)
    print(f"rank {rank} is through", flush=True)
