"""Threads of a rank meet at a threading.Barrier before each step; on rank 1 one of them has gone to sleep.

who: 1
why: unproven
Rank 1 waits at the barrier of its threads, and its reader sleeps in a retry; the others are in the all_gather.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Readers:
    def __init__(self, count: int, naps: dict[tuple[int, int], float]) -> None:
        self.barrier = threading.Barrier(count + 1)
        self.naps = naps
        for number in range(count):
            threading.Thread(target=self.read, args=(number,), name=f"reader-{number}", daemon=True).start()

    def read(self, number: int) -> None:
        step = 0
        while True:
            time.sleep(self.naps.get((number, step), 0.01))
            self.barrier.wait()
            step += 1


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    readers = Readers(3, {(2, 40): 86_400.0} if rank == 1 else {})
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        readers.barrier.wait()
        found = [torch.zeros(2) for _ in range(world)]
        dist.all_gather(found, torch.rand(2))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
