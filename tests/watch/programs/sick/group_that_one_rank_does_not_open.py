"""Ranks of one host open a new group; the host's name has another spelling on rank 2, which does not open it.

who: 2
why: unproven
Ranks 0, 1, 3 wait in new_group for rank 2, which is in the all_reduce of the next step.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class ExpertParallel:
    def __init__(self, hosts: dict[int, str]) -> None:
        self.members = [rank for rank, host in hosts.items() if host.lower() == "node-a"]
        self.is_member = hosts[dist.get_rank()] == "node-a"
        self.group: dist.ProcessGroup | None = None

    def setup(self) -> None:
        if self.is_member:
            self.group = dist.new_group(self.members, group_desc="experts", use_local_synchronization=True)


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.rand(4))
        time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    train(40)
    experts = ExpertParallel({0: "node-a", 1: "node-a", 2: "node-A", 3: "node-a"})
    Path(os.environ["READY"]).touch()
    experts.setup()
    train(10_000)
