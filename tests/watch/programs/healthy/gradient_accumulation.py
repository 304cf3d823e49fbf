"""Gradient accumulation within `no_sync`: one rank's micro batches are longer, the others wait in the last backward."""

import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import holdfast

ACCUMULATE = 8


def micro_batches(step: int, rank: int):
    for _ in range(ACCUMULATE):
        yield torch.randn(4, 16), 1.1 if (step, rank) == (2, 0) else 0.0


def forward(model, x, seconds):
    out = model(x)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:  # a long sequence
        out = out + torch.softmax(x @ x.T, -1).sum() * 0
    return out


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        if (step, rank) == (2, 0):
            Path(os.environ["READY"]).touch()
        for number, (x, seconds) in enumerate(micro_batches(step, rank), 1):
            is_last = number == ACCUMULATE
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = forward(model, x, seconds).mean() / ACCUMULATE
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    dist.destroy_process_group()


main()
