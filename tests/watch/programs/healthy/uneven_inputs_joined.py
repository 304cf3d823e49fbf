"""DDP's `join`: one rank has more batches, long ones, and the others shadow its collectives until it is through."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


def batches(rank: int):
    yield from (torch.randn(4, 8) for _ in range(5))
    if rank == 1:
        Path(os.environ["READY"]).touch()
        for _ in range(8):
            ends = time.monotonic() + 1.2
            while time.monotonic() < ends:
                torch.fft.fft(torch.randn(512))
            yield torch.randn(4, 8)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    with model.join():
        for batch in batches(dist.get_rank()):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            count += 1
    total = torch.tensor(count)
    dist.all_reduce(total)
    assert total.item() == 5 * dist.get_world_size() + 8
    dist.destroy_process_group()


main()
