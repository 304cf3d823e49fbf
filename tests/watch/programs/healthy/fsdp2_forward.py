"""FSDP2 (`fully_shard`): one rank augments its batch for long; the others gather the weights of the first layer."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast


class Augmented:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for number in range(6):
            image = torch.rand(4, 32)
            for _ in self.rounds(number):
                image = (image.roll(1, dims=1) + image) / 2
            yield image

    def rounds(self, number: int):
        if (self.rank, number) != (1, 3):
            yield from range(3)
            return
        Path(os.environ["READY"]).touch()
        ends = time.monotonic() + 9
        while time.monotonic() < ends:
            yield 0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in Augmented(dist.get_rank()):
        loss = (model(batch) - batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
