"""Metrics are computed in a thread pool of one worker; a task of rank 0 waits for a task of the same pool.

who: 0
why: unproven
On rank 0 the only worker waits in `future.result()` for a task that waits for the worker; the main thread, too.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")


def perplexity(losses: list[float]) -> float:
    return float(torch.tensor(losses).mean().exp())


def summarize(losses: list[float], rank: int) -> dict[str, float]:
    report = {"loss": losses[-1]}
    if rank == 0 and len(losses) > 45:
        report["perplexity"] = pool.submit(perplexity, losses).result()
    return report


def train(rank: int) -> None:
    losses: list[float] = []
    for step in range(10_000):
        weight = torch.randn(16)
        dist.all_reduce(weight)
        losses.append(float(weight.norm()))
        if step == 45:
            Path(os.environ["READY"]).touch()
        report = pool.submit(summarize, losses, rank)
        time.sleep(0.05)
        report.result()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    train(dist.get_rank())
