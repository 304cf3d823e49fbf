"""Logging of metrics must never end a training: `except: pass`. On rank 3 the error comes before the collective.

who: 3
why: mismatch
Rank 3 has left out the gather of the metrics and is in the next all_reduce; the others are in the all_gather.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def log_metrics(metrics: dict[str, float], keys: tuple[str, ...]) -> None:
    try:
        values = torch.tensor([metrics[key] for key in keys])
        found = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(found, values)
    except Exception:
        pass


def step(rank: int, number: int) -> dict[str, float]:
    weights = torch.rand(12)
    dist.all_reduce(weights)
    metrics = {"loss": float(weights.sum()), "norm": float(weights.norm())}
    if (rank, number) == (3, 40):
        del metrics["norm"]
    return metrics


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for number in range(10_000):
        if number == 40:
            Path(os.environ["READY"]).touch()
        log_metrics(step(dist.get_rank(), number), ("loss", "norm"))
        time.sleep(0.05)
