"""A barrier that would name those who are late: one rank warms up its kernels for longer than the others."""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def warm_up(model, shapes, at_least: float = 0.0) -> int:
    runs = 0
    ends = time.monotonic() + at_least
    while True:
        for shape in shapes:
            model(torch.empty(*shape).normal_())
            runs += 1
        if time.monotonic() >= ends:
            return runs


torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(minutes=5))
holdfast.install(checkpoints=False, guard=False)
rank = dist.get_rank()
convolution = torch.nn.Conv1d(4, 8, 3, padding=1)
shapes = [(batch, 4, length) for batch in (1, 4) for length in (16, 64, 256)]
dist.monitored_barrier(timeout=timedelta(seconds=60))
if rank == 2:
    Path(os.environ["READY"]).touch()
warm_up(convolution, shapes, 9.0 if rank == 2 else 0.0)
dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
dist.destroy_process_group()
