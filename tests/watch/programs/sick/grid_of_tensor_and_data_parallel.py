"""A grid of 2 x 2: tensor-parallel rows, data-parallel columns. Rank 3 sleeps in a throttle of its loader.

who: 3
why: unproven
Rank 2 waits for rank 3 in its row; rank 0 for rank 2 and rank 1 for rank 3 in their columns.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Grid:
    def __init__(self) -> None:
        rank = dist.get_rank()
        rows = [dist.new_group(ranks, group_desc="tensor") for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks, group_desc="data") for ranks in ([0, 2], [1, 3])]
        self.row, self.column = rows[rank // 2], columns[rank % 2]


class Throttle:
    """Lets so many samples through in a second; a budget below zero has to be paid back."""

    def __init__(self, budget: float) -> None:
        self.budget = budget

    def take(self, samples: float) -> None:
        self.budget -= samples
        if self.budget < 0:
            time.sleep(-self.budget)
            self.budget = 0.0


def step(grid: Grid, throttle: Throttle, cost: float) -> None:
    throttle.take(cost)
    activations = torch.rand(4)
    dist.all_reduce(activations, group=grid.row)
    gradients = activations * 2
    dist.all_reduce(gradients, group=grid.column)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid, throttle = Grid(), Throttle(100.0)
    holdfast.install(checkpoints=False, guard=False)
    for number in range(10_000):
        if number == 40:
            Path(os.environ["READY"]).touch()
        step(grid, throttle, cost=1e6 if (dist.get_rank(), number) == (3, 40) else 0.01)
        time.sleep(0.06)
