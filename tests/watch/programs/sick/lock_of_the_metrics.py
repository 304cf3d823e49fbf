"""A trainer with a metrics thread: on rank 2 that thread keeps the lock that the step needs.

who: 2
why: unproven
The metrics thread of rank 2 holds the lock while it waits for a collector that never accepts; `step` waits for it.
"""

import os
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Metrics:
    def __init__(self, rank: int) -> None:
        self.lock = threading.Lock()
        self.rank = rank
        self.values: list[float] = []

    def add(self, value: float) -> None:
        with self.lock:
            self.values.append(value)

    def flush(self, address: tuple[str, int]) -> None:
        with self.lock, socket.create_connection(address) as collector:
            collector.sendall(repr(self.values).encode())
            collector.recv(1)


def train(rank: int) -> None:
    model = torch.nn.Linear(4, 4)
    metrics = Metrics(rank)
    server = socket.create_server(("127.0.0.1", 0))
    for step in range(1000):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        if rank == 2 and step == 20:
            threading.Thread(target=metrics.flush, args=(server.getsockname(),), daemon=True).start()
            time.sleep(0.2)
        if step == 20:
            Path(os.environ["READY"]).touch()
        metrics.add(float(loss))
        time.sleep(0.05)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    train(dist.get_rank())
