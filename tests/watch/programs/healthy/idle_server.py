"""An engine without requests: rank 0 waits for one in a queue, its workers wait for what rank 0 broadcasts."""

import os
import queue
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast

STOP = None


class Engine:
    def __init__(self) -> None:
        self.requests: queue.Queue[str | None] = queue.Queue()
        self.weight = torch.randn(8, 8)

    def forward(self, prompt: str) -> float:
        hidden = torch.full((8,), float(len(prompt))) @ self.weight
        dist.all_reduce(hidden)
        return hidden.sum().item()

    def serve(self) -> None:
        while True:
            prompt = self.requests.get()
            dist.broadcast_object_list([prompt], src=0)
            if prompt is STOP:
                return
            self.forward(prompt)

    def worker_loop(self) -> None:
        while True:
            box = [None]
            dist.broadcast_object_list(box, src=0)
            match box:
                case [None]:
                    return
                case [str(prompt)]:
                    self.forward(prompt)


def clients(requests: queue.Queue) -> None:
    for prompt in ("hello", "how are you"):
        requests.put(prompt)
        time.sleep(0.2)
    Path(os.environ["READY"]).touch()
    time.sleep(9)
    for prompt in ("are you still there?", STOP):
        requests.put(prompt)


torch.set_num_threads(1)
dist.init_process_group("gloo")
holdfast.install(checkpoints=False, guard=False)
engine = Engine()
if dist.get_rank() == 0:
    threading.Thread(target=clients, args=(engine.requests,), name="http").start()
    engine.serve()
else:
    engine.worker_loop()
dist.destroy_process_group()
