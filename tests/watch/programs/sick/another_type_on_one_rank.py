"""Mixed precision is on by an environment variable; rank 3 lacks it and sums float64 where others sum float32.

who: 3
why: mismatch
Rank 3 is in an all_reduce of another type; for the others that number is over, and they are in the next one.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Precision:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def dtype(self, step: int) -> torch.dtype:
        return torch.float64 if self.rank == 3 and step >= 40 else torch.float32


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    precision = Precision(dist.get_rank())
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        gradients = torch.ones(4096, 1024, dtype=precision.dtype(step))
        dist.all_reduce(gradients)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
