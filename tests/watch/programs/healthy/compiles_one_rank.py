"""One rank gets batches of new shapes and compiles its step again and again; the others wait for its gradients."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train_step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).pow(2).mean()
    loss.backward()
    return loss.detach()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(8) for _ in range(6)))
    for _ in range(2):
        train_step(model, torch.ones(2, 8))
        dist.barrier()
    if rank == 1:
        Path(os.environ["READY"]).touch()
        ends = time.monotonic() + 9
        length = 3
        while time.monotonic() < ends:
            torch.compiler.reset()
            compiled = torch.compile(train_step, backend="aot_eager", dynamic=False)
            compiled(model, torch.ones(length, 8))
            length += 1
    else:
        train_step(model, torch.ones(2, 8))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    dist.barrier()
    dist.destroy_process_group()


main()
