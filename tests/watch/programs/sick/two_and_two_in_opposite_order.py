"""Trainers and reference models share two groups; each half of the ranks begins with another one.

who: 0,1,2,3
why: cycle
Ranks 0 and 1 wait in `logits`, ranks 2 and 3 in `advantages`, each for the other half: no half is more to blame.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

ORDER = {True: ("logits", "advantages"), False: ("advantages", "logits")}


class Exchange:
    def __init__(self) -> None:
        self.groups = {name: dist.new_group(group_desc=name) for name in ("logits", "advantages")}

    def all(self, names: tuple[str, ...]) -> None:
        for name in names:
            values = torch.rand(8)
            dist.all_reduce(values, group=self.groups[name])


def run(exchange: Exchange, rank: int) -> None:
    for iteration in range(1000):
        is_trainer = rank < 2
        if iteration < 30:
            exchange.all(ORDER[True])
        else:
            Path(os.environ["READY"]).touch()
            exchange.all(ORDER[is_trainer])
        time.sleep(0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    exchange = Exchange()
    holdfast.install(checkpoints=False, guard=False)
    run(exchange, dist.get_rank())
