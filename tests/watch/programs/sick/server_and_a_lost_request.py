"""Rank 0 serves parameters: it receives from any rank and answers. Rank 3 waits for an answer it did not ask for.

who: 3
why: unproven
Rank 3 waits to receive from rank 0, which idles for requests; ranks 1 and 2 wait for rank 3 in the workers' group.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


def serve() -> None:
    parameters = torch.zeros(4)
    request = torch.zeros(4)
    while True:
        peer = dist.recv(request)
        parameters += request
        dist.send(parameters, dst=peer)


class Worker:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.parameters = torch.zeros(4)
        self.known_version = 0

    def push_and_pull(self, version: int) -> None:
        if version > self.known_version:
            dist.send(torch.ones(4), dst=0)
        dist.recv(self.parameters, src=0)
        self.known_version = version

    def work(self, rank: int) -> None:
        for step in range(1, 10_000):
            if step == 40:
                Path(os.environ["READY"]).touch()
            self.push_and_pull(step if (rank, step) != (3, 40) else step - 1)
            dist.all_reduce(torch.rand(1), group=self.group)
            time.sleep(0.06)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workers = dist.new_group([1, 2, 3], group_desc="workers")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    if rank == 0:
        serve()
    else:
        Worker(workers).work(rank)


if __name__ == "__main__":
    main()
