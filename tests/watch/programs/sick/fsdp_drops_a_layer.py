"""FSDP2 over gloo with layer drop; the random state of rank 2 differs, and it skips a layer that the others run.

who: 2
why: mismatch
Rank 2 is in the reduce-scatter of its backward where the others are in an all_gather of the same number.
"""

import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(hidden).relu())


class Dropping(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(depth))
        self.random = random.Random(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.random.random() > 0.2:
                hidden = block(hidden)
        return hidden.square().mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Dropping(4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10_000):
        if step == 20:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 2:
                model.random.seed(12)
        model(torch.rand(2, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
