"""Two replicas of two ranks: one replica has longer sequences and is still in its own steps when the other is through."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def tensor_parallel_layer(x: torch.Tensor, weight: torch.Tensor, group) -> torch.Tensor:
    partial = x @ weight
    dist.all_reduce(partial, group=group)
    return torch.tanh(partial)


def forward(length: int, weight: torch.Tensor, group) -> torch.Tensor:
    x = torch.randn(4, 8)
    for _ in range(length):
        x = tensor_parallel_layer(x, weight, group)
        time.sleep(0.02)
    return x.mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    replicas = [
        dist.new_group(ranks, group_desc=f"tp{number}") for number, ranks in enumerate(([0, 1], [2, 3]))
    ]
    data_parallel = [dist.new_group([rank_, rank_ + 2], group_desc="dp") for rank_ in range(2)][rank % 2]
    replica = rank // 2
    weight = torch.eye(8)
    for step in range(5):
        if (step, replica) == (2, 1):
            Path(os.environ["READY"]).touch()
        loss = forward(420 if (step, replica) == (2, 1) else 5, weight, replicas[replica])
        gradient = torch.full((8, 8), float(loss))
        dist.all_reduce(gradient, group=data_parallel)
        weight = weight - 0.01 * gradient
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
