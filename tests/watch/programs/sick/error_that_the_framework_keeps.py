"""A framework catches errors of `fit`, tells its callbacks, and waits for their reports before it raises again.

who: 3
why: error
Rank 3 raised a ZeroDivisionError in its step; its framework waits in a callback, the others in the all_reduce.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Callback:
    def on_exception(self, error: BaseException) -> None: ...


class Reporter(Callback):
    def __init__(self) -> None:
        self.sent = threading.Event()

    def on_exception(self, error: BaseException) -> None:
        print(f"reporting {error!r}")
        self.sent.wait()


class Framework:
    def __init__(self, callbacks: list[Callback]) -> None:
        self.callbacks = callbacks

    def fit(self, module) -> None:
        try:
            for step in range(10_000):
                module.training_step(step)
        except Exception as error:
            for callback in self.callbacks:
                callback.on_exception(error)
            raise


class Module:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def training_step(self, step: int) -> None:
        if step == 60:
            Path(os.environ["READY"]).touch()
        tokens = 0 if (self.rank, step) == (3, 60) else 16
        loss = torch.tensor([32 / tokens])
        dist.all_reduce(loss)
        time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    Framework([Reporter()]).fit(Module(dist.get_rank()))
