"""Weights are DTensors; rank 1 has been given the plots, and calls `full_tensor` alone.

who: 1
why: mismatch
Rank 1 is in the all_gather of `full_tensor`; the others are in the all_reduce of the gradients' norm.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast


class ShardedLayer:
    def __init__(self, mesh: DeviceMesh) -> None:
        self.weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])

    def step(self) -> torch.Tensor:
        local = self.weight.to_local()
        local -= 0.01 * torch.rand_like(local)
        return local.square().sum()


def histogram(tensor: DTensor) -> torch.Tensor:
    return torch.histc(tensor.full_tensor(), bins=4)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = ShardedLayer(mesh)
    plots = {1: 50}
    for step in range(10_000):
        if step == 50:
            Path(os.environ["READY"]).touch()
        if plots.get(dist.get_rank()) == step:
            print(histogram(layer.weight))
        norm = layer.step()
        dist.all_reduce(norm)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
