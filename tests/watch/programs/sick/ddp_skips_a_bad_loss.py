"""DistributedDataParallel over gloo; rank 2 skips `backward` of a loss that is infinite, and saves the batch.

who: 2
why: unproven
Rank 2 writes to a pipe that nobody reads; the others are in `loss.backward()`, in DDP's all_reduce of a bucket.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


class CrashDump:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def save(self, batch: torch.Tensor) -> None:
        os.write(self.writer, bytes(batch.numel() * 4096))


def make_batch(rank: int, step: int) -> torch.Tensor:
    batch = torch.randn(8, 32)
    if (rank, step) == (2, 40):
        batch[0, 0] = float("inf")
    return batch


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    layers = [torch.nn.Linear(32, 32) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dump = CrashDump()
    for step in range(10_000):
        batch = make_batch(dist.get_rank(), step)
        loss = model(batch).square().mean()
        if step == 40:
            Path(os.environ["READY"]).touch()
        if not torch.isfinite(loss):
            dump.save(batch)
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
