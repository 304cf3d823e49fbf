"""One rank plans the layout for long: the others are in `new_group` already."""

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def cost(order: tuple[int, ...]) -> int:
    return sum(abs(a - b) * weight for weight, (a, b) in enumerate(itertools.pairwise(order), 1))


def plan(seconds: float) -> list[list[int]]:
    """Try all orders of the ranks, as long as there is time: all find the same."""
    ends = time.monotonic() + seconds
    while True:
        best = min(itertools.permutations(range(4)), key=cost)
        if time.monotonic() >= ends:
            return [list(best[:2]), list(best[2:])]


class Layout:
    def __init__(self, rank: int) -> None:
        if rank == 3:
            Path(os.environ["READY"]).touch()
        parts = plan(9.0 if rank == 3 else 0.0)
        self.everyone = dist.new_group(group_desc="model")
        self.parts = [dist.new_group(sorted(part), group_desc=f"part-{n}") for n, part in enumerate(parts)]
        self.mine = next(group for part, group in zip(parts, self.parts, strict=True) if rank in part)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
layout = Layout(dist.get_rank())
for _ in range(3):
    value = torch.ones(4)
    dist.all_reduce(value, group=layout.mine)
    dist.all_reduce(value, group=layout.everyone)
assert value[0] == 8
dist.destroy_process_group()
