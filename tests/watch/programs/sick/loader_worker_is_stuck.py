"""A DataLoader with one worker; the worker of rank 1 blocks in `__getitem__`, as on a dead network drive.

who: 1
why: unproven
Rank 1 waits in the DataLoader for its worker process; the others wait for rank 1 in the all_reduce.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import holdfast


class Images(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 1 and index == 120:
            threading.Event().wait()
        return torch.full((3, 2, 2), float(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    loader = DataLoader(Images(dist.get_rank()), batch_size=4, num_workers=1, prefetch_factor=2)
    for step, batch in enumerate(loader):
        if step == 29:
            Path(os.environ["READY"]).touch()
        mean = batch.mean((0, 2, 3))
        dist.all_reduce(mean)
        time.sleep(0.08)


if __name__ == "__main__":
    main()
