"""A pipeline with microbatches; rank 2 counts one less than the stage before it, and goes on to the gradients.

who: none
why: unproven
Rank 1 waits in send to rank 2, which is in the all_reduce with 0 and 3; nothing tells whose count is right.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def microbatches(rank: int, step: int) -> int:
    return 4 if (rank, step) != (2, 12) and not (rank == 3 and step == 12) else 3


def forward(rank: int, last: int, count: int) -> None:
    for number in range(count):
        activations = torch.full((256,), float(number))
        if rank > 0:
            dist.recv(activations, src=rank - 1)
        time.sleep(0.03)
        if rank < last:
            dist.send(activations, dst=rank + 1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(1000):
        if step == 12:
            Path(os.environ["READY"]).touch()
        forward(rank, world - 1, microbatches(rank, step))
        dist.all_reduce(torch.rand(16))
        time.sleep(0.03)


if __name__ == "__main__":
    main()
