"""Rank 0 reads for all: a thread of each rank gets the batches by broadcast, and its main thread takes them from a queue."""

import os
import queue
import threading
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

BATCHES = 8
LARGE = 4


def read_batch(number: int) -> torch.Tensor:
    packed = zlib.compress(os.urandom(1024) * 64)
    if number == LARGE:
        Path(os.environ["READY"]).touch()
        ends = time.monotonic() + 9
        while time.monotonic() < ends:
            zlib.decompress(packed)
    return torch.frombuffer(bytearray(zlib.decompress(packed)[:64]), dtype=torch.uint8).float()


class Prefetcher:
    def __init__(self, depth: int = 1) -> None:
        self.group = dist.new_group(group_desc="data")
        self.batches: queue.Queue[torch.Tensor | None] = queue.Queue(depth)
        self.thread = threading.Thread(target=self.fill, name="prefetch", daemon=True)
        self.thread.start()

    def fill(self) -> None:
        for number in range(BATCHES):
            batch = read_batch(number) if dist.get_rank() == 0 else torch.empty(64)
            dist.broadcast(batch, src=0, group=self.group)
            self.batches.put(batch)
        self.batches.put(None)

    def __iter__(self):
        while (batch := self.batches.get()) is not None:
            yield batch
        self.thread.join()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    total = torch.zeros(64)
    for batch in Prefetcher():
        total += batch
        dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()


main()
