"""Two groups over all ranks, for metrics and for weights; rank 2 uses them in the other order.

who: 2
why: cycle
Rank 2 waits in `weights` for the others, which wait in `metrics` for rank 2.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Groups:
    def __init__(self) -> None:
        self.metrics = dist.new_group(group_desc="metrics")
        self.weights = dist.new_group(group_desc="weights")


def log_metrics(groups: Groups) -> None:
    dist.all_reduce(torch.rand(2), group=groups.metrics)


def average_weights(groups: Groups) -> None:
    dist.all_reduce(torch.rand(2), group=groups.weights)


def end_of_epoch(groups: Groups, flush_first: bool) -> None:
    if flush_first:
        log_metrics(groups)
        average_weights(groups)
    else:
        average_weights(groups)
        log_metrics(groups)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = Groups()
    holdfast.install(checkpoints=False, guard=False)
    for epoch in range(1000):
        if epoch == 30:
            Path(os.environ["READY"]).touch()
        end_of_epoch(groups, flush_first=not (dist.get_rank() == 2 and epoch == 30))
        time.sleep(0.1)
