"""Groups are made from a dictionary of a configuration; on rank 1 its keys have another order.

who: 0,1
why: cycle
Ranks 0 and 1 are in new_group, and nothing tells which of them is wrong; ranks 2 and 3 are in a barrier. (Labelled
`unproven` before the roll call read the members of a group that opens.)
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

LAYOUT = {"world": [0, 1, 2, 3], "pair": [0, 1], "rest": [2, 3]}


def layout(rank: int) -> dict[str, list[int]]:
    if rank != 1:
        return LAYOUT
    return {name: LAYOUT[name] for name in sorted(LAYOUT)}


def open_all(rank: int) -> dict[str, object]:
    return {name: dist.new_group(ranks) for name, ranks in layout(rank).items()}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for _ in range(50):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    Path(os.environ["READY"]).touch()
    groups = open_all(dist.get_rank())
    dist.barrier(group=groups["world"])


if __name__ == "__main__":
    main()
