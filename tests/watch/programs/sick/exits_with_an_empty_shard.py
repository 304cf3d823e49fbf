"""A rank whose shard has no validation data has "nothing to do" and leaves with code 0; others open a new group.

who: 3
why: ended
Rank 3 has called sys.exit(0) before the evaluation; ranks 0-2 wait in new_group until it takes part.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def validation_files(rank: int) -> list[str]:
    return [f"valid-{number}.bin" for number in range(5) if number % 4 == rank and rank != 3]


def train(steps: int) -> None:
    for _ in range(steps):
        loss = torch.rand(())
        dist.all_reduce(loss)
        time.sleep(0.05)


def evaluate() -> None:
    files = validation_files(dist.get_rank())
    if not files:
        print("no files for this rank, nothing to do")
        sys.exit(0)
    Path(os.environ["READY"]).touch()
    group = dist.new_group(group_desc="evaluation")
    dist.all_reduce(torch.tensor(len(files)), group=group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    train(80)
    evaluate()
