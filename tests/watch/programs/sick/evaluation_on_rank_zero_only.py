"""Only rank 0 evaluates, and its metric gathers from all ranks inside `compute`.

who: 0
why: mismatch
Rank 0 is in an all_gather where ranks 1-3 are in the all_reduce of the next training step.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Accuracy:
    def __init__(self) -> None:
        self.right, self.seen = 0, 0

    def update(self, right: int, seen: int) -> None:
        self.right += right
        self.seen += seen

    def compute(self) -> float:
        mine = torch.tensor([self.right, self.seen])
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        right, seen = torch.stack(found).sum(0).tolist()
        return right / seen


def evaluate() -> float:
    metric = Accuracy()
    for _ in range(5):
        metric.update(3, 4)
    return metric.compute()


def train(epochs: int) -> None:
    for epoch in range(epochs):
        for _ in range(20):
            dist.all_reduce(torch.rand(8))
            time.sleep(0.05)
        if epoch >= 2:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 0:
                print(f"accuracy {evaluate():.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    train(100)
