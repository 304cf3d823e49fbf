"""Metrics go to rank 0: it calls `reduce`, and by an old branch of code the others call `all_reduce`.

who: 0
why: mismatch
Rank 0 is in a reduce where ranks 1-3 are in an all_reduce under the same number.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def collect_on_main(values: dict[str, float]) -> dict[str, float]:
    tensor = torch.tensor(list(values.values()))
    dist.reduce(tensor, dst=0)
    return dict(zip(values, tensor.tolist(), strict=True))


def collect(values: dict[str, float]) -> dict[str, float]:
    tensor = torch.tensor(list(values.values()))
    dist.all_reduce(tensor)
    return dict(zip(values, tensor.tolist(), strict=True))


def run(rank: int) -> None:
    for epoch in range(1000):
        for _ in range(10):
            dist.all_reduce(torch.rand(8))
            time.sleep(0.05)
        metrics = {"loss": 0.1 * rank, "accuracy": 0.9}
        if epoch == 6:
            Path(os.environ["READY"]).touch()
        if epoch % 7 == 6 and rank == 0:
            print(epoch, collect_on_main(metrics))
        else:
            collect(metrics)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    run(dist.get_rank())
