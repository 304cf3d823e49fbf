"""A pool of threads renders the batch: one rank's main thread waits for a future, the other ranks for its loss."""

import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def render(number: int, seconds: float) -> torch.Tensor:
    scene = torch.full((8, 8), float(number))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        scene = torch.nn.functional.avg_pool2d(scene[None, None], 3, 1, 1)[0, 0]
    return scene


def batch_of(pool: ThreadPoolExecutor, step: int, rank: int) -> torch.Tensor:
    is_long = (rank, step) == (0, 2)
    if is_long:
        Path(os.environ["READY"]).touch()
    futures = [pool.submit(render, number, 9.0 if is_long and number > 5 else 0.0) for number in range(8)]
    return torch.stack([future.result() for future in as_completed(futures)])


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
with ThreadPoolExecutor(2, thread_name_prefix="render") as pool:
    for step in range(4):
        loss = batch_of(pool, step, dist.get_rank()).pow(2).mean()
        dist.all_reduce(loss)
dist.barrier()
dist.destroy_process_group()
