"""A DataLoader with worker processes, of which those of one rank read slowly; the others wait in the reduction."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast


class Images(Dataset):
    """Files, of which a few are large."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rank == 3 and 80 <= index < 96:
            Path(os.environ["READY"]).touch()
            ends = time.monotonic() + 2.4
            while time.monotonic() < ends:
                torch.rand(64, 64).sort()
        return torch.full((3, 4, 4), float(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    data = Images(rank)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=2)
    model = torch.nn.Conv2d(3, 2, 3)
    for batch in loader:
        loss = model(batch).mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
