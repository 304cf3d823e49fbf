"""Trainers share two groups, which rank 1 takes in another order once; the evaluator, in neither, has failed before.

who: 1
why: cycle
Rank 3 raised a RuntimeError, which ends no training; ranks 0 and 2 wait for rank 1 in one group, rank 1 in the other.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Reducer:
    def __init__(self) -> None:
        self.dense = dist.new_group([0, 1, 2], group_desc="dense")
        self.sparse = dist.new_group([0, 1, 2], group_desc="sparse")

    def reduce(self, sparse_first: bool) -> None:
        groups = [self.sparse, self.dense] if sparse_first else [self.dense, self.sparse]
        for group in groups:
            dist.all_reduce(torch.ones(16), group=group)


def evaluate() -> None:
    time.sleep(1)
    raise RuntimeError("the benchmark is not on this host")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    reducer = Reducer()
    if dist.get_rank() == 3:
        evaluate()
    for step in range(1000):
        is_sparse = (dist.get_rank(), step) == (1, 60)
        if is_sparse:
            Path(os.environ["READY"]).touch()
        reducer.reduce(sparse_first=is_sparse)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
