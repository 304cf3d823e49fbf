"""DistributedDataParallel: one rank is long in the backward of a function of its own, the others wait in theirs."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


class Recompute(torch.autograd.Function):
    """Computes its input again in the backward, which takes long for some inputs."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        if ctx.seconds > 1:
            Path(os.environ["READY"]).touch()
        ends = time.monotonic() + ctx.seconds
        while time.monotonic() < ends:
            torch.linalg.svdvals(x)
        return gradient * 2, None


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.last = torch.nn.Linear(16, 1)

    def forward(self, x, seconds):
        return self.last(Recompute.apply(self.first(x), seconds))


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
rank = dist.get_rank()
model = DistributedDataParallel(Net(), bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 16), 9.0 if (step, rank) == (3, 2) else 0.0).sum()
    loss.backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
