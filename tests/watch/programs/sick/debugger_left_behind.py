"""Someone has left a remote breakpoint in the code for steps with a high loss; rank 2 meets it.

who: 2
why: unproven
Rank 2 waits in `accept` for a debugger to attach; the others are in the all_reduce of the gradients.
"""

import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast


def wait_for_client(port: int = 0) -> socket.socket:
    with socket.create_server(("127.0.0.1", port)) as server:
        print(f"waiting for a debugger at {server.getsockname()}")
        client, _ = server.accept()
        return client


class Trainer:
    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def compute_loss(self, step: int) -> torch.Tensor:
        loss = self.model(torch.randn(4, 8)).square().mean()
        if step == 50 and self.rank == 2:
            loss = loss * 1e6
        if loss.item() > 1e3:
            wait_for_client()
        return loss

    def sync(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()

    def fit(self, steps: int) -> None:
        for step in range(steps):
            if step == 50:
                Path(os.environ["READY"]).touch()
            self.optimizer.zero_grad()
            self.compute_loss(step).backward()
            self.sync()
            self.optimizer.step()
            time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    Trainer().fit(100_000)


if __name__ == "__main__":
    main()
