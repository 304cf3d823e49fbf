"""A background evaluation sets a flag when it is done; on rank 3 its callback was never registered.

who: 3
why: unproven
Rank 3 looks at the flag again and again without a pause; the others are in the all_reduce of the loss.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Evaluation:
    """Calls what is registered as soon as it is done."""

    def __init__(self) -> None:
        self.is_done = False
        self._callbacks = []

    def on_done(self, callback) -> None:
        self._callbacks.append(callback)

    def run(self) -> None:
        for callback in self._callbacks:
            callback()

    def mark(self) -> None:
        self.is_done = True


def evaluate(rank: int, step: int) -> None:
    evaluation = Evaluation()
    if not (rank == 3 and step == 40):
        evaluation.on_done(evaluation.mark)
    evaluation.run()
    while not evaluation.is_done:
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        if step % 10 == 0:
            evaluate(dist.get_rank(), step)
        loss = torch.rand(1)
        dist.all_reduce(loss)
        time.sleep(0.06)
