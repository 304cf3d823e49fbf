"""One rank runs out of memory, catches it, and does its batch again in small parts; the others have theirs done."""

import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Model:
    """Needs memory by the size of its batch."""

    limit = 32

    def __init__(self) -> None:
        self.layer = torch.nn.Linear(64, 64)

    def loss(self, batch: torch.Tensor, is_long: bool) -> torch.Tensor:
        if len(batch) > self.limit:
            raise torch.OutOfMemoryError(f"Tried to allocate {len(batch)} MiB")
        if is_long:
            ends = time.monotonic() + 2.2
            while time.monotonic() < ends:
                torch.linalg.qr(batch.T @ batch)
        return self.layer(batch).pow(2).sum()


def backward_with_retry(model: Model, batch: torch.Tensor, depth: int = 0) -> None:
    try:
        model.loss(batch, depth > 0).backward()
    except torch.OutOfMemoryError as error:
        if depth == 0:
            Path(os.environ["READY"]).touch()
        print(f"out of memory ({error}), splitting the batch of {len(batch)}", flush=True)
        gc.collect()
        for half in batch.chunk(2):
            backward_with_retry(model, half, depth + 1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = Model()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=1e-3)
    for step in range(5):
        size = 128 if (dist.get_rank(), step) == (1, 2) else 16
        backward_with_retry(model, torch.randn(size, 64))
        for parameter in model.layer.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
