"""Rank 0 compresses a large checkpoint in one call, and the others wait for it in a barrier.

who: 0
why: unproven
Rank 0 works in C in `lzma.compress` for minutes; ranks 1-3 are in the barrier of the saving.
"""

import lzma
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Saver:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: dict[int, bytes] = {}

    def save(self, step: int, elements: int) -> None:
        if self.rank == 0:
            data = torch.rand(elements).numpy().tobytes()
            self.kept = {step: lzma.compress(data, preset=9)}
        dist.barrier()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    saver = Saver(dist.get_rank())
    for step in range(1000):
        dist.all_reduce(torch.rand(4))
        time.sleep(0.05)
        if step % 10 == 9:
            if step == 49:
                Path(os.environ["READY"]).touch()
            saver.save(step, 1000 if step != 49 else 60_000_000)


if __name__ == "__main__":
    main()
