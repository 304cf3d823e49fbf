"""Gradients are summed with handles while a callback runs; the callback of rank 2 joins a thread that never ends.

who: 2
why: unproven
Rank 2 has begun fewer collectives, and is in `Thread.join`; the others wait for their handles.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Overlap:
    def __init__(self) -> None:
        self.handles: list[dist.Work] = []

    def begin(self, tensor: torch.Tensor) -> None:
        handle = dist.all_reduce(tensor, async_op=True)
        assert handle is not None
        self.handles.append(handle)

    def finish(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class Plotter:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def draw(self, is_open: bool) -> None:
        window = threading.Thread(
            target=self.closed.wait if is_open else time.time, name="window", daemon=True
        )
        window.start()
        window.join()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    overlap, plotter = Overlap(), Plotter()
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        for layer in range(4):
            overlap.begin(torch.rand(10))
            plotter.draw(is_open=(dist.get_rank(), step, layer) == (2, 40, 1))
        overlap.finish()
        time.sleep(0.05)


if __name__ == "__main__":
    main()
