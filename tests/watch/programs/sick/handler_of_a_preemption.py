"""A cluster warns with SIGUSR1; the handler saves at once, and on rank 2 it waits for an archive's pipe.

who: 2
why: unproven
Rank 2 is in the signal's handler, in a write to a pipe that nobody reads; the others are in the all_reduce.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Archive:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def add(self, tensor: torch.Tensor) -> None:
        data = tensor.numpy().tobytes()
        while data:
            data = data[os.write(self.writer, data) :]


class Preemption:
    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.archive = weights, Archive()
        signal.signal(signal.SIGUSR1, self.save)

    def save(self, number: int, frame: object) -> None:
        self.archive.add(self.weights)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    weights = torch.zeros(1 << 16)
    Preemption(weights)
    for step in range(10_000):
        if step == 50:
            Path(os.environ["READY"]).touch()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
        gradients = torch.rand(32)
        dist.all_reduce(gradients)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
