"""Evaluation results are gathered as objects; rank 2 has them in its cache and leaves the gather out.

who: 2
why: mismatch
Rank 2 is in the barrier after the gather; the others are in the first all_gather of gather_object.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Results:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cache: dict[str, list] = {}

    def of(self, name: str, accuracy: float) -> list:
        if name in self.cache:
            return self.cache[name]
        found = [None] * dist.get_world_size() if self.rank == 0 else None
        dist.gather_object({"rank": self.rank, "accuracy": accuracy}, found, dst=0)
        self.cache[name] = found or []
        return self.cache[name]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    results = Results(rank)
    for number in range(1000):
        name = f"task-{number}"
        if number == 20:
            Path(os.environ["READY"]).touch()
            name = "task-3" if rank == 2 else name
        results.of(name, 0.5)
        dist.barrier()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
