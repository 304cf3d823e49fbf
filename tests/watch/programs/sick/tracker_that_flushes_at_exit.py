"""A tracker of experiments flushes at exit; rank 1 ends by an error that nobody catches, and the flush hangs.

who: 1
why: error
Rank 1 raised an AttributeError and is in an atexit handler, in `queue.join`; the others are in the all_reduce.
"""

import atexit
import os
import queue
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Tracker:
    """Sends values to a service on a thread of its own."""

    def __init__(self, capacity: int) -> None:
        self.queue: queue.Queue[float] = queue.Queue()
        self.capacity = capacity
        threading.Thread(target=self._send, daemon=True, name="tracker").start()
        atexit.register(self.finish)

    def _send(self) -> None:
        for _ in range(self.capacity):
            self.queue.get()
            self.queue.task_done()

    def log(self, value: float) -> None:
        self.queue.put(value)

    def finish(self) -> None:
        print("waiting for the tracker")
        self.queue.join()


class Scheduler:
    def __init__(self, rank: int) -> None:
        if rank != 1:
            self.warmup = 100

    def rate(self, step: int) -> float:
        return 0.01 if step < 60 else 0.01 * self.warmup / step


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    tracker, scheduler = Tracker(capacity=50), Scheduler(dist.get_rank())
    for step in range(10_000):
        if step == 60:
            Path(os.environ["READY"]).touch()
        tracker.log(scheduler.rate(step))
        dist.all_reduce(torch.rand(3))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
