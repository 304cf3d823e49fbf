"""Early stopping looks at the loss of the own rank only; rank 3 has ended its program, and a thread of it stays.

who: 3
why: ended
The main thread of rank 3 has ended without an error and is in threading._shutdown; others are in the all_reduce.
"""

import os
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


@dataclass
class EarlyStopping:
    patience: int = 5
    best: float = float("inf")
    bad: int = 0

    def __call__(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


@dataclass
class Uploader:
    """Uploads checkpoints in the order in which they come."""

    paths: queue.Queue = field(default_factory=queue.Queue)

    def start(self) -> None:
        threading.Thread(target=self.work, name="uploader").start()

    def work(self) -> None:
        while (path := self.paths.get()) is not None:
            print(f"uploading {path}")


def loss_of(rank: int, step: int) -> float:
    return 1.0 / (min(step, 55) + 1) if rank == 3 else 1.0 / (step + 1)


def fit(rank: int) -> None:
    should_stop = EarlyStopping()
    for step in range(100_000):
        if step == 60:
            Path(os.environ["READY"]).touch()
        weights = torch.rand(5)
        dist.all_reduce(weights)
        if should_stop(loss_of(rank, step)):
            print(f"rank {rank} stops at step {step}")
            break
        time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    Uploader().start()
    fit(dist.get_rank())
