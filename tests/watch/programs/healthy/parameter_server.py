"""A parameter server with a thread for each worker: one worker computes long, the server's other threads wait for it."""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Server:
    """Collects the gradients of all workers, then answers all (synchronous SGD)."""

    def __init__(self, groups: dict[int, dist.ProcessGroup]) -> None:
        self.groups = groups
        self.weights = torch.zeros(16)
        self.gathered = torch.zeros(16)
        self.barrier = threading.Barrier(len(groups), action=self.apply)

    def apply(self) -> None:
        self.weights -= 0.1 * self.gathered / len(self.groups)
        self.gathered.zero_()

    def serve(self, worker: int, rounds: int) -> None:
        gradient = torch.empty(16)
        for _ in range(rounds):
            dist.recv(gradient, src=worker, group=self.groups[worker])
            self.gathered += gradient
            self.barrier.wait()
            dist.send(self.weights, dst=worker, group=self.groups[worker])

    def run(self, rounds: int) -> None:
        threads = [
            threading.Thread(target=self.serve, args=(worker, rounds), name=f"worker-{worker}")
            for worker in self.groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def work(rank: int, group: dist.ProcessGroup, rounds: int) -> None:
    weights = torch.zeros(16)
    for number in range(rounds):
        gradient = weights + torch.randn(16)
        if (rank, number) == (2, 3):
            Path(os.environ["READY"]).touch()
            ends = time.monotonic() + 9
            while time.monotonic() < ends:
                gradient = torch.linalg.solve(torch.eye(16) * 2, gradient) + 1
        dist.send(gradient, dst=0, group=group)
        dist.recv(weights, src=0, group=group)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
rank, size = dist.get_rank(), dist.get_world_size()
pairs = {worker: dist.new_group([0, worker]) for worker in range(1, size)}
if rank == 0:
    Server(pairs).run(6)
else:
    work(rank, pairs[rank], 6)
dist.barrier()
dist.destroy_process_group()
