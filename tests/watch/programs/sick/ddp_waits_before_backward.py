"""A scheduler asks a service for the loss scale before each backward; the service of rank 3 does not answer.

who: 3
why: unproven
Rank 3 waits on a condition before `backward`; the others are in `loss.backward()` under DDP.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


class ScaleService:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.scale: dict[int, float] = {}

    def answer(self, step: int) -> None:
        with self.changed:
            self.scale[step] = 2.0 ** (step % 4)
            self.changed.notify_all()

    def ask(self, step: int) -> float:
        with self.changed:
            self.changed.wait_for(lambda: step in self.scale)
            return self.scale[step]


class Trainer:
    def __init__(self) -> None:
        self.model = DistributedDataParallel(torch.nn.Linear(20, 20))
        self.service = ScaleService()
        self.rank = dist.get_rank()

    def train_step(self, step: int) -> None:
        if (self.rank, step) != (3, 50):
            threading.Timer(0.01, self.service.answer, (step,)).start()
        loss = self.model(torch.randn(2, 20)).mean()
        loss = loss * self.service.ask(step)
        loss.backward()
        self.model.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    trainer = Trainer()
    for step in range(10_000):
        if step == 50:
            Path(os.environ["READY"]).touch()
        trainer.train_step(step)
        time.sleep(0.04)
