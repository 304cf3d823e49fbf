"""`drop_last` is off on one rank by a default of its configuration: rank 3 has one batch more than the others.

who: 3
why: mismatch
Rank 3 is in one more all_reduce, where the others are in the all_gather of the epoch's losses.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def batches(samples: int, size: int, drop_last: bool):
    for first in range(0, samples, size):
        batch = torch.arange(first, min(first + size, samples), dtype=torch.float32)
        if len(batch) == size or not drop_last:
            yield batch


def gather_losses(losses: list[float]) -> list[float]:
    mine = torch.tensor([sum(losses)])
    found = torch.zeros(dist.get_world_size())
    dist.all_gather_into_tensor(found, mine)
    return found.tolist()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    config = {"drop_last": dist.get_rank() != 3}
    for epoch in range(10):
        losses = []
        samples = 80 if epoch < 2 else 83
        for batch in batches(samples, 4, **config):
            loss = batch.mean()
            dist.all_reduce(loss)
            losses.append(float(loss))
            time.sleep(0.05)
        if epoch == 2:
            Path(os.environ["READY"]).touch()
        gather_losses(losses)


if __name__ == "__main__":
    main()
