"""A thread gathers lengths of the next batch while the main thread sums gradients, both in the world's group.

who: 2
why: mismatch
On rank 2 the prefetch thread was first: its all_gather has the number that all_reduce has on the others.
"""

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class NextLengths:
    def __init__(self, length: int, delay: float) -> None:
        self.result: Future[list[torch.Tensor]] = Future()
        threading.Thread(target=self._gather, args=(length, delay), name="next-lengths", daemon=True).start()

    def _gather(self, length: int, delay: float) -> None:
        time.sleep(delay)
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.tensor([length]))
        self.result.set_result(found)


def step(number: int, rank: int) -> None:
    delays = (0.03, 0.06) if number < 30 or rank != 2 else (0.5, 0.0)
    lengths = NextLengths(16 + rank, delays[1] + (0.5 if number >= 30 and rank != 2 else 0.0))
    time.sleep(delays[0])
    gradients = torch.rand(10)
    dist.all_reduce(gradients)
    lengths.result.result()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for number in range(10_000):
        if number == 30:
            Path(os.environ["READY"]).touch()
        dist.barrier()
        step(number, dist.get_rank())
