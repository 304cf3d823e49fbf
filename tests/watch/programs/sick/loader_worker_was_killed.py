"""The worker of a DataLoader is killed on rank 0: an error in the loop, and a profiler's thread stays at the end.

who: 0
why: error
Rank 0 raised a RuntimeError that nobody has caught and is in threading._shutdown; others are in the all_reduce.
"""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info

import holdfast


class Crops(Dataset):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if (self.rank, index) == (0, 200) and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3, 2, 2), float(index))


class Profiler:
    def __init__(self) -> None:
        self.is_on = True
        self.samples: list[float] = []

    def sample(self) -> None:
        while self.is_on:
            self.samples.append(time.process_time())
            time.sleep(0.5)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    profiler = Profiler()
    threading.Thread(target=profiler.sample, name="profiler").start()
    loader = DataLoader(Crops(dist.get_rank()), batch_size=4, num_workers=1, prefetch_factor=2)
    for step, batch in enumerate(loader):
        mean = batch.mean()
        dist.all_reduce(mean)
        if step == 44:
            Path(os.environ["READY"]).touch()
        time.sleep(0.06)
    profiler.is_on = False


if __name__ == "__main__":
    main()
