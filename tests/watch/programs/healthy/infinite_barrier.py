"""Rank 0 downloads first; the others are at a barrier without end, in a group that is there for this alone."""

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class InfiniteBarrier:
    """Waits for however long rank 0 takes, whatever the timeout of the world is."""

    def __enter__(self):
        self.group = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
        return self

    def __call__(self) -> None:
        dist.monitored_barrier(self.group)

    def __exit__(self, *error: object) -> None:
        self()
        dist.destroy_process_group(self.group)


@contextmanager
def rank_zero_first():
    with InfiniteBarrier() as barrier:
        if dist.get_rank() > 0:
            barrier()
        yield
        if dist.get_rank() == 0:
            barrier()


def download(path: Path, parts: int) -> None:
    if path.exists():
        return
    Path(os.environ["READY"]).touch()
    with open(path.with_suffix(".part"), "wb") as file:
        for _ in range(parts):
            time.sleep(0.05)  # the network
            file.write(os.urandom(1 << 12))
    path.with_suffix(".part").rename(path)


torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
holdfast.install(checkpoints=False, guard=False)
path = Path(os.environ["RUN_FOLDER"], "mnist.bin")
with rank_zero_first():
    download(path, parts=180)
batch = torch.frombuffer(bytearray(path.read_bytes()[:64]), dtype=torch.uint8).float()
for _ in range(3):
    dist.all_reduce(batch)
dist.destroy_process_group()
