"""Samples are decoded by a multiprocessing.Pool; a worker of rank 2 is killed, and its task is lost for ever.

who: 2
why: unproven
Rank 2 waits in `Pool.map` for the result of a task whose process is gone; the others are in reduce_scatter.
"""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def decode(task: tuple[int, int, int]) -> int:
    rank, step, sample = task
    if (rank, step, sample) == (2, 25, 1):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
    return sample * sample


def main() -> None:
    torch.set_num_threads(1)
    pool = multiprocessing.get_context("fork").Pool(2)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(10_000):
        if step == 25:
            Path(os.environ["READY"]).touch()
        samples = pool.map(decode, [(rank, step, sample) for sample in range(4)], chunksize=1)
        shares = torch.tensor(samples, dtype=torch.float32).repeat(world)
        mine = torch.zeros(len(samples))
        dist.reduce_scatter_tensor(mine, shares)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
