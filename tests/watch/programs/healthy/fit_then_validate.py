"""Loops within loops, as Lightning has them: fit calls validate, and one rank's metric takes long there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Callback:
    def on_validation_end(self, trainer: Trainer) -> None: ...

    def on_epoch_end(self, trainer: Trainer) -> None: ...


class SlowMetric(Callback):
    def on_validation_end(self, trainer: Trainer) -> None:
        if trainer.epoch == 1 and trainer.rank == 1:
            Path(os.environ["READY"]).touch()
            self.edit_distances(9.0)

    def edit_distances(self, seconds: float) -> int:
        ends, total = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            a, b = "intention" * 4, "execution" * 4
            row = list(range(len(b) + 1))
            for i, left in enumerate(a, 1):
                above, row[0] = row[0], i
                for j, right in enumerate(b, 1):
                    above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (left != right))
            total += row[-1]
        return total


class Trainer:
    def __init__(self, callbacks: list[Callback]) -> None:
        self.rank = dist.get_rank()
        self.callbacks = callbacks
        self.model = torch.nn.Linear(8, 2)
        self.epoch = 0

    def fit(self, epochs: int) -> None:
        for self.epoch in range(epochs):
            for _ in range(5):
                self.training_step(torch.randn(4, 8))
            self.validate()
            for callback in self.callbacks:
                callback.on_epoch_end(self)

    def training_step(self, batch: torch.Tensor) -> None:
        self.model.zero_grad()
        self.model(batch).pow(2).mean().backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        dist.all_reduce(flat)

    @torch.no_grad()
    def validate(self) -> float:
        losses = [self.model(torch.randn(4, 8)).pow(2).mean() for _ in range(3)]
        for callback in self.callbacks:
            callback.on_validation_end(self)
        return self.reduced(torch.stack(losses).mean())

    def test(self) -> float:
        with torch.no_grad():
            return self.reduced(self.model(torch.ones(1, 8)).sum())

    def reduced(self, value: torch.Tensor) -> float:
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
trainer = Trainer([SlowMetric()])
trainer.fit(3)
trainer.test()
dist.destroy_process_group()
