"""A loop skips bad samples by `continue`: one rank has a long run of them, the others are at the next reduction."""

import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def is_readable(sample: bytes) -> bool:
    return sample[0] < 250


class Loop:
    def __init__(self, rank: int) -> None:
        self.rank, self.rng = rank, random.Random(rank)
        self.skipped = 0
        self.began: float | None = None

    def sample(self, number: int) -> bytes:
        """Samples of rank 0 from the third on are damaged, until a good part of the file begins."""
        if self.rank == 0 and number == 2 and self.began is None:
            self.began = time.monotonic()
            Path(os.environ["READY"]).touch()
        is_bad = self.began is not None and time.monotonic() - self.began < 9
        return bytes([255 if is_bad else 1]) + self.rng.randbytes(256)

    def run(self, steps: int) -> None:
        done = 0
        while done < steps:
            sample = self.sample(done)
            if not is_readable(sample):
                self.skipped += 1
                if self.skipped % 10_000 == 0:
                    print(f"rank {self.rank} has skipped {self.skipped} samples", flush=True)
                continue
            loss = torch.tensor([sum(sample) / len(sample)])
            dist.all_reduce(loss)
            done += 1
        else:
            dist.barrier()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
Loop(dist.get_rank()).run(6)
dist.destroy_process_group()
