"""Asynchronous reductions, whose end is polled in a loop with other small things to do; one rank begins its own late."""

import os
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Reducer:
    """Buckets under way, the oldest first."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[torch.Tensor, dist.Work]] = deque()
        self.polls = 0

    def begin(self, bucket: torch.Tensor) -> None:
        self.under_way.append((bucket, dist.all_reduce(bucket, async_op=True)))

    def finish(self) -> list[torch.Tensor]:
        done = []
        while self.under_way:
            bucket, work = self.under_way[0]
            if not work.is_completed():
                self.polls += 1
                time.sleep(0.01)
                continue
            self.under_way.popleft()
            done.append(bucket)
        return done


def compute_bucket(number: int, seconds: float) -> torch.Tensor:
    bucket = torch.full((16, 16), float(number))
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        bucket = torch.linalg.matrix_exp(bucket / (1 + bucket.norm()))
    return bucket


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
reducer = Reducer()
for step in range(4):
    for number in range(3):
        is_long = (dist.get_rank(), step, number) == (2, 2, 1)
        if is_long:
            Path(os.environ["READY"]).touch()
        reducer.begin(compute_bucket(number, 9.0 if is_long else 0.0))
    assert len(reducer.finish()) == 3
dist.destroy_process_group()
