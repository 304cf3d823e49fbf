"""Checkpoints are averaged in a ThreadPoolExecutor; the thread of rank 1 is stuck before its collective.

who: 1
why: unproven
Main threads are in `future.result()`; side threads are in the all_reduce, that of rank 1 opens a pipe.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Averager:
    def __init__(self, rank: int) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="averager")
        self.group = dist.new_group(group_desc="averages")
        self.rank = rank
        self.folder = Path(tempfile.mkdtemp())

    def snapshot(self, number: int) -> bytes:
        path = self.folder / f"{number}"
        if (self.rank, number) == (1, 8):
            os.mkfifo(path)
        else:
            path.write_bytes(b"weights")
        return path.read_bytes()

    def average(self, number: int) -> float:
        data = self.snapshot(number)
        tensor = torch.tensor([float(len(data))])
        dist.all_reduce(tensor, group=self.group)
        return float(tensor) / dist.get_world_size()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    averager = Averager(dist.get_rank())
    holdfast.install(checkpoints=False, guard=False)
    for number in range(1000):
        if number == 8:
            Path(os.environ["READY"]).touch()
        running = averager.pool.submit(averager.average, number)
        time.sleep(0.3)
        running.result()


if __name__ == "__main__":
    main()
