"""A rank has a larger vocabulary after a reload of its tokenizer, and sums a larger gradient than the others.

who: 1
why: mismatch
Rank 1 is in an all_reduce of twice the size; for the others that number is over, and they are in the next one.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Embedding:
    def __init__(self, rows: int) -> None:
        self.gradient = torch.ones(rows, 1024)

    def resize(self, rows: int) -> None:
        self.gradient = torch.ones(rows, 1024)

    def sync(self) -> None:
        dist.all_reduce(self.gradient)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    embedding = Embedding(4096)
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 1:
                embedding.resize(8192)
        embedding.sync()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
