"""Nobody waits long: a mesh of 2 x 2, tensor parallel layers as DTensors, and gradients reduced across replicas."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast


class FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(32, 64)
        self.down = torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    layers = [
        parallelize_module(FeedForward(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for _ in range(2)
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop, begun, step = torch.zeros(1), time.monotonic(), 0
    while not stop.item():
        torch.manual_seed(step * 2 + mesh.get_local_rank("dp"))
        x = torch.randn(16, 32)
        model(x).pow(2).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == 5:
            Path(os.environ["READY"]).touch()
        stop.fill_(time.monotonic() - begun > 12)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
