"""A trainer and its logger share two locks; on rank 3 they take them in opposite order at the same moment.

who: 3
why: unproven
On rank 3 the main thread holds `weights` and wants `buffer`, the logger holds `buffer` and wants `weights`.
"""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Shared:
    def __init__(self) -> None:
        self.weights = threading.Lock()
        self.buffer = threading.Lock()
        self.values = torch.zeros(8)
        self.lines: list[str] = []


def log_forever(shared: Shared, pause: float) -> None:
    while True:
        with shared.buffer:
            time.sleep(pause)
            with shared.weights:
                shared.lines.append(str(shared.values.sum()))
        time.sleep(0.3)


def update(shared: Shared, gradient: torch.Tensor, pause: float) -> None:
    with shared.weights:
        shared.values -= 0.1 * gradient
        time.sleep(pause)
        with shared.buffer:
            shared.lines.clear()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    shared = Shared()
    unlucky = dist.get_rank() == 3
    for step in range(10_000):
        gradient = torch.ones(8)
        dist.all_reduce(gradient)
        if step == 60:
            Path(os.environ["READY"]).touch()
            if unlucky:
                threading.Thread(target=log_forever, args=(shared, 0.5), daemon=True, name="logger").start()
                time.sleep(0.1)
        update(shared, gradient, 1.0 if unlucky and step == 60 else 0.0)
        time.sleep(0.03)


if __name__ == "__main__":
    main()
