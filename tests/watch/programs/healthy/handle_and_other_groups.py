"""Rank 0 begins the reduction of its metrics, waits for the evaluators, of which one is slow, and only then for its handle."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Coordinator:
    """Trainers are ranks 0 and 1, evaluators are ranks 2 and 3; rank 0 talks to both."""

    def __init__(self) -> None:
        self.metrics = dist.new_group([0, 1], group_desc="metrics")
        self.control = dist.new_group([0, 1], group_desc="control")
        self.evaluation = dist.new_group([0, 2, 3], group_desc="evaluation")

    def coordinate(self) -> None:
        values = torch.ones(8)
        handle = dist.all_reduce(values, group=self.metrics, async_op=True)
        dist.all_reduce(torch.zeros(1), group=self.evaluation)
        dist.broadcast(torch.ones(1), src=0, group=self.control)
        handle.wait()

    def train(self) -> None:
        dist.broadcast(torch.zeros(1), src=0, group=self.control)
        dist.all_reduce(torch.ones(8), group=self.metrics)

    def evaluate(self, seconds: float) -> None:
        score, ends = torch.rand(64, 64), time.monotonic() + seconds
        while time.monotonic() < ends:
            score = torch.linalg.matrix_exp(score / score.norm())
        dist.all_reduce(score.sum().reshape(1), group=self.evaluation)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank, coordinator = dist.get_rank(), Coordinator()
    for step in range(4):
        if rank == 0:
            coordinator.coordinate()
        elif rank == 1:
            coordinator.train()
        else:
            is_long = (rank, step) == (2, 2)
            if is_long:
                Path(os.environ["READY"]).touch()
            coordinator.evaluate(12.0 if is_long else 0.0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
