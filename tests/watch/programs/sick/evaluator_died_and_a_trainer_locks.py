"""The evaluator, rank 3, has died of an error. The trainers do not need it; rank 1 wants a lock that is never released.

who: 1
why: unproven
Ranks 0 and 2 wait in the all_reduce of the trainers for rank 1. No trainer waits for rank 3.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def evaluate() -> None:
    for _ in range(20):
        score = torch.linalg.matrix_exp(torch.rand(32, 32))
        time.sleep(0.02)
    raise ValueError(f"the score is {float(score.mean())}")


def train(group: dist.ProcessGroup) -> None:
    cache = threading.Lock()
    for step in range(1000):
        if step == 60:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 1:
                cache.acquire()
                cache.acquire()
        dist.all_reduce(torch.ones(16), group=group)
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainers = dist.new_group([0, 1, 2], group_desc="train")
    holdfast.install(checkpoints=False, guard=False)
    if dist.get_rank() == 3:
        evaluate()
    else:
        train(trainers)


if __name__ == "__main__":
    main()
