"""Rank 0 decides by a bootstrap whether training stops early, and broadcasts its decision; the others wait for it."""

import os
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class EarlyStopping:
    def __init__(self, patience: int, long_at: int) -> None:
        self.patience, self.long_at = patience, long_at
        self.best, self.bad, self.checks = float("inf"), 0, 0

    def interval(self, losses: list[float], seconds: float) -> tuple[float, float]:
        ends = time.monotonic() + seconds
        means: list[float] = []
        while len(means) < 50 or time.monotonic() < ends:
            means.append(statistics.fmean(random.choices(losses, k=len(losses))))
        means.sort()
        return means[len(means) // 20], means[-len(means) // 20]

    def decides(self, losses: list[float]) -> bool:
        self.checks += 1
        is_long = self.checks == self.long_at
        if is_long:
            Path(os.environ["READY"]).touch()
        low, _ = self.interval(losses, 9.0 if is_long else 0.0)
        self.bad = 0 if low < self.best else self.bad + 1
        self.best = min(self.best, low)
        return self.bad >= self.patience


def should_stop(stopper: EarlyStopping, losses: list[float]) -> bool:
    flag = torch.zeros(1, dtype=torch.uint8)
    if dist.get_rank() == 0:
        flag[0] = stopper.decides(losses)
    dist.broadcast(flag, src=0)
    return bool(flag)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
stopper = EarlyStopping(patience=2, long_at=3)
losses: list[float] = []
for epoch in range(20):
    for _ in range(10):
        loss = torch.rand(1) / (1 + min(epoch, 3))
        dist.all_reduce(loss)
        losses.append(loss.item())
    if should_stop(stopper, losses[-10:]):
        break
dist.destroy_process_group()
