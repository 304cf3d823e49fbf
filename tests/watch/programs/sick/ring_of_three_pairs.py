"""Halo exchange of a domain that is a ring of three: each rank begins with its right neighbour's group.

who: 0,1,2
why: cycle
Rank 0 waits in the pair (0, 1), rank 1 in (1, 2), rank 2 in (2, 0); rank 3, which has no part, waits in the world.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

PAIRS = ((0, 1), (1, 2), (2, 0))


class Halo:
    def __init__(self) -> None:
        self.groups = [dist.new_group(sorted(pair), group_desc=f"halo{pair}") for pair in PAIRS]
        self.rank = dist.get_rank()

    def exchange(self, in_order: bool) -> None:
        if self.rank == 3:
            return
        mine = [number for number, pair in enumerate(PAIRS) if self.rank in pair]
        if not in_order:
            mine.sort(key=lambda number: PAIRS[number][0] != self.rank)
        for number in mine:
            dist.all_reduce(torch.rand(4), group=self.groups[number])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    halo = Halo()
    holdfast.install(checkpoints=False, guard=False)
    for step in range(1000):
        if step == 25:
            Path(os.environ["READY"]).touch()
        halo.exchange(in_order=step < 25)
        residual = torch.rand(())
        dist.all_reduce(residual)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
