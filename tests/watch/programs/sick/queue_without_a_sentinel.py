"""A prefetch thread fills a queue; on rank 1 its shard has fewer records, and it ends without a sentinel.

who: 1
why: unproven
Rank 1 waits in `queue.get` for a batch that nobody will put; the others wait for it in the step's all_reduce.
"""

import os
import queue
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def records(rank: int, world: int):
    count = 30 if rank == 1 else 100_000
    for number in range(count):
        yield torch.full((2, 4), float(number * world + rank))


class Prefetcher:
    def __init__(self, source, depth: int = 2) -> None:
        self._queue: queue.Queue[torch.Tensor] = queue.Queue(maxsize=depth)
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True, name="prefetch")
        self._thread.start()

    def _fill(self, source) -> None:
        for record in source:
            self._queue.put(record)

    def next(self) -> torch.Tensor:
        return self._queue.get()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = Prefetcher(records(rank, world))
    total = torch.zeros(4)
    for step in range(10_000):
        if step == 30:
            Path(os.environ["READY"]).touch()
        batch = batches.next()
        mean = batch.mean(0)
        dist.all_reduce(mean)
        total += mean / world
        time.sleep(0.05)


if __name__ == "__main__":
    main()
