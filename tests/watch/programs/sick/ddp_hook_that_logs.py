"""Gradients are logged in hooks of parameters; the queue of rank 0's logger is full, as its thread has ended.

who: 0
why: unproven
Rank 0 is in `loss.backward()`, in a hook that waits in `queue.put`; the others in backward wait for its bucket.
"""

import os
import queue
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


class GradientLog:
    def __init__(self, lines: int) -> None:
        self.queue: queue.Queue[float] = queue.Queue(maxsize=8)
        threading.Thread(target=self.write, args=(lines,), daemon=True, name="gradient-log").start()

    def write(self, lines: int) -> None:
        for _ in range(lines):
            self.queue.get()

    def hook(self, gradient: torch.Tensor) -> None:
        self.queue.put(float(gradient.norm()))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    log = GradientLog(lines=150 if dist.get_rank() == 0 else 1_000_000)
    for parameter in network.parameters():
        parameter.register_hook(log.hook)
    model = DistributedDataParallel(network)
    for step in range(10_000):
        if step == 39:
            Path(os.environ["READY"]).touch()
        model(torch.rand(4, 8)).sum().backward()
        model.zero_grad()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
