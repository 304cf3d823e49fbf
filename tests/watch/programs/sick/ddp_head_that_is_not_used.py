"""A model with two heads under DDP; for one step rank 1 has only samples of the first task.

who: 1
why: mismatch
Rank 1 never reduces the second head's bucket and is in the all_gather of metrics; the others are in backward.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(16, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor, with_second: bool) -> torch.Tensor:
        hidden = self.trunk(inputs).relu()
        loss = self.first(hidden).mean()
        return loss + self.second(hidden).mean() if with_second else loss


def gather_metrics(loss: float) -> list[float]:
    found: list[float | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, loss)
    return [value for value in found if value is not None]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    model = DistributedDataParallel(TwoHeads(), bucket_cap_mb=0.01)
    for step in range(10_000):
        with_second = (dist.get_rank(), step) != (1, 40)
        loss = model(torch.rand(4, 16), with_second)
        if step == 40:
            Path(os.environ["READY"]).touch()
        loss.backward()
        gather_metrics(loss.item())
        model.zero_grad()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
