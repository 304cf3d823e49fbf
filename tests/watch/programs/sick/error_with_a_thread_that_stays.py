"""A bad sample raises on rank 0; a heartbeat thread that is no daemon keeps its process alive.

who: 0
why: error
Rank 0 raised a ValueError that nobody has caught and is in threading._shutdown; others are in the all_reduce.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Heartbeat(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="heartbeat")
        self.stopped = threading.Event()
        self.beats = 0

    def run(self) -> None:
        while not self.stopped.wait(0.5):
            self.beats += 1


def sample(rank: int, step: int) -> torch.Tensor:
    length = -1 if rank == 0 and step == 60 else 8
    if length < 0:
        raise ValueError(f"sample {step} has the length {length}")
    return torch.ones(length)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    heartbeat = Heartbeat()
    heartbeat.start()
    for step in range(10_000):
        if step == 60:
            Path(os.environ["READY"]).touch()
        batch = sample(dist.get_rank(), step)
        dist.all_reduce(batch)
        time.sleep(0.05)
    heartbeat.stopped.set()


if __name__ == "__main__":
    main()
