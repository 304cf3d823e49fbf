"""When a loss is not finite, a trainer broadcasts the last good weights; only rank 2 has seen the NaN.

who: 2
why: mismatch
Rank 2 is in a broadcast where the others are in an all_reduce under the same number.
"""

import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Guarded:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weights = torch.ones(6)
        self.good = self.weights.clone()

    def loss(self, step: int) -> float:
        return math.nan if (self.rank, step) == (2, 60) else 1.0 / (step + 1)

    def restore(self) -> None:
        dist.broadcast(self.good, src=0)
        self.weights.copy_(self.good)

    def step(self, number: int) -> None:
        loss = self.loss(number)
        if not math.isfinite(loss):
            self.restore()
            return
        gradient = torch.full((6,), loss)
        dist.all_reduce(gradient)
        self.weights -= 0.01 * gradient


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    trainer = Guarded(dist.get_rank())
    for number in range(10_000):
        if number == 60:
            Path(os.environ["READY"]).touch()
        trainer.step(number)
        time.sleep(0.05)
