"""Sequences are packed into bins before each epoch; rank 2 has far more short ones, and packing is quadratic.

who: 2
why: unproven
Rank 2 works in Python and will come after minutes; the others wait in the barrier before the epoch.
"""

import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def pack(lengths: list[int], room: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for length in lengths:
        for one in bins:
            if sum(one) + length <= room:
                one.append(length)
                break
        else:
            bins.append([length])
    return bins


class Epochs:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.random = random.Random(rank)

    def lengths(self, epoch: int) -> list[int]:
        count = 200_000 if self.rank == 2 and epoch == 2 else 200
        return [self.random.randint(1, 40) for _ in range(count)]

    def batches(self, epoch: int):
        bins = pack(self.lengths(epoch), 512)
        dist.barrier()
        yield from bins[:5]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    epochs = Epochs(dist.get_rank())
    for epoch in range(1000):
        if epoch == 2:
            Path(os.environ["READY"]).touch()
        for batch in epochs.batches(epoch):
            tokens = torch.tensor(float(sum(batch)))
            dist.all_reduce(tokens)
            time.sleep(0.2)


if __name__ == "__main__":
    main()
