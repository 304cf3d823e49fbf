"""DDP with uneven data and no `join`: rank 3 has fewer batches and is in the validation's barrier.

who: 3
why: mismatch
Rank 3 is in a barrier where the others are in backward, in DDP's all_reduce of the same number.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast


class Fit:
    def __init__(self, rank: int) -> None:
        samples = 400 if rank != 3 else 200
        self.loader = DataLoader(TensorDataset(torch.rand(samples, 6)), batch_size=4)
        self.model = DistributedDataParallel(torch.nn.Linear(6, 1))
        self.rank = rank

    def train_epoch(self) -> None:
        for number, (batch,) in enumerate(self.loader):
            if number == 49:
                Path(os.environ["READY"]).touch()
            self.model.zero_grad()
            self.model(batch).mean().backward()
            time.sleep(0.05)

    def validate(self) -> None:
        dist.barrier()

    def run(self) -> None:
        for _ in range(10):
            self.train_epoch()
            self.validate()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    Fit(dist.get_rank()).run()
