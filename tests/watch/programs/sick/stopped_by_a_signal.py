"""The operator of a shared host has stopped one process to look at it, and has forgotten it.

who: 1
why: stopped
Rank 1 has SIGSTOP; the others are in the gradients' all_reduce.
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Loop:
    def __init__(self) -> None:
        self.step = 0
        self.hooks = []

    def before_step(self, hook):
        self.hooks.append(hook)
        return hook

    def run(self, steps: int) -> None:
        for self.step in range(steps):
            for hook in self.hooks:
                hook(self.step)
            gradients = torch.randn(64)
            dist.all_reduce(gradients)
            time.sleep(0.05)


loop = Loop()


@loop.before_step
def mark(step: int) -> None:
    if step == 70:
        Path(os.environ["READY"]).touch()


@loop.before_step
def operator(step: int) -> None:
    if step == 70 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    loop.run(100_000)
