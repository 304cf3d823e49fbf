"""Two things go wrong in one step: rank 0 looks for a file that never comes, rank 3 waits for a semaphore.

who: 0,3
why: unproven
Rank 0 polls, rank 3 waits in `acquire`; ranks 1 and 2 wait for both in the all_reduce.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Slots:
    """Bounds how many batches are in flight; `release` is forgotten where a batch has been skipped."""

    def __init__(self, count: int) -> None:
        self.semaphore = threading.Semaphore(count)

    def submit(self, skipped: bool) -> None:
        self.semaphore.acquire()
        if not skipped:
            self.semaphore.release()


def wait_for_vocabulary(path: Path) -> None:
    while not path.is_file():
        time.sleep(0.2)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, slots = dist.get_rank(), Slots(10)
    for step in range(10_000):
        if step == 50:
            Path(os.environ["READY"]).touch()
            if rank == 0:
                wait_for_vocabulary(Path("/nonexistent/vocabulary.json"))
        slots.submit(skipped=rank == 3 and step >= 40)
        dist.all_reduce(torch.rand(6))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
