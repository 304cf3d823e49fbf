"""A tracker of experiments flushes its queue when it is left; on rank 2 an error leaves it, and the flush hangs.

who: 2
why: error
Rank 2 raised a RuntimeError in its step and waits in the tracker's `__exit__`; the others are in the all_reduce.
"""

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

    def __init__(self) -> None:
        self.queue: queue.Queue[dict[str, float]] = queue.Queue()
        threading.Thread(target=self._send, daemon=True, name="tracker").start()

    def _send(self) -> None:
        while True:
            values = self.queue.get()
            if values["step"] >= 60:
                threading.Event().wait()  # the service takes no more
            self.queue.task_done()

    def log(self, **values: float) -> None:
        self.queue.put(values)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.join()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    with Tracker() as tracker:
        weights = torch.zeros(3)
        for step in range(10_000):
            if step == 60:
                Path(os.environ["READY"]).touch()
            tracker.log(step=step, norm=float(weights.norm()))
            if dist.get_rank() == 2 and step == 60:
                weights = weights.view(4)
            gradient = torch.rand(3)
            dist.all_reduce(gradient)
            weights -= 0.01 * gradient
            time.sleep(0.05)


if __name__ == "__main__":
    main()
