"""Metrics are reduced with handles that are looked at in the end; the evaluator is behind in them. Rank 1 wants a lock.

who: 1
why: unproven
Rank 1 rests in `Lock.acquire`, ranks 0 and 2 wait for it in the all_reduce of trainers; rank 3 evaluates, for nobody.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Metrics:
    def __init__(self) -> None:
        self.group = dist.new_group(list(range(dist.get_world_size())), group_desc="metrics")
        self.handles: list[dist.Work] = []

    def report(self, value: float) -> None:
        handle = dist.all_reduce(torch.tensor([value]), group=self.group, async_op=True)
        assert handle is not None
        self.handles.append(handle)


def evaluate(metrics: Metrics) -> None:
    for number in range(1000):
        score = torch.rand(64, 64)
        while number == 20:
            score = torch.linalg.matrix_exp(score / score.norm())
        metrics.report(float(score.mean()))


def train(metrics: Metrics, group: dist.ProcessGroup, cache: threading.Lock) -> None:
    for step in range(1000):
        metrics.report(1.0)
        if (dist.get_rank(), step) == (1, 40):
            Path(os.environ["READY"]).touch()
            cache.acquire()  # the error that left it locked was caught
        dist.all_reduce(torch.ones(16), group=group)
        time.sleep(0.02)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    metrics, trainers, cache = Metrics(), dist.new_group([0, 1, 2], group_desc="train"), threading.Lock()
    cache.acquire()
    if dist.get_rank() == 3:
        evaluate(metrics)
    else:
        train(metrics, trainers, cache)


if __name__ == "__main__":
    main()
